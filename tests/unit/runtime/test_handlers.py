"""Methods of a service are found by their paths, and services run on uvloop if they can."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
import pkgutil
import sys
from typing import Any, NamedTuple

from dialoop import v1
from dialoop.v1.environment_service_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)
from dialoop_services.runtime import process
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.calls import LARGE, Calls
from dialoop_services.runtime.handlers import Handlers, NoSuchMethod
from dialoop_services.runtime.process import _event_loop_factory


class Details(NamedTuple):
    """What gRPC tells of a call before it reads a message."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = (("authorization", "Bearer t"),)


def test_the_methods_of_a_service_are_found_by_their_paths():
    handlers = Handlers(Calls(), Token("t"))
    add_EnvironmentServiceServicer_to_server(EnvironmentServiceServicer(), handlers)
    step, interact = (
        handlers.service(Details(f"/dialoop.v1.EnvironmentService/{name}"))
        for name in ("Step", "Interact")
    )
    assert step is not None
    assert not step.request_streaming
    assert interact is not None
    assert interact.request_streaming
    assert interact.response_streaming
    for path in ("/dialoop.v1.EnvironmentService/Unknown", "/other.Service/Step"):
        assert handlers.service(Details(path)) is None
        assert NoSuchMethod().service(Details(path)).stream_unary is not None  # it says why


def _holds_episodes(message: Any, above: frozenset[str] = frozenset()) -> bool:
    if message.name in ("Trajectory", "Group", "RecordedTurn", "Resumed"):
        return True
    inner = (field.message_type for field in message.fields if field.message_type)
    return any(
        part.full_name not in above and _holds_episodes(part, above | {message.full_name})
        for part in inner
    )


def test_every_rpc_whose_request_holds_episodes_may_have_a_large_one():
    modules = (
        importlib.import_module(f"dialoop.v1.{module.name}")
        for module in pkgutil.iter_modules(v1.__path__)
        if module.name.endswith("_pb2")
    )
    services = [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]
    rpcs = {f"{s.name}.{r.name}": r.input_type for s in services for r in s.methods}
    assert {name for name, request in rpcs.items() if _holds_episodes(request)} == LARGE


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
