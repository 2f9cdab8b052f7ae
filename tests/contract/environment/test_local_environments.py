"""Environments in this process answer and refuse as the environment service does."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from dialoop import errors
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient, ResetItem, StepItem
from dialoop.environments import (
    ArithmeticTasks,
    ChatEnv,
    ExactResult,
    Score,
    Transform,
    arithmetic,
    tool_environment,
)
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.sessions.records import SessionLimits
from dialoop.episode import StepResult
from dialoop.errors import DialoopError
from dialoop.local.client import LocalEnvironmentClient
from dialoop.trajectory import DoneReason, Owner, Trajectory
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.environment_doors import at, open_session, reason_of
from tests.support.waiting import PATIENCE_S

KEY = ArithmeticTasks().keys("train")[0]
ANSWER = ArithmeticTasks().get("train", KEY).answer
CALL = f"<request><Calculator>{KEY}<call>"
SUBMIT = f"Result={ANSWER}<submit>"


def broken(query: str) -> str:
    raise RuntimeError("secret")


class Unreadable(ArithmeticTasks):
    """Tasks that are lost on the way."""

    def get(self, split: str, key: str):
        if key == "odd":
            raise errors.InvalidHistory("The task is no history.", reason="BAD_TASK")
        raise OSError("secret")


def environments():
    failing = tool_environment(
        name="failing", tasks=ArithmeticTasks(), tools=[broken], rewards=[ExactResult()]
    )
    return [arithmetic(), failing, replace(arithmetic(), name="unreadable", tasks=Unreadable())]


@asynccontextmanager
async def both():
    async with (
        serving(EnvironmentSettings(), Catalogue(environments())) as server,
        Channel(server.address) as channel,
    ):
        yield EnvironmentClient(channel), LocalEnvironmentClient(*environments())


def response(text: str) -> ChatHistory:
    return ChatHistory(response=History((Message(role="assistant", content=text),)))


def step(text: str, index: int = 0, episode: int = 1, session: str = "s") -> StepItem:
    return StepItem(session_id=session, episode=episode, step_index=index, history=response(text))


def create(session="s", environment="arithmetic", **more):
    return ("create_session", (session, environment), more)


def reset(episode=1, split="train", key=KEY, seed=0, session="s"):
    return (
        "reset",
        (session,),
        {"episode": episode, "split": split, "task_key": key, "seed": seed},
    )


def take(text, index=0, episode=1, session="s"):
    fields = {"episode": episode, "step_index": index, "history": response(text)}
    return ("step", (session,), fields)


def move_on(text, index, key=KEY):
    return ("step_and_reset", (step(text, index),), {"next_split": "train", "next_task_key": key})


GET = ("get_session", ("s",), {})
CLOSE = ("close_session", ("s",), {})
REWRITTEN = History((Message(role="user", content="other"),))
OPENED = [create(), reset()]
CASES = {
    "an episode": [*OPENED, GET, take(CALL), GET, take(SUBMIT, 1), GET, CLOSE, CLOSE],
    "retries": [*OPENED, reset(), take(CALL), take(CALL), take(SUBMIT), take(SUBMIT, 1), reset(2)],
    "retries after the next reset": [*OPENED, take(SUBMIT), reset(2), take(SUBMIT), take(CALL)],
    "another reset of the same episode": [*OPENED, reset(seed=1), reset(key="1+1")],
    "gaps": [create(), take(CALL), reset(2), reset(0), reset(), take(CALL, 1), take(CALL, -1)],
    "a gap of episodes": [*OPENED, take(CALL, episode=2), take(CALL, episode=0)],
    "an episode that is over": [*OPENED, take(SUBMIT), take(CALL, 1), take(SUBMIT)],
    "forgotten episodes": [*OPENED, reset(2), reset(3), reset(1), take(CALL)],
    "ids": [create(""), create("x" * 201), create(ttl_s=0.0), create(ttl_s=1e9), create(ttl_s=5)],
    "another environment": [create(), create(environment="failing"), create(environment="no")],
    "no session": [GET, reset(), take(CALL), CLOSE],
    "unknown tasks": [create(), reset(split="no"), reset(key="no"), reset()],
    "move on": [*OPENED, move_on(CALL, 0), move_on(SUBMIT, 1), move_on(SUBMIT, 1), GET],
    "move on to nothing": [*OPENED, move_on(SUBMIT, 0, key="no"), GET],
    "a failing tool": [
        create(environment="failing"),
        reset(),
        take("<request><broken>1<call>"),
        take("<request><broken>1<call>"),
        GET,
    ],
    "an environment that raises": [
        create(environment="unreadable"),
        reset(),
        reset(key="odd"),
        reset(),
    ],
    "a rewritten history": [
        *OPENED,
        ("step", ("s",), {"episode": 1, "step_index": 0, "history": ChatHistory(full=REWRITTEN)}),
        ("step", ("s",), {"episode": 1, "step_index": 0, "history": ChatHistory()}),
        take(CALL),
    ],
    "batches": [
        *OPENED,
        ("batch_step", ([step(CALL), step(CALL, session="no")],), {}),
        (
            "batch_reset",
            (
                [
                    ResetItem(session_id="s", episode=2, split="train", task_key=KEY),
                    ResetItem(session_id="s", episode=9, split="train", task_key=KEY),
                ],
            ),
            {},
        ),
    ],
    "descriptions": [
        ("list_environments", (), {}),
        ("get_environment", ("arithmetic",), {}),
        ("get_environment", ("no",), {}),
        ("list_tasks", ("arithmetic",), {"split": "train", "page_size": 3, "shuffle_seed": 1}),
        ("list_tasks", ("arithmetic",), {"split": "train", "page_token": "no"}),
        ("list_tasks", ("arithmetic",), {"split": "no"}),
    ],
}


def comparable(answer: object) -> object:
    if isinstance(answer, tuple):
        return tuple(comparable(item) for item in answer)
    if isinstance(answer, DialoopError):
        return type(answer), answer.reason
    if isinstance(answer, StepResult):  # the message of a failure holds a random error_id
        failures = tuple(replace(failure, message="") for failure in answer.failures)
        return replace(answer, failures=failures)
    if hasattr(answer, "expires_in_s"):
        return replace(answer, expires_in_s=0.0)
    return answer


async def ask(client, name, arguments, fields) -> object:
    try:
        return comparable(await getattr(client, name)(*arguments, **fields))
    except DialoopError as error:
        return comparable(error)


@pytest.mark.parametrize("calls", CASES.values(), ids=CASES.keys())
async def test_the_service_and_this_process_agree(calls):
    async with both() as (service, local):
        for name, arguments, fields in calls:
            remote = await ask(service, name, arguments, fields)
            assert await ask(local, name, arguments, fields) == remote, (name, arguments, fields)


async def test_what_an_environment_raises_is_there_for_its_author():
    local = LocalEnvironmentClient(*environments())
    await local.create_session("s", "unreadable")
    with pytest.raises(errors.InternalError, match="OSError: secret") as caught:
        await local.reset("s", episode=1, split="train", task_key=KEY)
    assert isinstance(caught.value.__cause__, OSError)


async def test_a_finished_trajectory_gets_the_same_rewards(play_once):
    async with both() as (service, local):
        trajectory = await play_once(local)
        assert (
            await service.score(trajectory, split="train")
            == await local.score(trajectory, split="train")
            == (Score(), Score(rewards=trajectory.turns[-1].rewards))
        )


@pytest.fixture
def play_once():
    async def play_twice(local: LocalEnvironmentClient) -> Trajectory:
        from dialoop.clients.connection import Dialoop
        from dialoop.rollout import play
        from dialoop.testing import ScriptedPolicy

        async with Dialoop(environment=arithmetic()) as dialoop:
            task = await dialoop.task("arithmetic", KEY)
        return await play(task, sessions=local, policy=ScriptedPolicy([CALL, SUBMIT]))

    return play_twice


class Gate:
    """A tool that waits to be let through, and counts its runs."""

    name = "gate"

    def __init__(self) -> None:
        self.runs = 0
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, query: str) -> str:
        self.runs += 1
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "through"


@asynccontextmanager
async def serve_gate(door: str, **limits: float):
    """A client at one door, with a session at the start of an episode whose tool hangs."""
    gate = Gate()
    environment = tool_environment(name="gated", tasks=ArithmeticTasks(), tools=[gate], rewards=[])
    if door == "in_process":
        async with LocalEnvironmentClient(environment, limits=SessionLimits(**limits)) as client:
            await open_session(client, "gated", split="train", task_key=KEY)
            yield client, gate
        return
    async with at(door, environment, **limits) as client:
        await open_session(client, "gated", split="train", task_key=KEY)
        yield client, gate


def ending(result: StepResult) -> tuple[object, ...]:
    """How a step ended, and who was at fault."""
    faults = [(failure.owner, failure.reason) for failure in result.failures]
    return faults, result.truncated, result.done_reason, result.rewards


HANG = "<request><gate>x<call>"


@pytest.mark.parametrize("door", ["in_process", "sdk"])
async def test_a_step_that_outlasts_its_time_fails_and_is_never_run_again(door):
    async with serve_gate(door, step_timeout_s=0.3) as (client, gate):
        late = await client.step("s", episode=1, step_index=0, history=response(HANG))
        assert ending(late) == (
            [(Owner.ENVIRONMENT, "STEP_TIMEOUT")],
            True,
            DoneReason.ERROR,
            (),
        )
        assert gate.cancelled.is_set()
        again = await client.step("s", episode=1, step_index=0, history=response(HANG))
        assert again == replace(late, replayed=True)
        assert gate.runs == 1
        assert (await client.get_session("s")).done


@pytest.mark.parametrize("door", ["in_process", "sdk"])
async def test_a_step_that_nobody_comes_back_for_is_cancelled_with_its_tool(door):
    async with serve_gate(door, abandon_s=0.2) as (client, gate):
        asking = asyncio.create_task(
            client.step("s", episode=1, step_index=0, history=response(HANG))
        )
        await gate.entered.wait()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(PATIENCE_S):
            await gate.cancelled.wait()
        again = await client.step("s", episode=1, step_index=0, history=response(HANG))
        assert again.replayed
        assert ending(again) == (
            [(Owner.ENVIRONMENT, "STEP_CANCELLED")],
            True,
            DoneReason.ERROR,
            (),
        )
        assert gate.runs == 1
        assert (await client.reset("s", episode=2, split="train", task_key=KEY)).history.prompt


@pytest.mark.parametrize("door", ["in_process", "sdk"])
async def test_a_step_is_known_again_however_its_answer_is_sent_and_another_is_refused(door):
    async with at(door, arithmetic()) as client:
        opening = await open_session(client, "arithmetic", split="train", task_key=KEY)
        spoken = Message(role="assistant", content=CALL)
        first = await client.step(
            "s", episode=1, step_index=0, history=opening.history.respond(spoken)
        )
        # Equal words in objects of their own are the same answer, whole or alone.
        prompt = History(tuple(replace(message) for message in opening.history.prompt))
        same = ChatHistory(prompt=prompt).respond(replace(spoken))
        for sent in (same, response(CALL), replace(same, prompt=None), replace(same, full=None)):
            again = await client.step("s", episode=1, step_index=0, history=sent)
            assert again == replace(first, replayed=True)
        longer = same.full.append(Message(role="user", content="and"))
        for other in (response(SUBMIT), ChatHistory(full=longer), ChatHistory(full=History())):
            step_again = client.step("s", episode=1, step_index=0, history=other)
            assert await reason_of(step_again) == "STEP_CONFLICT"


async def test_an_answer_with_a_list_for_a_tuple_is_known_again_in_this_process():
    local = LocalEnvironmentClient(arithmetic())
    await open_session(local, "arithmetic", split="train", task_key=KEY)
    results = []
    for _ in range(2):
        message = Message(role="assistant", content=CALL, tool_responses=["one"])  # type: ignore[arg-type]
        answer = ChatHistory(response=History((message,)))
        results.append(await local.step("s", episode=1, step_index=0, history=answer))
    assert [result.replayed for result in results] == [False, True]


async def test_leaving_this_process_client_lets_go_of_episodes_before_their_environment():
    events = []

    class Holds(Transform):
        async def close(self, episode):
            await asyncio.sleep(0.05)
            events.append("closed")

        async def release(self):
            events.append("released")

    environment = ChatEnv(name="held", tasks=ArithmeticTasks(), transforms=(Holds(),))
    async with LocalEnvironmentClient(environment) as local:
        for session in "ab":
            await open_session(local, "held", session, split="train", task_key=KEY)
        await local.close_session("a")
    assert events == ["closed", "closed", "released"]
