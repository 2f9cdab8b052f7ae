"""Ask a service whether it serves: exit code 0 for yes, 1 for anything else.

python -m dialoop_services.runtime.probe 127.0.0.1:7002 dialoop.v1.InferenceService
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence


def status_of(address: str, *, service: str = "", timeout_s: float = 3.0) -> str:
    """Return the health of `service` (empty: the server): "SERVING", or another status's name."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name) if isinstance(error, grpc.Call) else type(error).__name__
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: an address, and the full name of a service. Return the exit code."""
    parser = argparse.ArgumentParser(description="Exit 0 when the server reports SERVING.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("service", nargs="?", default="", help="default: the server as a whole")
    options = parser.parse_args(arguments)
    status = status_of(options.address, service=options.service)
    sys.stdout.write(f"{status}\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
