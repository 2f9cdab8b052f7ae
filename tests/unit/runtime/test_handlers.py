"""All methods of a server are found by generic handlers, and services run on uvloop if they can."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

from dialoop.v1.environment_service_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)
from dialoop_services.runtime.auth import Token
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


def test_a_service_runs_on_uvloop_and_without_it_says_so(monkeypatch, caplog):
    import uvloop

    assert _event_loop_factory() is uvloop.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with caplog.at_level(logging.INFO, logger="dialoop_services"):
        assert _event_loop_factory() is None
    assert "uvloop is not installed" in caplog.text
