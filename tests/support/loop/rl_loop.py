"""The loop of RL in virtual time: the real collector, queue and train steps; the rest is scripted.

The collector plays arithmetic with a policy whose answers take as long as their tokens. A scorer
gives each group the advantages that a test says, and the learner keeps what it is given.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dialoop.chat import ChatHistory, Message
from dialoop.clients.channel import Channel
from dialoop.clients.replay import AppendItem, LedgerCounts, ReplayClient, ReplayStats
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import arithmetic
from dialoop.episode import Sample
from dialoop.local.client import LocalEnvironmentClient
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import Group, Purpose, SamplingParams, Stage, StopReason
from dialoop_services.collector.collector import Collector
from dialoop_services.collector.counters import Counters
from dialoop_services.collector.player import GroupPlayer
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.collector.task_supply import TaskSupply
from dialoop_services.replay.servicer import ReplayServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.trainer.publish.publisher import Published

from tests.support.loop.virtual_time import ServicerChannel
from tests.support.queue_model.store import ModelStore
from tests.support.trainer_world import FakeLearner, FakePublisher, World

RUN = "r"
TOKEN_S = 0.1
PUBLISH_S = 1.0
_CHUNKS = 4


def fast_or_slow(chance: random.Random) -> int:
    """Tokens of an answer: one in ten is 20 times as long, and takes 20 times as long."""
    num_tokens = chance.randint(8, 16)
    return num_tokens * 20 if chance.random() < 0.1 else num_tokens


def learnable(group: Group) -> list[float]:
    """Advantages of a group that has a signal."""
    return [1.0 if member % 2 else -1.0 for member in range(group.num_trajectories)]


class TimedPolicy:
    """Answers with `num_tokens(chance)` tokens, each of the version that is live at its time."""

    def __init__(self, num_tokens: Callable[[random.Random], int], seed: int) -> None:
        self._num_tokens = num_tokens
        self._chance = random.Random(seed)
        self.version = PolicyVersion(lineage="base", number=0)

    async def generate(
        self, history: Any, *, sampling: SamplingParams | None = None, **_: Any
    ) -> tuple[Sample, ...]:
        left = self._num_tokens(self._chance)
        pieces: list[tuple[list[int], dict[str, Any]]] = [([1, 2], {"source": Source.PROMPT})]
        total = left
        while left:
            part = min(left, max(1, total // _CHUNKS))
            version = self.version
            await asyncio.sleep(part * TOKEN_S)
            pieces.append(([3] * part, {"source": Source.MODEL, "policy_version": version}))
            left -= part
        message = Message(role="assistant", content="Result=1<submit>")
        return (
            Sample(
                history=ChatHistory(prompt=history).respond(message),
                sequence=sequence_of(pieces, logprobs=[-0.5] * total),
                stop_reason=StopReason.STOP,
                sampling=sampling or SamplingParams(),
            ),
        )


class ListingCounters(Counters):
    """Keeps the length of every trajectory that was played for training."""

    def __init__(self) -> None:
        super().__init__("c")
        self.lengths: list[int] = []

    def count_trajectory(self, trajectory: Any, purpose: Purpose) -> None:
        super().count_trajectory(trajectory, purpose)
        self.lengths.append(trajectory.num_model_tokens)


class ListingLearner(FakeLearner):
    """Keeps the lengths of what it trains, and how many rows each step had."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def train_step(self, rows: Any) -> Any:
        self.lengths += [row.sequence.num_model_tokens for row in rows]
        return super().train_step(rows)


class QueuePublisher(FakePublisher):
    """Announces to the queue as the real one does, and lets the policy sample under the version."""

    def __init__(self, learner: FakeLearner, replay: ReplayClient, policy: TimedPolicy) -> None:
        super().__init__(learner)
        self._replay = replay
        self._policy = policy
        self.max_outstanding_groups = 0

    async def announce(self, version: PolicyVersion, trained_lease_ids: Any = ()) -> None:
        await self._replay.advance_policy(
            RUN,
            version,
            trained_lease_ids=tuple(trained_lease_ids),
            max_outstanding_groups=self.max_outstanding_groups,
        )

    async def publish(
        self, version: PolicyVersion, *, trained_lease_ids: Any = (), **named: Any
    ) -> Published:
        await asyncio.sleep(PUBLISH_S)
        self._policy.version = version
        await self.announce(version, trained_lease_ids)
        return await super().publish(version, **named)


@dataclass(kw_only=True)
class Outcome:
    """What a run left: lengths of what was played and trained, the ledger, the trainer's rows."""

    generated: list[int]
    trained: list[int]
    stats: ReplayStats
    result: dict[str, Any]
    counters: dict[str, Any]
    train_rows: list[dict[str, Any]]
    rows_per_step: list[int]
    alarms: list[str] = field(default_factory=list)
    alarms_at_end: frozenset[str] = frozenset()
    virtual_s: float = 0.0

    @property
    def training(self) -> LedgerCounts:
        return self.stats.training


async def run_loop(
    folder: Path,
    *,
    seed: int,
    num_tokens: Callable[[random.Random], int] = fast_or_slow,
    advantages: Callable[[Group], list[float]] = learnable,
    collector: dict[str, Any] | None = None,
    **train: Any,
) -> Outcome:
    """Train `num_steps` steps and return what came of it."""
    store = ModelStore(QueueLimits(lease_s=60), clock=asyncio.get_running_loop().time)
    servicer = ReplayServicer(store)
    policy, counters = TimedPolicy(num_tokens, seed), ListingCounters()
    channel: Any = ServicerChannel(servicer)
    replay = ReplayClient(channel)
    learner = ListingLearner()
    publisher = QueuePublisher(learner, replay, policy)
    world = World(folder, learner=learner, replay=replay, publisher=publisher, run=RUN, **train)
    publisher.max_outstanding_groups = world.settings.max_outstanding_groups
    working = [
        asyncio.create_task(_collector(channel, policy, counters, collector or {}).run()),
        asyncio.create_task(_score(replay, advantages)),
    ]
    alarms: list[str] = []
    raise_alarm = world.board.raise_alarm

    def note(alarm: str, *, on: bool) -> None:
        if on and alarm not in world.board.alarms:
            alarms.append(alarm)
        raise_alarm(alarm, on=on)

    world.board.raise_alarm = note  # type: ignore[method-assign]
    try:
        await world.job.run()
    finally:
        for task in working:
            task.cancel()
        await asyncio.wait(working)
    stats = await replay.get_stats(RUN)
    servicer.stop_waiting()
    world.records.close()
    return Outcome(
        generated=counters.lengths,
        trained=learner.lengths,
        stats=stats,
        result=world.job.state.result(),
        counters=counters.to_json(),
        train_rows=[row for row in world.rows if row["kind"] == "train"],
        rows_per_step=learner.trained,
        alarms=alarms,
        alarms_at_end=frozenset(world.board.alarms),
        virtual_s=asyncio.get_running_loop().time(),
    )


def _collector(
    channel: Channel, policy: Any, counters: Counters, settings: dict[str, Any]
) -> Collector:
    chosen = CollectorSettings(**{"run": RUN, "worker": "c", "group_size": 4} | settings)
    patience = RetryPolicy(max_attempts=None, total_s=chosen.patience_s)
    environment: Any = LocalEnvironmentClient(arithmetic())
    replay = ReplayClient(channel)
    player = GroupPlayer(
        environment,
        policy,
        counters,
        member_retries=chosen.member_retries,
        max_turns=chosen.max_turns,
        retry_policy=patience,
    )
    return Collector(
        chosen,
        replay=replay,
        environment=environment,
        player=player,
        task_supply=TaskSupply(chosen, replay, environment, patience),
        counters=counters,
    )


async def _score(replay: ReplayClient, advantages: Callable[[Group], list[float]]) -> None:
    while True:
        leased = await replay.lease_groups(
            RUN, Stage.UNSCORED, worker="s", max_groups=8, wait_s=5.0
        )
        for lease in leased.leases:
            scored = _with_advantages(lease.group, advantages(lease.group))
            item = AppendItem(group=scored, lease_id=lease.lease_id)
            await replay.append_groups(RUN, Stage.SCORED, [item])
            await replay.acknowledge(RUN, [lease.lease_id])


def _with_advantages(group: Group, advantages: list[float]) -> Group:
    return replace(
        group,
        trajectories=tuple(
            replace(
                trajectory,
                sequences=tuple(replace(s, advantage=value) for s in trajectory.sequences),
            )
            for trajectory, value in zip(group.trajectories, advantages, strict=True)
        ),
    )
