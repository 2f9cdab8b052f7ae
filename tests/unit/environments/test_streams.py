"""A stream of many sessions: requests begin in their order, and none waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dialoop.environments import ChatEnv
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.sessions.engine import SessionEngine
from dialoop.environments.sessions.records import SessionLimits
from dialoop.v1 import environment_service_pb2 as pb
from dialoop_services.environment.servicer import EnvironmentServicer


class Held(ChatEnv):
    """Waits in each step until it is let go."""

    let_go = asyncio.Event()

    async def step(self, episode: Any, answered: Any) -> Any:
        """Wait, then step as all others."""
        await self.let_go.wait()
        return await ChatEnv.step(self, episode, answered)


class Written:
    """A call's context: keeps the answers in the order in which they are written."""

    def __init__(self) -> None:
        self.answers: list[pb.InteractResponse] = []
        self.num_at_once = self._num_writing = 0

    async def write(self, answer: pb.InteractResponse) -> None:
        """Take an answer; others get a turn meanwhile, as at a socket."""
        self._num_writing += 1
        self.num_at_once = max(self.num_at_once, self._num_writing)
        await asyncio.sleep(0)
        self._num_writing -= 1
        self.answers.append(answer)


def servicer(*, max_concurrent_items: int = 256) -> EnvironmentServicer:
    catalogue = Catalogue([ChatEnv(name="plain"), Held(name="held")])
    engine = SessionEngine(catalogue, SessionLimits())
    return EnvironmentServicer(catalogue, engine, max_concurrent_items=max_concurrent_items)


def requests_to_open(session: str, environment: str) -> list[pb.InteractRequest]:
    """Return the requests that open a session and reset it."""
    create = pb.CreateSessionRequest(session_id=session, environment=environment)
    reset = pb.ResetRequest(session_id=session, episode=1, query="3+4?")
    return [
        pb.InteractRequest(request_id=f"{session} create", create_session=create),
        pb.InteractRequest(request_id=f"{session} reset", reset=reset),
    ]


def step(session: str) -> pb.InteractRequest:
    response = {"messages": [{"role": "assistant", "content": "7"}]}
    request = pb.StepRequest(session_id=session, episode=1, history={"response": response})
    return pb.InteractRequest(request_id=f"{session} step", step=request)


async def stream_of(requests: Sequence[pb.InteractRequest]) -> AsyncIterator[pb.InteractRequest]:
    """Yield requests that have all arrived: no task gets a turn between them."""
    for request in requests:
        yield request


async def test_requests_that_arrive_together_begin_in_their_order():
    written = Written()
    await servicer().Interact(stream_of([*requests_to_open("a", "plain"), step("a")]), written)
    kinds = {answer.request_id: answer.WhichOneof("response") for answer in written.answers}
    assert kinds == {"a create": "create_session", "a reset": "reset", "a step": "step"}


async def test_an_item_that_waits_holds_no_later_one_and_is_answered_once():
    Held.let_go = asyncio.Event()
    written = Written()
    service = servicer()
    await service.Interact(
        stream_of([*requests_to_open("h", "held"), *requests_to_open("a", "plain")]), written
    )
    written.answers.clear()
    playing = asyncio.create_task(service.Interact(stream_of([step("h"), step("a")]), written))
    while not written.answers:
        await asyncio.sleep(0)
    assert [answer.request_id for answer in written.answers] == ["a step"]
    Held.let_go.set()
    await playing
    assert [answer.request_id for answer in written.answers] == ["a step", "h step"]
    assert all(answer.HasField("step") for answer in written.answers)


async def test_no_more_is_read_while_all_places_wait():
    Held.let_go = asyncio.Event()
    written, service = Written(), servicer(max_concurrent_items=1)
    openings = [request for name in "hij" for request in requests_to_open(name, "held")]
    await service.Interact(stream_of(openings), written)
    written.answers.clear()
    begun: list[str] = []

    async def reading() -> AsyncIterator[pb.InteractRequest]:
        for name in "hij":
            begun.append(name)
            yield step(name)

    playing = asyncio.create_task(service.Interact(reading(), written))
    for _ in range(50):
        await asyncio.sleep(0)
    assert (begun, written.answers) == (["h", "i"], [])
    Held.let_go.set()
    await playing
    assert len(written.answers) == 3


async def open_sessions(service: EnvironmentServicer, *names: str) -> None:
    openings = [request for name in names for request in requests_to_open(name, "plain")]
    await service.Interact(stream_of(openings), Written())


async def test_a_request_that_is_refused_spoils_no_other_one():
    service, written = servicer(), Written()
    await open_sessions(service, "a", "b")
    unknown = pb.InteractRequest(request_id="empty")
    await service.Interact(stream_of([step("a"), unknown, step("b")]), written)
    kinds = {answer.request_id: answer.WhichOneof("response") for answer in written.answers}
    assert kinds == {"a step": "step", "empty": "error", "b step": "step"}


async def test_answers_that_become_ready_together_are_written_one_after_the_other():
    Held.let_go = asyncio.Event()
    service, written = servicer(), Written()
    openings = [request for name in "hijk" for request in requests_to_open(name, "held")]
    await service.Interact(stream_of(openings), written)
    written.answers.clear()
    playing = asyncio.create_task(
        service.Interact(stream_of([step(name) for name in "hijk"]), written)
    )
    for _ in range(50):
        await asyncio.sleep(0)
    assert not written.answers
    Held.let_go.set()
    await playing
    assert sorted(a.request_id for a in written.answers) == [f"{name} step" for name in "hijk"]
    assert written.num_at_once == 1
