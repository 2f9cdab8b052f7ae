"""A training job among fakes: a model that is a number, a queue that is a list, no torch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dialoop import testing
from dialoop.clients.replay import GroupLease, ReopenedLeases
from dialoop.errors import Unavailable
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import Trajectory
from dialoop_services.trainer.data.demonstrations import DemonstrationSet
from dialoop_services.trainer.job.evaluation import EvaluationResult
from dialoop_services.trainer.job.job import TrainingJob
from dialoop_services.trainer.job.parts import JobParts
from dialoop_services.trainer.job.status import StatusBoard
from dialoop_services.trainer.learner.learner import TrainStepReport
from dialoop_services.trainer.learner.learner_state import ExportedWeights
from dialoop_services.trainer.publish.placement import Split
from dialoop_services.trainer.publish.publisher import Published
from dialoop_services.trainer.records.records import RunRecords
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.waiting import PATIENCE_S

FIRST = PolicyVersion(lineage="main", number=1)


class Killed(Exception):
    """What ends the process in these tests."""


def lease(
    group_id: str,
    policy: PolicyVersion,
    *,
    lease_id: str = "",
    advantages: tuple[float, ...] = (1.0, -1.0),
) -> GroupLease:
    """A scored group of two members."""
    members = tuple(_member(group_id, policy, advantage) for advantage in advantages)
    return GroupLease(
        lease_id=lease_id or f"lease-{group_id}",
        group=testing.group(*members, group_id=group_id),
        num_deliveries=1,
        expires_in_s=60,
    )


def _member(group_id: str, policy: PolicyVersion, advantage: float) -> Trajectory:
    pieces: list[tuple[list[int], dict[str, Any]]] = [
        ([5], {"source": Source.PROMPT}),
        ([6, 7], {"source": Source.MODEL, "policy_version": policy}),
    ]
    row = replace(sequence_of(pieces, logprobs=[-0.5, -1.5]), advantage=advantage)
    return testing.trajectory(
        trajectory_id=f"{group_id}-{advantage}", task_key="1+1", turns=(), sequences=(row,)
    )


class FakeLearner:
    """Weights are the number of train steps in them."""

    num_parameters = 1
    matrix_products = "torch"
    needs_advantages = True

    def __init__(self) -> None:
        self.weights = 0
        self.read_under: list[PolicyVersion] = []
        self.trained: list[int] = []
        self.temperatures: list[list[float]] = []
        self.vocab_size = 100
        self.refuses: Callable[[Any], None] = lambda _: None
        self.while_training: Callable[[], None] = lambda: None
        self.while_saving: Callable[[], None] = lambda: None
        self.fresh_mismatch_kl: float | None = None
        self.fresh_by_depth: dict[int, dict[str, float]] = {}
        self.warm_started: list[Any] = []
        self.supervised: list[Any] = []

    def warm_start_step(self, rows: Any) -> Any:
        self.weights += 1
        self.warm_started.append(rows)
        return _update()

    def sft_step(self, rows: Any) -> Any:
        self.weights += 1
        self.supervised.append(rows)
        return _update()

    def heldout_loss(self, rows: Any) -> tuple[float, int]:
        return 1.0 / (1 + self.weights), len(rows)

    def found_in(self, loss: float, grad_norm: float, kind: str = "rl") -> str:
        return "what was not finite"

    def rows_to_imitate(self, demonstrations: Any) -> Any:
        return demonstrations

    def rows_to_train(self, sequences: Any, *, current: PolicyVersion) -> Any:
        """Refuses whatever a test says; a real learner looks at the rows."""
        for row in sequences:
            self.refuses(row.sequence)
        self.read_under.append(current)
        return sequences

    def train_step(self, rows: Any) -> TrainStepReport:
        self.while_training()
        self.weights += 1
        self.trained.append(len(rows))
        self.temperatures.append([row.temperature for row in rows])
        return TrainStepReport(
            loss=0.0,
            metrics={},
            grad_norm=0.0,
            num_updates=1,
            num_refused=0,
            num_trained_tokens=4,
            fresh_mismatch_kl=self.fresh_mismatch_kl,
            fresh_by_depth=self.fresh_by_depth,
        )

    def export(self, path: Path, first: Path | None = None) -> ExportedWeights:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(self.weights), "utf-8")
        return ExportedWeights(path=path, sha256="", num_bytes=1)

    def snapshot(self, directory: Path) -> Callable[[], None]:
        self.export(directory / "model.safetensors")
        return lambda: self.while_saving()

    def damage_in(self, directory: Path) -> str:
        return ""

    def restore(self, directory: Path) -> None:
        self.weights = int((directory / "model.safetensors").read_text("utf-8"))


def _update() -> Any:
    step = SimpleNamespace(learning_rate=0.0, grad_norm=0.0, applied=True)
    return SimpleNamespace(loss=0.0, step=step)


class FakeReplay:
    """Hands out `batches` one by one, each made when it is asked for, then nothing."""

    def __init__(self) -> None:
        self.batches: list[Callable[[], list[GroupLease]]] = []
        self.policy_version: PolicyVersion | None = None
        self.num_groups_dropped: dict[str, int] = {}
        self.acknowledged: list[str] = []
        self.dropped: dict[str, str] = {}
        self.extended: list[tuple[str, ...]] = []
        self.given_back: list[str] = []
        self.set_aside: dict[str, str] = {}
        # What an earlier trainer held, and of that what can be reopened.
        self.held: tuple[str, ...] = ()
        self.cursor = ""
        self.settled: str | None = None
        self.is_full = False
        self.kept: dict[str, GroupLease] = {}

    async def get_stats(self, run: str) -> Any:
        counts = SimpleNamespace(
            num_groups_dropped=self.num_groups_dropped,
            num_trajectories_live=len(self.batches),
            num_trajectories_consumed=0,
        )
        return SimpleNamespace(
            cursor=self.cursor,
            settled_cursor=self.cursor if self.settled is None else self.settled,
            policy_version=self.policy_version,
            training=counts,
            evaluation=counts,
            is_full=self.is_full,
        )

    async def offer_tasks(
        self, run: str, tasks: Any, *, expected_cursor: str, next_cursor: str
    ) -> None:
        assert (expected_cursor, len(tasks)) == (self.cursor, 0)
        self.cursor = next_cursor

    async def lease_groups(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(0.001)
        return SimpleNamespace(leases=tuple(self.batches.pop(0)()) if self.batches else ())

    async def acknowledge(self, run: str, lease_ids: list[str]) -> tuple[str, ...]:
        self.acknowledged += lease_ids
        return ()

    async def drop(self, run: str, lease_ids: list[str], reason: str) -> tuple[str, ...]:
        self.dropped |= dict.fromkeys(lease_ids, reason)
        self.held = tuple(lease_id for lease_id in self.held if lease_id not in lease_ids)
        return ()

    async def give_back(self, run: str, items: Any) -> None:
        self.given_back += [item.lease_id for item in items]
        self.set_aside |= {item.lease_id: item.reason for item in items if item.set_aside}

    async def list_leases(self, run: str, stage: Any, *, worker: str) -> tuple[str, ...]:
        return self.held

    async def reopen_leases(self, run: str, lease_ids: Any, *, lease_s: float) -> ReopenedLeases:
        lost = tuple(lease_id for lease_id in lease_ids if lease_id not in self.kept)
        leases = () if lost else tuple(self.kept[lease_id] for lease_id in lease_ids)
        return ReopenedLeases(leases=leases, lost=lost)

    async def extend(self, run: str, lease_ids: list[str], *, lease_s: float) -> tuple[str, ...]:
        self.extended.append(tuple(lease_ids))
        return ()


class FakePublisher:
    """Keeps which weights each version was; `gate` holds a publish up half-way."""

    def __init__(self, learner: FakeLearner) -> None:
        self._learner = learner
        self.published: list[tuple[str, int]] = []
        self.announced: list[str] = []
        self.earned: list[float | None] = []
        self.num_behind = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def announce(self, version: PolicyVersion) -> None:
        self.announced.append(str(version))

    def keep(self, version: PolicyVersion, reward: float | None = None) -> None:
        self.earned.append(reward)

    async def capture(self, version: PolicyVersion) -> int:
        return self._learner.weights

    async def publish(
        self, version: PolicyVersion, *, captured: int | None = None, **_: Any
    ) -> Published:
        weights_then = self._learner.weights if captured is None else captured
        self.published.append((str(version), weights_then))
        await self.gate.wait()
        weights = ExportedWeights(path=Path("w"), sha256="", num_bytes=1)
        return Published(
            policy_version=version,
            weights=weights,
            publish_s=0.0,
            max_logprob_difference=0.0,
            num_replicas=1,
            num_behind=self.num_behind,
        )


class FakeEvaluator:
    """Gives running evaluations `rewards` one by one; then they fail."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_swept = 0
        self.rewards: list[float] = []

    async def drop_held(self) -> None:
        assert not self.num_asked, "what it holds by now is its own"
        self.num_swept += 1

    async def evaluate(self, plan: Any, **_: Any) -> Any:
        is_running = plan.label == "running"
        self.num_asked += is_running
        if is_running and not self.rewards:
            raise Unavailable("away")
        return EvaluationResult(
            mean_reward=self.rewards.pop(0) if is_running else 0.0,
            accuracy=None,
            tool_call_rate=0.0,
            num_trajectories=1,
            num_failed=0,
            oldest=None,
            newest=None,
        )


class FakeDemonstrations:
    """Batches are their own numbers."""

    def __init__(self) -> None:
        self._next = 0

    def skip(self, num_batches: int) -> None:
        self._next += num_batches

    def __next__(self) -> list[int]:
        self._next += 1
        return [self._next]


class World:
    """One trainer process; another World in the same folder is that process restarted."""

    def __init__(
        self,
        run_dir: Path,
        *,
        supervised: DemonstrationSet | None = None,
        learner: Any = None,
        replay: Any = None,
        publisher: Any = None,
        evaluator: Callable[[RunRecords], Any] | None = None,
        demonstrations: Any = None,
        **settings: Any,
    ) -> None:
        evaluation = {"num_tasks": 0, "every": 0} | settings.pop("evaluation", {})
        defaults = {"evaluation": evaluation, "groups_per_train_step": 2}
        self.settings = TrainerSettings(run_dir=run_dir, **defaults | settings)
        self.learner, self.replay = learner or FakeLearner(), replay or FakeReplay()
        self.publisher = publisher or FakePublisher(self.learner)
        self.run_dir = run_dir
        self.records = RunRecords(run_dir)
        self.evaluator: Any = evaluator(self.records) if evaluator else FakeEvaluator()
        self.board = StatusBoard()
        self.checkpoints = Checkpoints(run_dir)
        parts = SimpleNamespace(
            learner=self.learner,
            demonstrations=demonstrations or FakeDemonstrations(),
            replay=self.replay,
            publisher=self.publisher,
            evaluator=self.evaluator,
            checkpoints=self.checkpoints,
            records=self.records,
            board=self.board,
            placement=Split(),
        )
        self.job = TrainingJob(self.settings, cast("JobParts", parts), supervised)

    def offer(self, *names: str, policy: PolicyVersion | None = None, prefix: str = "") -> None:
        """One batch of fresh groups, sampled under `policy` or else what is live by then."""

        def batch() -> list[GroupLease]:
            newest = self.board.newest
            assert newest is not None
            live = policy or newest.policy_version
            return [lease(name, live, lease_id=f"{prefix}lease-{name}") for name in names]

        self.replay.batches.append(batch)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What metrics.jsonl has."""
        lines = (self.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    async def run(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.job.run()


def until_extended(here: World, times: int) -> None:
    """Work that lasts until leases were extended so often, which another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while len(here.replay.extended) < times and time.monotonic() < deadline:
        time.sleep(0.002)


async def killed_after(here: World, *batches: str) -> None:
    """Train batches of groups of one letter each, then die while the next is waited for."""
    for names in batches:
        here.offer(*names)
    here.replay.batches.append(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ExceptionGroup):
        await here.run()


def after(here: World, again: World, *, lost: str = "", in_work: str = "") -> World:
    """What the queue still has of an earlier trainer's groups when the next one comes."""
    journal = here.job.checkpointer.journal.entries()
    held = [lease_id for entry in journal for lease_id in entry.lease_ids]
    again.replay.kept = {
        lease_id: lease(lease_id.removeprefix("lease-"), FIRST)
        for lease_id in held
        if lease_id.removeprefix("lease-") not in lost
    }
    again.replay.held = (*again.replay.kept, *(f"lease-{name}" for name in in_work))
    again.replay.policy_version = here.job.state.policy_version
    return again


@contextmanager
def worlds(folder: Path, **base: Any) -> Iterator[Callable[..., World]]:
    """Makes worlds of the settings it is given over `base`; their files are closed at the end."""
    with ExitStack() as exits:

        def make(**settings: Any) -> World:
            made = World(folder, **base | settings)
            exits.callback(made.records.close)
            return made

        yield make
