"""A group shares the request of its first turn: how many there are, and that nobody hangs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from dialoop.chat import History, as_history
from dialoop.clients.replay import TaskLease
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import arithmetic
from dialoop.episode import Sample
from dialoop.errors import InternalError
from dialoop.local.client import LocalEnvironmentClient
from dialoop.rollout import play_group
from dialoop.sequences import Sequence
from dialoop.tasks.column_addition import column_addition
from dialoop.testing import ScriptedPolicy
from dialoop.trajectory import (
    DoneReason,
    Group,
    Purpose,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
)
from dialoop_services.collector import replicas
from dialoop_services.collector.counters import Counters
from dialoop_services.collector.player import (
    FailedMember,
    GroupPlay,
    GroupPlayer,
    PlayedMember,
)
from dialoop_services.collector.replicas import Replicas

from tests.support.waiting import PATIENCE_S

NUM = 4
PATIENCE = RetryPolicy(max_attempts=None, total_s=PATIENCE_S, first_wait_s=0.01, max_wait_s=0.05)


class Counting:
    """An environment client that counts the calls it passes on."""

    def __init__(self, client: LocalEnvironmentClient) -> None:
        self._client = client
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._client, name)


class Policy:
    """Answers 35+47; the first call may fail, or end one of its samples as cancelled."""

    def __init__(self, *, fails: bool = False, cancels: bool = False) -> None:
        self._policy = ScriptedPolicy(["5+7=12 3+4+1=8 #### 82"])
        self._fails, self._cancels = fails, cancels
        self.asked: list[int] = []

    async def generate(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        self.asked.append(num_samples)
        if self._fails and len(self.asked) == 1:
            raise InternalError("out of memory")
        samples = await self._policy.generate(history, sampling=sampling, num_samples=num_samples)
        if self._cancels and len(self.asked) == 1:
            return (replace(samples[0], stop_reason=StopReason.CANCELLED), *samples[1:])
        return samples


@pytest.fixture
async def environment() -> AsyncIterator[Counting]:
    async with LocalEnvironmentClient(column_addition()) as client:
        yield Counting(client)


async def _play(environment: Counting, policy: Any, **options: Any) -> Group:
    """The whole group; it is an error if a member failed."""
    group, failed = await _play_all(environment, policy, **options)
    assert not failed
    return group


async def _play_all(
    environment: Counting,
    policy: Any,
    *,
    seed: int | None = None,
    max_new_tokens: int = 64,
    top_logprobs: int = 0,
    name: str = "column_addition",
    key: str = "35+47",
) -> tuple[Group, dict[int, FailedMember]]:
    task = Task(
        task_id="t",
        environment=name,
        split="train",
        key=key,
        seed=0,
        purpose=Purpose.TRAINING,
        num_trajectories=NUM,
    )
    player = GroupPlayer(
        environment,
        Replicas([policy], PATIENCE),
        Counters("w"),
        member_retries=1,
        max_turns=8,
        retry_policy=PATIENCE,
    )
    lease = TaskLease(
        lease_id="l", task=task, attempt=1, expires_in_s=60, members=tuple(range(NUM))
    )
    play = GroupPlay(lease=lease)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=seed, top_logprobs=top_logprobs)
    delivered: dict[int, PlayedMember] = {}

    async def deliver(played: PlayedMember) -> None:
        delivered[played.member] = played

    async with asyncio.timeout(PATIENCE_S):
        failed = await player.play(play, sampling, deliver)
    trajectories = tuple(delivered[member].trajectory for member in sorted(delivered))
    return Group(group_id="t", task=task, trajectories=trajectories), failed


async def test_the_first_turn_of_a_group_is_one_request(environment: Counting) -> None:
    policy = Policy()
    group = await _play(environment, policy)
    assert policy.asked == [NUM]
    assert len({member.trajectory_id for member in group.trajectories}) == NUM
    for trajectory in group.trajectories:
        assert trajectory.reward == 1.0
        assert trajectory.done_reason is DoneReason.CONTENT


async def test_they_record_what_members_that_ask_alone_record(environment: Counting) -> None:
    together = await _play(environment, Policy())
    task = together.task
    alone = await play_group(
        task,
        sessions=environment,
        policy=Policy(),
        group_id="t",
        sampling=SamplingParams(max_new_tokens=64),
    )
    assert list(map(_content_of, together.trajectories)) == list(
        map(_content_of, alone.trajectories)
    )


def _content_of(trajectory: Trajectory) -> Trajectory:
    """The trajectory without what differs in each play: its id, and how long things took."""
    turns = tuple(replace(turn, generate_s=0.0, step_s=0.0) for turn in trajectory.turns)
    return replace(trajectory, trajectory_id="", turns=turns)


async def test_members_with_seeds_of_their_own_ask_alone(environment: Counting) -> None:
    policy = Policy()
    group = await _play(environment, policy, seed=5)
    assert policy.asked == [1] * NUM
    assert [t.sampling.seed for t in group.trajectories] == [5, 6, 7, 8]


class ToolCalls:
    """Calls a tool until a member's last turn; members, told apart by seeds, have 1 to 3 turns."""

    def __init__(self, *, answers_after: dict[int, asyncio.Event] | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self._answers_after = answers_after or {}

    async def generate(
        self,
        history: History,
        *,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
        **question: Any,
    ) -> tuple[Sample, ...]:
        self.asked.append((turn, num_samples))
        assert sampling is not None
        number = 3 if sampling.seed is None else sampling.seed
        if number in self._answers_after:
            await self._answers_after[number].wait()
        script = [f"<request><Calculator>{number}+{n}<call>" for n in range(min(number, 2))]
        policy = ScriptedPolicy([*script, f"Result={number}<submit>"])
        return await policy.generate(
            history, sampling=sampling, turn=turn, num_samples=num_samples, **question
        )


@pytest.fixture
async def tools() -> AsyncIterator[Counting]:
    async with LocalEnvironmentClient(arithmetic()) as client:
        yield Counting(client)


async def _play_tools(tools: Counting, policy: ToolCalls, **options: Any) -> Group:
    page = await tools.list_tasks("arithmetic", split="train", page_size=1)
    tools.calls.clear()
    return await _play(tools, policy, name="arithmetic", key=page.tasks[0].key, **options)


async def test_in_later_turns_each_member_asks_for_itself(tools: Counting) -> None:
    policy = ToolCalls()
    group = await _play_tools(tools, policy)
    assert [len(t.turns) for t in group.trajectories] == [3] * NUM
    assert policy.asked == [(0, NUM), *((turn, 1) for turn in (1, 2) for _ in range(NUM))]


async def test_nobody_waits_for_a_straggler(tools: Counting) -> None:
    goes_on = asyncio.Event()
    policy = ToolCalls(answers_after={1: goes_on})  # its first answer takes until the others ended
    playing = asyncio.create_task(_play_tools(tools, policy, seed=0))
    async with asyncio.timeout(PATIENCE_S):
        while tools.calls["close_session"] < NUM - 1:
            await asyncio.sleep(0.002)
    goes_on.set()
    group = await playing
    assert [len(t.turns) for t in group.trajectories] == [1, 2, 3, 3]


async def test_nobody_waits_for_the_longest_of_the_first_answers(environment: Counting) -> None:
    ends = asyncio.Event()

    class Slow(Policy):
        async def generate(self, *arguments: Any, **question: Any) -> tuple[Sample, ...]:
            samples = await super().generate(*arguments, **question)
            if len(self.asked) == 1:
                await ends.wait()
            return samples

    policy = Slow()
    playing = asyncio.create_task(_play(environment, policy, max_new_tokens=256, top_logprobs=1))
    async with asyncio.timeout(PATIENCE_S):
        while environment.calls["close_session"] < NUM - 1:
            await asyncio.sleep(0.002)
    ends.set()
    group = await playing
    assert [t.reward for t in group.trajectories] == [1.0] * NUM
    assert policy.asked == [1] * NUM


async def test_members_that_open_late_ask_together_and_hold_up_nobody(
    environment: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sessions are all in use, say: the first ones have to end before others open."""
    monkeypatch.setattr(replicas, "_OPENING_S", 0.05)
    reset, num_opened = environment.reset, 0

    async def late(*arguments: Any, **options: Any) -> Any:
        nonlocal num_opened
        num_opened += 1
        if num_opened > NUM // 2:
            async with asyncio.timeout(PATIENCE_S):
                while environment.calls["close_session"] < NUM // 2:
                    await asyncio.sleep(0.002)
        return await reset(*arguments, **options)

    environment.reset = late  # type: ignore[attr-defined]  # what __getattr__ stands for
    policy = Policy()
    group = await _play(environment, policy)
    assert policy.asked == [NUM // 2] * 2
    assert [t.reward for t in group.trajectories] == [1.0] * NUM


async def test_a_sample_that_was_cancelled_keeps_nobody_waiting(environment: Counting) -> None:
    policy = Policy(cancels=True)
    group = await _play(environment, policy)
    assert policy.asked == [NUM, 1]
    assert [t.reward for t in group.trajectories] == [1.0] * NUM


async def test_what_fails_for_all_is_asked_again_by_each(environment: Counting) -> None:
    policy = Policy(fails=True)
    group = await _play(environment, policy)
    assert policy.asked == [NUM] + [1] * NUM
    assert [t.reward for t in group.trajectories] == [1.0] * NUM


async def test_where_a_task_is_worded_differently_only_the_member_that_failed_asks_again(
    environment: Counting,
) -> None:
    """An environment may word a task in each session in another way."""
    reset, num_opened = environment.reset, 0

    async def reworded(*arguments: Any, **options: Any) -> Any:
        nonlocal num_opened
        num_opened += 1
        result = await reset(*arguments, **options)
        prompt = History((*result.history.prompt[:-1], replace(result.history.prompt[-1])))
        spoken = replace(prompt[-1], content=f"{prompt[-1].text}{' ' * num_opened}")
        history = replace(result.history, prompt=History((*prompt[:-1], spoken)))
        return replace(result, history=history)

    environment.reset = reworded  # type: ignore[attr-defined]  # what __getattr__ stands for
    policy = Policy(fails=True)
    group, failed = await _play_all(environment, policy)
    assert policy.asked[: NUM + 1] == [1] * (NUM + 1)
    assert len(group.trajectories) + len(failed) == NUM


async def test_a_step_that_fails_is_its_members_own_failure(environment: Counting) -> None:
    step = environment.step

    async def losing(*arguments: Any, **options: Any) -> Any:
        environment.step = step  # type: ignore[attr-defined]
        raise InternalError("lost")

    environment.step = losing  # type: ignore[attr-defined]  # what __getattr__ stands for
    policy = Policy()
    group = await _play(environment, policy)
    assert policy.asked == [NUM, 1]
    assert len(group.trajectories) == NUM


async def test_an_environment_that_is_not_there_fails_the_members(environment: Counting) -> None:
    async def refusing(*_: Any, **__: Any) -> Any:
        raise InternalError("no")

    environment.create_session = refusing  # type: ignore[attr-defined]
    group, failed = await _play_all(environment, Policy())
    assert (len(group.trajectories), sorted(failed)) == (0, list(range(NUM)))
    assert {failure.reason for failure in failed.values()} == {"member_failed"}


async def test_a_group_called_off_while_it_is_opened_leaves_no_session_open(
    environment: Counting,
) -> None:
    begun = asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        await asyncio.sleep(PATIENCE_S)

    environment.reset = slow  # type: ignore[attr-defined]
    playing = asyncio.create_task(_play(environment, Policy()))
    await begun.wait()
    assert len(environment._client._sessions) == NUM
    playing.cancel()
    await asyncio.wait({playing}, timeout=PATIENCE_S)
    assert playing.cancelled()
    assert environment.calls["close_session"] == NUM
    assert not environment._client._sessions


async def test_a_request_that_all_have_left_is_called_off_and_one_that_others_wait_for_is_not() -> (
    None
):
    begun, ended = asyncio.Event(), asyncio.Event()

    class Endless:
        async def generate(self, history: History, **question: Any) -> tuple[Sample, ...]:
            begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                ended.set()
            return ()

    shared = Replicas([Endless()], PATIENCE).of_group("g", 2)
    members = [asyncio.create_task(shared.generate(as_history("q"))) for _ in range(2)]
    await begun.wait()
    members[0].cancel()
    await asyncio.wait(members, timeout=0.05)
    assert (members[0].cancelled(), ended.is_set()) == (True, False)
    members[1].cancel()
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
