"""Ask a service whether it serves: exit code 0 for yes, 1 for anything else.

python -m dialoop_services.runtime.probe 127.0.0.1:7002 dialoop.v1.InferenceService

With `--kill-after 60` it also kills a service in a container that has answered once and then
nothing for a minute, so that the container is started again: Docker only calls it unhealthy.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from dialoop.clients.tls import Tls
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence


_SILENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "FutureTimeoutError")
_INIT = 1


def status_of(address: str, *, service: str = "", timeout_s: float = 3.0) -> str:
    """Return the health of `service` (empty: the server): "SERVING", or another status's name."""
    credentials = Tls.from_environment().channel_credentials()
    with (
        grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
    ) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name) if isinstance(error, grpc.Call) else type(error).__name__
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def kill_if_hung(status: str, pid: int, after_s: float, *, folder: Path | None = None) -> bool:
    """Kill a process whose service answers nothing any more; return whether it was killed.

    "NOT_SERVING" is an answer. When it answered last is kept in a file of `folder`, since every
    probe is a new process. A process that has never answered is still starting.
    """
    stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    started_at = stat.rpartition(")")[2].split()[19]  # another process may have the number later
    last = (folder or Path(tempfile.gettempdir())) / f"dialoop-answered-{pid}-{started_at}"
    if status not in _SILENT:
        last.write_text(str(time.monotonic()), "utf-8")
        return False
    if not last.is_file() or time.monotonic() - float(last.read_text("utf-8")) < after_s:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def _service_in_container() -> int | None:
    """Return the process that the container's init has started; None without an init."""
    children = Path(f"/proc/{_INIT}/task/{_INIT}/children").read_text("utf-8").split()
    return int(children[0]) if children else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: an address, and the full name of a service. Return the exit code."""
    parser = argparse.ArgumentParser(description="Exit 0 when the server reports SERVING.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("service", nargs="?", default="", help="default: the server as a whole")
    parser.add_argument(
        "--kill-after", type=float, default=0.0, help="seconds of silence; 0 for never"
    )
    options = parser.parse_args(arguments)
    status = status_of(options.address, service=options.service)
    sys.stdout.write(f"{status}\n")
    pid = _service_in_container() if options.kill_after else None
    if pid is not None and kill_if_hung(status, pid, options.kill_after):
        sys.stdout.write(f"It has not answered for {options.kill_after:g} s and was killed.\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
