"""Run one process on a node of Ray: the actor that starts it, passes its output on and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dialoop_ops.stack.processes.child import PARENT_VARIABLE

_PORT_WAIT_S, _POLL_S = 30.0, 0.2


class RayWorker:
    """An actor with one process of a job, which ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Path(tempfile.mkdtemp(prefix="dialoop-ray-")) / "output"
        self._num_read = 0

    def host(self) -> str:
        """Return where other nodes reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None,
        ports: Sequence[int],
    ) -> int:
        """Start the process once its ports are free, and return its pid.

        After a node was lost, what ran there may hold them for some seconds.
        """
        for port in ports:
            _wait_until_free(port)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | environment | _devices() | {PARENT_VARIABLE: str(os.getpid())},
                cwd=folder,
                start_new_session=True,
            )
        return self._process.pid

    def poll(self) -> tuple[int | None, bytes]:
        """Return the exit code, if it has ended, and what it has written since the last call."""
        assert self._process is not None
        code = self._process.poll()
        with self._output.open("rb") as output:
            output.seek(self._num_read)
            new = output.read()
        self._num_read += len(new)
        return code, new

    def send(self, number: int) -> None:
        """Send a signal to the process; SIGKILL goes to all that it started too."""
        if self._process is None or self._process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def _devices() -> dict[str, str]:
    """Return the variable of the devices that Ray gives this actor; none in a cluster without."""
    import ray

    if not ray.cluster_resources().get("GPU"):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids()))}


def _wait_until_free(port: int) -> None:
    deadline = time.monotonic() + _PORT_WAIT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("", port))
                return
        time.sleep(_POLL_S)
