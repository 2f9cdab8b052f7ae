"""A job with a real learner, publisher and evaluator, whose groups are known token by token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from dialoop import testing
from dialoop.clients.replay import GroupLease
from dialoop.errors import Unavailable
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop.trajectory import Group, Reward, SamplingParams, StopReason, Trajectory, Turn
from dialoop_services.trainer.job.evaluation import Evaluator
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.publish.publisher import Publisher
from dialoop_services.trainer.settings import TrainerSettings
from safetensors.torch import load as load_bytes

from tests.support.metrics.plain_steps import Answer, PlainModel, Recorder
from tests.support.trainer_world import FakeLearner, FakePublisher, FakeReplay, World

LENGTH = StopReason.LENGTH
ROW_TOKENS = 150
SLEEP_S = 0.02
"""How long the queue and a replica take at least."""
GENERATE_S, CALL_S = 0.5, 2.0
"""How long an answer took to sample, and a tool call to run."""
OFF = 0.125
"""Nats by which the second replica answers one probe token otherwise."""
SETTINGS: dict[str, Any] = {
    "num_steps": 2,
    "groups_per_train_step": 2,
    "num_minibatches": 2,
    "pipeline_depth": 0,
    "max_staleness": 1,
    "max_row_tokens": ROW_TOKENS,
    "oversize": "truncate",
    "data_plane": "chunks",
    "loss": "grpo",
    "loss_options": {"clip_low": 0.01, "clip_high": 0.01},
    "objective": {
        "aggregation": "sequence",
        "kl_coeff": 0.1,
        "kl_estimator": "k2",
        "kl_inference_coeff": 0.05,
        "entropy_coeff": 0.01,
        "correction": "icepop",
        "correction_low": 0.9,
        "correction_high": 1.1,
        "num_epochs": 2,
    },
    "learning_rate": 1e-3,
    "schedule": "linear",
    "num_warmup_updates": 3,
    "max_grad_norm": 0.05,
    "warm_start": {"num_steps": 20, "num_warmup_steps": 4, "learning_rate": 2e-3},
    "evaluation": {"num_tasks": 3, "every": 1, "num_running_tasks": 2},
}


def main(number: int) -> PolicyVersion:
    return PolicyVersion(lineage="main", number=number)


FIRST = -1


@dataclass
class Author:
    """Writes groups whose sequences begin with a token of their own."""

    model: PlainModel
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    answers: dict[int, Answer] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)

    def sequence(self, *pieces: tuple[int, int], noise: float = 0.1) -> Callable[[float], Sequence]:
        """Pieces of (length, number of the policy that sampled it, or 0 for everybody else).

        FIRST is the policy of number 0.

        It is written for a temperature. The engine is off the plain model by noise.
        """

        def write(temperature: float) -> Sequence:
            name, told = 20 + len(self.answers), []
            for length, version in pieces:
                ids = self.random.integers(120, 300, size=length).tolist()
                made = {"source": Source.MODEL, "policy_version": main(max(0, version))}
                other = {"source": Source.TOOL if told else Source.PROMPT}
                told.append((ids, made if version else other))
            told[0][0][0] = name
            row = sequence_of(told)
            plain = Answer.of(row, temperature=temperature)
            own = self.model.logprobs(plain)
            engine, reference = (
                np.minimum(own + self.random.normal(0, by, size=len(own)), -1e-3).astype("f4")
                for by in (noise, 0.5)
            )
            self.answers[name] = plain
            return replace(row, inference_logprobs=engine, ref_logprobs=reference)

        return write

    def member(
        self,
        advantage: float,
        *rows: Callable[[float], Sequence],
        turns: tuple[Turn, ...] = (),
        temperature: float | None = None,
        **fields: Any,
    ) -> Callable[[str], Trajectory]:
        def write(name: str) -> Trajectory:
            sampled_at = 1.0 if temperature is None else temperature
            sequences = []
            for make in rows:
                row = replace(make(sampled_at), advantage=advantage)
                sequences.append(row)
                answer = Answer.of(row, trajectory=name, temperature=sampled_at)
                self.answers[answer.name] = answer
            return testing.trajectory(
                trajectory_id=name,
                turns=turns,
                sequences=tuple(sequences),
                sampling=SamplingParams(temperature=temperature),
                **fields,
            )

        return write

    def group(self, name: str, *members: Callable[[str], Trajectory]) -> GroupLease:
        played = (member(f"{name}{number}") for number, member in enumerate(members))
        group = self.groups[name] = testing.group(*played, group_id=name)
        return GroupLease(lease_id=f"lease-{name}", group=group, num_deliveries=1, expires_in_s=60)


def turn(*rewards: Reward, calls: int = 0, stop: StopReason = StopReason.STOP) -> Turn:
    return Turn(
        message_start=1,
        num_messages=1,
        rewards=rewards,
        num_tool_calls=calls,
        stop_reason=stop,
        generate_s=GENERATE_S,
        step_s=CALL_S * calls,
    )


def right(value: float) -> Reward:
    return Reward(name="right", value=value)


def first_batch(author: Author) -> list[GroupLease]:
    """Two groups to train of the newest policy, a uniform one, and one that cannot be trained."""
    row, member = author.sequence, author.member
    brief = Reward(name="brief", value=1.0, weight=0.5)
    a = author.group(
        "a",
        member(
            1.0,
            row((6, 0), (5, 1), (4, 0), (7, 1)),
            turns=(turn(right(0.0), brief, calls=2), turn(right(1.0))),
            labels={"trial_rewards": "0.25 1.5"},
        ),
        member(-0.5, row((5, 0), (9, 1)), turns=(turn(right(0.0), stop=LENGTH),)),
    )
    b = author.group(
        "b",
        member(0.75, row((140, 0), (20, 1)), turns=(turn(right(1.0)),)),
        member(
            0.25,
            *(row((5, 0), (6, 1)), row((7, 0), (4, 1))),
            turns=(turn(right(0.5), calls=1),),
            temperature=0.7,
        ),
        member(
            -1.0,
            row((4, 0), (3, 1)),
            turns=(turn(right(-2.0)),),
            truncated=True,
            labels={"trial_rewards": "-2"},
        ),
    )
    uniform = author.group(
        "u", *(member(0.0, row((4, 0), (2, 1)), turns=(turn(right(1.0)),)) for _ in range(2))
    )
    bad = author.group("s", *(member(a, row((4, 0), (2, 1)), turns=(turn(),)) for a in (1.0, -1.0)))
    spoilt = bad.group.trajectories[1].sequences[0]
    ids = spoilt.token_ids.copy()
    ids[-1] = 100_000
    members = bad.group.trajectories
    wrong = replace(members[1], sequences=(replace(spoilt, token_ids=ids),))
    group = replace(bad.group, trajectories=(members[0], wrong))
    return [a, uniform, replace(bad, group=group), b]


def plain_batch(author: Author, *names: str, version: int) -> list[GroupLease]:
    row, member = author.sequence, author.member
    return [
        author.group(
            name,
            *(member(a, row((5, 0), (4, version)), turns=(turn(right(a)),)) for a in (1.0, -1.0)),
        )
        for name in names
    ]


def last_batch(author: Author) -> list[GroupLease]:
    """Tokens of the newest policy, 2, and of the one before, and a group that is too old."""
    row, member = author.sequence, author.member
    stale = author.group(
        "old", *(member(a, row((4, 0), (9, FIRST)), turns=(turn(right(9.0)),)) for a in (1.0, -1.0))
    )
    e = author.group(
        "e",
        member(
            1.0,
            row((6, 0), (3, 1), (2, 0), (5, 2), noise=0.4),
            turns=(turn(right(1.0)), turn(calls=1, stop=StopReason.CONTEXT_FULL)),
        ),
        member(-1.0, row((126, 0), (6, 2), noise=0.4), turns=(turn(right(0.0)),)),
    )
    f = author.group(
        "f",
        member(0.5, row((3, 0), (8, 1), noise=0.4), turns=(turn(right(0.5)),)),
        member(-0.5, row((8, 0), (2, 2), noise=0.4), turns=(turn(right(0.0)),)),
    )
    return [stale, e, f]


class Queue(FakeReplay):
    """Takes its time for every answer, and notes when."""

    def __init__(self) -> None:
        super().__init__()
        self.leased: list[tuple[float, float]] = []

    async def lease_groups(self, *_: Any, max_groups: int, **__: Any) -> Any:
        began = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        leases = self.batches.pop(0)() if self.batches else []
        leases, rest = leases[:max_groups], leases[max_groups:]
        if rest:
            self.batches.insert(0, lambda: rest)
        self.leased.append((began, time.perf_counter()))
        return SimpleNamespace(leases=tuple(leases))

    async def advance_policy(self, *_: Any, **__: Any) -> int:
        return 0


class Replica:
    """Loads what is published into a plain model, and answers probes a little off."""

    def __init__(self, directory: Path, *, off: float, is_away: bool = False) -> None:
        self._model, self._off, self._is_away = PlainModel(directory), off, is_away
        self._version: PolicyVersion | None = None
        self.num_bytes: list[int] = []
        self.loads: list[tuple[float, float]] = []

    async def load_weights(self, manifest: Any, contents: Any, *, deadline_s: float) -> None:
        if self._is_away:
            raise Unavailable("away")
        began = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        data = b"".join([chunk async for chunk in contents])
        self.num_bytes.append(len(data))
        weights = load_bytes(data)
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # a tied head
        self._model.load(weights)
        self._version = manifest.policy_version
        self.loads.append((began, time.perf_counter()))

    async def logprobs(self, rows: list[list[int]], *, deadline_s: float) -> Any:
        answers = [Answer(ids=ids, sampled=list(range(1, len(ids)))) for ids in rows]
        values = [np.array(self._model.logprobs(answer), dtype="f4") for answer in answers]
        values[1][3] -= self._off
        return SimpleNamespace(policy_version=self._version, logprobs=values)


class Tasks:
    """The held-out tasks 0, 1, 2, ..., and a queue in which each that can be played is at once."""

    REWARDS, CALLS, VERSIONS = (1.0, 0.25), (2, 0), ((1,), (1, 2))

    def __init__(self) -> None:
        self.ready: dict[str, Group] = {}
        self.labels: list[str] = []
        self.offered: list[float] = []

    async def list_tasks(self, *_: Any, page_size: int, **__: Any) -> Any:
        refs = [SimpleNamespace(key=str(n), seed=n) for n in range(page_size)]
        return SimpleNamespace(tasks=refs, next_page_token="")

    async def offer_tasks(self, run: str, tasks: list[Any]) -> None:
        self.labels.append(tasks[0].task_id.split("/")[1])
        self.offered.append(time.perf_counter())
        for task in tasks:
            number = int(task.key)
            if number < len(self.REWARDS):
                pieces = [([3], {"source": Source.PROMPT})]
                pieces += [
                    ([7], {"source": Source.MODEL, "policy_version": main(version)})
                    for version in self.VERSIONS[number]
                ]
                row = sequence_of(pieces, logprobs=[-1.0] * (len(pieces) - 1))
                made = (turn(right(self.REWARDS[number]), calls=self.CALLS[number]),)
                labels = {"trial_rewards": ("0 3", "1")[number]}
                fields = {"task_key": task.key, "labels": labels}
                played = testing.trajectory(**fields, turns=made, sequences=(row,))
                self.ready[task.task_id] = replace(testing.group(played), task=task)

    async def lease_groups(self, *_: Any, **__: Any) -> Any:
        leases = [SimpleNamespace(lease_id=n, group=group) for n, group in self.ready.items()]
        return SimpleNamespace(leases=leases)

    async def acknowledge(self, run: str, lease_ids: list[str]) -> None:
        for name in lease_ids:
            del self.ready[name]

    async def list_leases(self, *_: Any, **__: Any) -> tuple[str, ...]:
        return ()

    async def drop(self, run: str, lease_ids: list[str], reason: str) -> None:
        assert not lease_ids

    async def get_stats(self, run: str) -> Any:
        return SimpleNamespace(evaluation=SimpleNamespace(num_open=len(self.ready)))


class Shown:
    """Demonstrations of a warm start: two answers, of which the second grows."""

    def __init__(self) -> None:
        self._number = 0

    def skip(self, num_batches: int) -> None:
        self._number += num_batches

    def __next__(self) -> list[Sequence]:
        self._number += 1
        return shown_batch(self._number)


def shown_row(*pieces: tuple[list[int], bool]) -> Sequence:
    """A demonstration: token ids, and whether they are to be learned."""
    sampled = {"source": Source.MODEL, "policy_version": main(0)}
    told = [(ids, sampled if is_taught else {"source": Source.PROMPT}) for ids, is_taught in pieces]
    return sequence_of(told)


def shown_batch(number: int) -> list[Sequence]:
    return [
        shown_row(([10, 11], False), ([12, 13, number], True)),
        shown_row(([30], False), (list(range(40, 42 + number)), True)),
    ]


Batch = Callable[[Author], list[GroupLease]]


@dataclass
class Ran:
    """A job that has run, and what its fakes noted meanwhile."""

    world: World
    recorder: Recorder
    author: Author
    queue: Queue
    replicas: list[Replica]
    tasks: Tasks
    first_s: float = 0.0
    last_s: float = 0.0
    """When it began and ended, by `time.perf_counter`."""
    first_time: float = 0.0
    last_time: float = 0.0

    def rows(self, *kinds: str) -> list[dict[str, Any]]:
        lines = (self.world.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        return [row for line in lines if (row := json.loads(line))["kind"] in kinds or not kinds]

    def run(self) -> None:
        self.first_s, self.first_time = time.perf_counter(), time.time()
        asyncio.run(self.world.run())
        self.last_s, self.last_time = time.perf_counter(), time.time()


def real_job(
    run_dir: Path, directory: Path, *batches: Batch, is_published: bool = False, **settings: Any
) -> Ran:
    """A job that trains these batches, each written when the policy that it is of is there.

    is_published: to replicas, of which one is away; else to nobody. settings: of the trainer.
    """
    supervised = settings.pop("supervised", None)
    settings |= {"model_dir": directory, "run_dir": run_dir, "pipeline_depth": 0}
    values = TrainerSettings(**settings)
    learner, queue, tasks = Learner(values), Queue(), Tasks()
    publisher: Any = FakePublisher(FakeLearner())
    replicas = [Replica(directory, off=off, is_away=off > 1) for off in (0.0, OFF, 9.0)]
    if is_published:
        publisher = Publisher(values, learner, cast("Any", replicas), cast("Any", queue))
    world = World(
        learner=learner,
        replay=queue,
        publisher=publisher,
        demonstrations=Shown(),
        supervised=supervised,
        evaluator=lambda records: Evaluator("run", cast("Any", tasks), cast("Any", tasks), records),
        **settings,
    )
    recorder = Recorder(learner, time.perf_counter)
    author = Author(PlainModel(directory))

    def write(batch: Batch) -> list[GroupLease]:
        author.model.load(recorder.weights())
        return batch(author)

    queue.batches = [partial(write, batch) for batch in batches]
    return Ran(world, recorder, author, queue, replicas, tasks)
