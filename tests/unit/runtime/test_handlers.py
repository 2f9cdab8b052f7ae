"""All methods of a server are found by generic handlers, and services run on uvloop if they can."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from types import SimpleNamespace
from typing import Any

import grpc
from dialoop.v1.environment_service_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)
from dialoop_services.runtime import GrpcServer, ServerSettings, process
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.calls import Calls
from dialoop_services.runtime.handlers import Handlers
from dialoop_services.runtime.process import _event_loop_factory


class Recording:
    """A server that takes generic handlers alone, since grpc.aio waits for each other method."""

    def __init__(self) -> None:
        self.generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.generic.extend(handlers)


def test_one_generic_handler_finds_every_method_and_no_other():
    handlers = Handlers(Calls(), Token("t"))
    add_EnvironmentServiceServicer_to_server(EnvironmentServiceServicer(), handlers)
    server: Any = Recording()
    handlers.add_to(server)
    (methods,) = server.generic

    def find(path: str) -> Any:
        return methods.service(SimpleNamespace(method=path))

    step, interact = (
        find(f"/dialoop.v1.EnvironmentService/{name}") for name in ("Step", "Interact")
    )
    assert step is not None
    assert not step.request_streaming
    assert interact.request_streaming
    assert interact.response_streaming
    assert find("/dialoop.v1.EnvironmentService/Unknown") is None
    assert find("/other.Service/Step") is None


def test_a_server_registers_no_method_by_name(monkeypatch):
    # grpc.aio waits at every call for each method that is registered by name. `Recording` takes
    # none: not those of the service, of reflection or of the health checks.
    recording = Recording()
    monkeypatch.setattr(grpc.aio, "server", lambda **_: recording)
    server = GrpcServer(ServerSettings())
    add: Any = add_EnvironmentServiceServicer_to_server
    server.add(add, EnvironmentServiceServicer(), "dialoop.v1.EnvironmentService")
    server._build(Calls())
    paths = (
        "/dialoop.v1.EnvironmentService/Step",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    )
    for path in paths:
        details = SimpleNamespace(method=path)
        assert sum(methods.service(details) is not None for methods in recording.generic) == 1


def test_the_work_of_a_service_process_runs_on_uvloop(monkeypatch):
    monkeypatch.setattr(process, "configure_logs", lambda _: None)
    loops: list[str] = []

    async def serve() -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)

    contextvars.copy_context().run(process.run, serve, name="test")
    assert loops == ["uvloop"]


def test_a_service_runs_on_uvloop_and_without_it_says_so(monkeypatch, caplog):
    import uvloop

    assert _event_loop_factory() is uvloop.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with caplog.at_level(logging.INFO, logger="dialoop_services"):
        assert _event_loop_factory() is None
    assert "uvloop is not installed" in caplog.text
