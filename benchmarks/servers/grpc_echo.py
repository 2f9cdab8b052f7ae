"""Serve steps that do nothing with grpc.aio alone, to compare with the services' gRPC server.

It has no token, no sessions and no counts. The messages and the event loop are those of the
environment service.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import grpc
import uvloop
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)

_ADDED = {"messages": [{"role": "user", "content": "go on"}]}


class _Echo(EnvironmentServiceServicer):
    async def CreateSession(self, request: Any, context: Any) -> pb.CreateSessionResponse:  # noqa: N802
        return pb.CreateSessionResponse(session_id=request.session_id)

    async def Reset(self, request: Any, context: Any) -> pb.ResetResponse:  # noqa: N802
        return pb.ResetResponse()

    async def Step(self, request: Any, context: Any) -> pb.StepResponse:  # noqa: N802
        return pb.StepResponse(added=_ADDED)


class _Methods(grpc.GenericRpcHandler):
    def add_generic_rpc_handlers(self, _: Any) -> None:
        """Do nothing: the same methods are registered by name."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        """Take the methods."""
        self._methods = {f"/{service}/{name}": handler for name, handler in methods.items()}

    def service(self, handler_call_details: Any) -> Any:
        """Return the method of a call."""
        return self._methods.get(handler_call_details.method)


async def serve() -> None:
    """Listen on a free port, say which, and serve until this is killed."""
    methods = _Methods()
    add_EnvironmentServiceServicer_to_server(_Echo(), methods)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
