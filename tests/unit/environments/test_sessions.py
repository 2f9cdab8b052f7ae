"""Facts of sessions: idempotent, in order, expiring, and one step at a time."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments import ArithmeticTasks, ExactResult, TaskChoice, tool_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.environments.sessions.engine import open_sessions
from dialoop.environments.sessions.records import ResetCall, SessionLimits, StepCall
from dialoop.errors import (
    AlreadyExists,
    Busy,
    CapacityExhausted,
    DialoopError,
    InvalidConfig,
    InvalidInput,
    NotFound,
    PreconditionFailed,
)
from dialoop.trajectory import Owner
from dialoop_services.environment.settings import EnvironmentEntry, EnvironmentSettings
from dialoop_services.runtime import load

from tests.support.waiting import PATIENCE_S

TASKS = ArithmeticTasks()
KEY, OTHER_KEY = TASKS.keys("train")[:2]
CALL = "<request><gate>x<call>"


class Gate:
    """A tool that counts its runs and waits to be let through."""

    name = "gate"

    def __init__(self, *, is_open: bool = True) -> None:
        self.runs = 0
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        if is_open:
            self.open.set()

    async def __call__(self, query: str) -> str:
        self.runs += 1
        self.entered.set()
        await self.open.wait()
        return f"answer {self.runs}"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def environment(gate: Gate, name: str = "gated"):
    return tool_environment(name=name, tasks=TASKS, tools=[gate], rewards=[ExactResult()])


@asynccontextmanager
async def open_engine(gate: Gate, clock: Clock | None = None, **limits):
    catalogue = Catalogue([environment(gate), environment(gate, "other")])
    async with open_sessions(
        catalogue, SessionLimits(**limits), clock=clock or Clock()
    ) as sessions:
        yield sessions


def reset_call(session_id: str = "s", episode: int = 1, key: str = KEY) -> ResetCall:
    choice = TaskChoice(split="train", task_key=key)
    return ResetCall(session_id=session_id, episode=episode, choice=choice)


def step_call(text: str = CALL, index: int = 0, session_id: str = "s", episode: int = 1):
    response = History((Message(role="assistant", content=text),))
    return StepCall(
        session_id=session_id,
        episode=episode,
        step_index=index,
        answered=ChatHistory(response=response),
    )


async def start_episode(sessions, session_id: str = "s") -> None:
    sessions.create(session_id, "gated")
    await sessions.reset(reset_call(session_id))


async def reason_of(awaitable) -> str:
    with pytest.raises(DialoopError) as caught:
        await awaitable
    return caught.value.reason


async def test_a_retried_step_gets_the_first_answer_and_runs_no_tool_twice():
    gate = Gate()
    async with open_engine(gate) as sessions:
        await start_episode(sessions)
        first = await sessions.step(step_call())
        again = await sessions.step(step_call())
        assert (first.replayed, again.replayed) == (False, True)
        assert again.outcome is first.outcome
        assert gate.runs == 1


async def test_an_older_step_of_the_episode_can_be_retried_too():
    async with open_engine(Gate()) as sessions:
        await start_episode(sessions)
        first = await sessions.step(step_call())
        await sessions.step(step_call(index=1))
        assert (await sessions.step(step_call())).outcome is first.outcome


async def test_retries_while_the_first_call_is_under_way_share_its_answer():
    gate = Gate(is_open=False)
    async with open_engine(gate) as sessions:
        await start_episode(sessions)
        calls = [asyncio.create_task(sessions.step(step_call())) for _ in range(5)]
        await gate.entered.wait()
        gate.open.set()
        answers = await asyncio.gather(*calls)
        assert gate.runs == 1
        assert len({id(a.outcome) for a in answers}) == 1
        assert [a.replayed for a in answers] == [False, True, True, True, True]


async def test_another_step_at_the_same_time_is_busy():
    gate = Gate(is_open=False)
    async with open_engine(gate) as sessions:
        await start_episode(sessions)
        first = asyncio.create_task(sessions.step(step_call()))
        await gate.entered.wait()
        assert await reason_of(sessions.step(step_call("other"))) == "SESSION_BUSY"
        assert await reason_of(sessions.step(step_call(index=1))) == "SESSION_BUSY"
        with pytest.raises(Busy):
            await sessions.reset(reset_call(episode=2))
        gate.open.set()
        assert not (await first).replayed


async def test_a_client_that_goes_away_finds_its_answer():
    gate = Gate(is_open=False)
    async with open_engine(gate) as sessions:
        await start_episode(sessions)
        first = asyncio.create_task(sessions.step(step_call()))
        await gate.entered.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.open.set()
        again = await sessions.step(step_call())
        assert again.replayed
        assert again.outcome.episode.history[-1].text == "answer 1<response>"
        assert gate.runs == 1


async def test_conflicts_gaps_and_the_end_of_an_episode_are_errors_and_change_nothing():
    async with open_engine(Gate()) as sessions:
        sessions.create("s", "gated")
        assert await reason_of(sessions.step(step_call())) == "STEP_GAP"
        await sessions.reset(reset_call())
        assert await reason_of(sessions.step(step_call(index=1))) == "STEP_GAP"
        assert await reason_of(sessions.step(step_call(episode=2))) == "STEP_GAP"
        assert await reason_of(sessions.step(step_call(index=-1))) == "OUT_OF_RANGE"
        await sessions.step(step_call())
        assert await reason_of(sessions.step(step_call("Result=1<submit>"))) == "STEP_CONFLICT"
        await sessions.step(step_call("Result=1<submit>", index=1))
        assert sessions.state("s").done
        assert await reason_of(sessions.step(step_call(index=2))) == "EPISODE_DONE"
        assert (await sessions.step(step_call())).replayed


async def test_a_bad_history_costs_no_step():
    async with open_engine(Gate()) as sessions:
        await start_episode(sessions)
        bad = StepCall(session_id="s", episode=1, step_index=0, answered=ChatHistory())
        assert await reason_of(sessions.step(bad)) == "FULL_MISSING"
        assert not (await sessions.step(step_call())).replayed


async def test_resets_are_idempotent_and_in_order():
    async with open_engine(Gate()) as sessions:
        sessions.create("s", "gated")
        with pytest.raises(InvalidInput):
            await sessions.reset(reset_call(episode=0))
        first = await sessions.reset(reset_call())
        assert await sessions.reset(reset_call()) is first
        for call, reason in [
            (reset_call(key=OTHER_KEY), "STEP_CONFLICT"),
            (reset_call(episode=3), "STEP_GAP"),
            (reset_call(episode=2, key="nope"), "TASK_NOT_FOUND"),
        ]:
            with pytest.raises(DialoopError) as caught:
                await sessions.reset(call)
            assert caught.value.reason == reason
        assert sessions.get("s").episode_number == 1
        await sessions.reset(reset_call(episode=2, key=OTHER_KEY))
        await sessions.reset(reset_call(episode=3))
        with pytest.raises(DialoopError) as caught:
            await sessions.reset(reset_call(episode=1))
        assert caught.value.reason == "STEP_CONFLICT"
        assert await reason_of(sessions.step(step_call(episode=1))) == "EPISODE_DONE"
        assert await reason_of(sessions.step(step_call(episode=2))) == "EPISODE_DONE"


async def test_step_and_reset_is_idempotent_and_an_unknown_next_task_costs_no_step():
    async with open_engine(Gate()) as sessions:
        await start_episode(sessions)
        step = step_call("Result=1<submit>")
        unknown = sessions.step_and_reset(step, reset_call(episode=2, key="nope"))
        assert await reason_of(unknown) == "TASK_NOT_FOUND"
        following = reset_call(episode=2, key=OTHER_KEY)
        first, opening = await sessions.step_and_reset(step, following)
        assert not first.replayed
        await sessions.step(step_call(episode=2))
        again, opening_again = await sessions.step_and_reset(step, following)
        assert again.replayed
        assert opening_again is opening
        middle, none = await sessions.step_and_reset(
            step_call(episode=2, index=1), reset_call(episode=3)
        )
        assert none is None
        assert not middle.outcome.episode.done


async def test_creating_twice_finds_the_same_session_and_another_environment_conflicts():
    async with open_engine(Gate()) as sessions:
        assert sessions.create("s", "gated") is sessions.create("s", "gated")
        with pytest.raises(AlreadyExists) as caught:
            sessions.create("s", "other")
        assert caught.value.reason == "SESSION_CONFLICT"
        with pytest.raises(NotFound):
            sessions.create("t", "unknown")
        for bad_id in ("", "x" * 201):
            with pytest.raises(InvalidInput):
                sessions.create(bad_id, "gated")
        for ttl_s in (0.0, -1.0, float("nan"), float("inf"), 1e9):
            with pytest.raises(InvalidInput):
                sessions.create("t", "gated", ttl_s)
        assert len(sessions) == 1


async def test_expired_and_lost_sessions_are_told_apart():
    clock = Clock()
    async with open_engine(Gate(), clock, ttl_s=10.0) as sessions:
        sessions.create("s", "gated")
        clock.now = 9.0
        await sessions.reset(reset_call())
        clock.now = 18.0
        assert sessions.state("s").expires_in_s == 1.0
        clock.now = 19.0
        for _ in range(2):
            assert await reason_of(sessions.step(step_call())) == "SESSION_EXPIRED"
        assert await reason_of(sessions.step(step_call(session_id="t"))) == "SESSION_LOST"
        sessions.create("s", "gated")
        assert sessions.state("s").episode == 0


async def test_the_reaper_runs_by_itself_and_spares_a_step_under_way():
    clock, gate = Clock(), Gate(is_open=False)
    async with open_engine(gate, clock, reap_interval_s=0.01) as sessions:
        await start_episode(sessions)
        sessions.create("idle", "gated", 5.0)
        step = asyncio.create_task(sessions.step(step_call()))
        await gate.entered.wait()
        clock.now = 1e6
        await _until(lambda: len(sessions) == 1)
        await asyncio.sleep(0.05)
        assert len(sessions) == 1
        gate.open.set()
        assert not (await step).replayed
        clock.now = 2e6
        await _until(lambda: len(sessions) == 0)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_capacity_is_a_limit_that_expired_and_closed_sessions_free():
    clock = Clock()
    async with open_engine(Gate(), clock, capacity=2, ttl_s=10.0) as sessions:
        sessions.create("a", "gated")
        sessions.create("b", "gated", 100.0)
        with pytest.raises(CapacityExhausted):
            sessions.create("c", "gated")
        assert sessions.create("a", "gated").session_id == "a"
        clock.now = 50.0
        sessions.create("c", "gated")
        assert sessions.close("b")
        assert not sessions.close("b")
        sessions.create("d", "gated")
        assert await reason_of(sessions.step(step_call(session_id="b"))) == "SESSION_LOST"


async def test_the_ids_of_expired_sessions_are_bounded():
    clock = Clock()
    async with open_engine(Gate(), clock, capacity=2, ttl_s=1.0) as sessions:
        for number in range(5):
            sessions.create(str(number), "gated")
            clock.now += 2.0
        assert await reason_of(sessions.step(step_call(session_id="4"))) == "SESSION_EXPIRED"
        assert await reason_of(sessions.step(step_call(session_id="0"))) == "SESSION_LOST"


class Crashing:
    """An environment whose step is broken."""

    name, version, description, tasks = "crashing", "1", "", TASKS

    def __init__(self) -> None:
        self._inner = environment(Gate())

    @property
    def traits(self):
        return self._inner.traits

    def reset(self, task, seed):
        return self._inner.reset(task, seed)

    async def step(self, episode, answered):
        raise RuntimeError("secret")


async def test_a_crashing_environment_is_a_failure_with_an_owner():
    async with open_sessions(Catalogue([Crashing()]), SessionLimits()) as sessions:
        sessions.create("s", "crashing")
        await sessions.reset(reset_call())
        outcome = (await sessions.step(step_call())).outcome
        (failure,) = outcome.failures
        assert (failure.owner, failure.reason) == (Owner.ENVIRONMENT, "STEP_FAILED")
        assert "secret" not in failure.message
        assert outcome.episode.truncated
        assert outcome.rewards == ()
        assert len(outcome.history.prompt) == 2


def test_two_environments_of_one_name_are_rejected():
    with pytest.raises(InvalidConfig):
        Catalogue([environment(Gate()), environment(Gate())])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("arithmetic", ["arithmetic"]),
        ("arithmetic, a.b:c", ["arithmetic", "a.b:c"]),
        ('["x:y", {"use": "jsonl", "options": {"path": "p"}}]', ["x:y", "jsonl"]),
    ],
)
def test_environments_are_named_by_commas_or_json(monkeypatch, text, names):
    monkeypatch.setenv("DIALOOP_ENVIRONMENT_ENVIRONMENTS", text)
    assert [entry.use for entry in load(EnvironmentSettings).entries] == names


@pytest.mark.parametrize("text", ["", "[", "[]", '{"a": 1}', "[3]", '[{"use": "x", "more": 1}]'])
def test_wrong_settings_are_one_sentence(monkeypatch, text):
    monkeypatch.setenv("DIALOOP_ENVIRONMENT_ENVIRONMENTS", text)
    with pytest.raises(InvalidConfig, match="DIALOOP_ENVIRONMENT_ENVIRONMENTS"):
        load(EnvironmentSettings)


def test_a_task_file_adds_the_jsonl_environment():
    settings = EnvironmentSettings(task_file="t.jsonl")
    assert settings.entries[1] == EnvironmentEntry(
        use="jsonl", options={"path": "t.jsonl", "heldout_path": None}
    )


class CancelsItself:
    """A tool whose own work is cancelled, as that of a library may be."""

    name = "gate"

    async def __call__(self, query: str) -> str:
        raise asyncio.CancelledError(query)


async def test_a_cancellation_within_a_tool_is_its_failure_and_loses_no_session():
    async with open_engine(CancelsItself()) as sessions:
        sessions.create("s", "gated")
        await sessions.reset(reset_call())
        played = await sessions.step(step_call())
        (failure,) = played.outcome.failures
        assert (failure.owner, failure.reason) == (Owner.TOOL, "TOOL_FAILED")
        assert sessions.state("s").next_step_index == 1


async def test_steps_that_come_at_once_count_before_they_begin():
    gate = Gate(is_open=False)
    async with open_engine(gate, max_working=2) as sessions:
        for name in "abc":
            sessions.create(name, "gated")
            await sessions.reset(reset_call(name))
        steps = [asyncio.create_task(sessions.step(step_call(session_id=n))) for n in "abc"]
        await gate.entered.wait()
        with pytest.raises(CapacityExhausted):
            await steps[2]
        gate.open.set()
        await asyncio.gather(*steps[:2])
        await sessions.step(step_call(session_id="c"))


async def test_an_opening_of_megabytes_is_refused():
    said = "x" * 5_000_000
    long = tool_environment(
        name="long", tasks=TASKS, tools={}, rewards=[ExactResult()], system_prompt=said
    )
    async with open_sessions(Catalogue([long]), SessionLimits()) as sessions:
        sessions.create("s", "long")
        with pytest.raises(PreconditionFailed, match="opens with 50") as caught:
            await sessions.reset(reset_call())
    assert caught.value.reason == "OUTPUT_TOO_LARGE"


async def test_a_step_that_adds_megabytes_fails_and_the_environment_owns_it():
    async def flood(_: str) -> str:
        return "x" * 5_000_000

    flooding = tool_environment(
        name="flooding",
        tasks=TASKS,
        tools={"flood": flood},
        rewards=[ExactResult()],
        max_tool_response=10_000_000,
    )
    async with open_sessions(Catalogue([flooding]), SessionLimits()) as sessions:
        sessions.create("s", "flooding")
        await sessions.reset(reset_call())
        played = await sessions.step(step_call("<request><flood>x<call>"))
    (failure,) = played.outcome.failures
    assert (failure.owner, failure.reason) == (Owner.ENVIRONMENT, "OUTPUT_TOO_LARGE")
    assert played.outcome.episode.done
    assert len(played.outcome.episode.history[-1].text) < 100
