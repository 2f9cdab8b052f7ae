"""Evaluate through the same services as training: offer tasks, wait for their groups, count."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from dialoop.clients.retry import RetryPolicy, retry
from dialoop.environments.tasks.source import first_refs
from dialoop.reasons import DropReason
from dialoop.trajectory import Group, Purpose, SamplingParams, Stage, Task, Trajectory
from dialoop.waits import waiting_for

from dialoop_services.trainer.data.batches import trial_means, trial_rewards_of
from dialoop_services.trainer.data.queue_client import WORKER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.clients.environment import EnvironmentClient
    from dialoop.clients.replay import ReplayClient
    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.records.records import RunRecords
    from dialoop_services.trainer.settings import TrainerSettings

_OFFER, _WAIT_S, _LEASE_S = 256, 2.0, 60.0
_PREFIX = "evaluation/"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """A plan to play the first `num_tasks` of a split, each `num_trajectories` times."""

    environment: str
    split: str
    num_tasks: int
    sampling: SamplingParams
    label: str
    num_trajectories: int = 1

    @classmethod
    def full(cls, settings: TrainerSettings, label: str, *, temperature: float) -> Self:
        """Return the plan for the held-out split before and after training."""
        return cls(
            environment=settings.environment.served_name,
            split=settings.environment.heldout_split,
            num_tasks=settings.evaluation.num_tasks,
            sampling=SamplingParams(
                temperature=temperature, max_new_tokens=settings.max_new_tokens
            ),
            label=label,
        )

    @classmethod
    def running(cls, settings: TrainerSettings) -> Self:
        """Return the plan for a part of the held-out split while training continues."""
        plan = cls.full(settings, "running", temperature=1.0)
        return replace(plan, num_tasks=min(plan.num_tasks, settings.evaluation.num_running_tasks))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Means over the trajectories that count: they have a reward, and only the policy failed.

    accuracy: the share of successes; None unless the rewards of each say whether it is one.
    num_failed: episodes that gave none. share: of all episodes, those that count.
    trial_rewards: mean reward of each episode of a trial, by the name that metrics.jsonl has.
    """

    mean_reward: float
    accuracy: float | None
    tool_call_rate: float
    num_trajectories: int
    num_failed: int
    oldest: PolicyVersion | None
    newest: PolicyVersion | None
    trial_rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Return the share of the episodes that count; 0 without any."""
        return share_in(asdict(self))

    def judged(self, min_share: float) -> float | None:
        """Return the mean reward; None if fewer episodes count, so that it decides nothing."""
        return judged_in(asdict(self), min_share)

    def row(self) -> dict[str, float | str | None]:
        """Return the row for metrics.jsonl."""
        row = asdict(self) | {"share": self.share}
        row |= row.pop("trial_rewards")
        return row | {"oldest": str(self.oldest or ""), "newest": str(self.newest or "")}


def share_in(row: Mapping[str, Any]) -> float:
    """Return the share of a row's episodes that count; rows of older runs do not say it."""
    num_counted = int(row["num_trajectories"])
    return num_counted / max(1, num_counted + int(row["num_failed"]))


def judged_in(row: Mapping[str, Any], min_share: float) -> float | None:
    """Return what `EvaluationResult.judged` does, of a row of metrics.jsonl."""
    return float(row["mean_reward"]) if share_in(row) >= min_share else None


class Evaluator:
    """Offers EVALUATION tasks, which collectors play first, and collects their groups."""

    def __init__(
        self, run: str, environment: EnvironmentClient, replay: ReplayClient, records: RunRecords
    ) -> None:
        self._run = run
        self._environment = environment
        self._replay = replay
        self._records = records
        self._retry_policy = RetryPolicy(max_attempts=None, total_s=120)
        # Groups that arrived, by the task id prefix of their running evaluation.
        self._arrived: dict[str, list[Group]] = {}

    async def evaluate(self, plan: EvaluationPlan, *, train_step: int) -> EvaluationResult:
        """Play the plan's tasks with the live policy and return the means."""
        prefix = f"{_PREFIX}{plan.label}/{uuid.uuid4().hex[:8]}/"
        self._arrived[prefix] = []
        try:
            trajectories, num_tasks = await self._play(plan, prefix)
        finally:
            del self._arrived[prefix]
        await asyncio.to_thread(
            self._records.trajectories,
            trajectories,
            outcome="evaluation",
            label=plan.label,
            train_step=train_step,
        )
        return _summarise(trajectories, num_tasks * plan.num_trajectories)

    async def drop_held(self) -> None:
        """Drop the evaluation groups that a killed trainer of this run had leased.

        Their evaluations are done anew, so these groups do not count. `_take` drops those that no
        trainer had leased.
        """
        held = await retry(
            lambda: self._replay.list_leases(self._run, Stage.EVALUATION, worker=WORKER),
            self._retry_policy,
        )
        await self._replay.drop(self._run, held, DropReason.ABANDONED)

    async def _play(self, plan: EvaluationPlan, prefix: str) -> tuple[list[Trajectory], int]:
        """Return the plan's trajectories, and how many tasks it has."""
        tasks = await self._tasks(plan, prefix)
        for start in range(0, len(tasks), _OFFER):
            await self._offer(tasks[start : start + _OFFER])
        trajectories: list[Trajectory] = []
        num_open = len(tasks)
        with waiting_for("replay", "groups of an evaluation") as wait:
            while num_open > 0:
                groups = await self._take(prefix)
                trajectories.extend(t for group in groups for t in group.trajectories)
                num_open -= len(groups)
                if groups:
                    wait.restart()
                elif num_open and await self._nothing_live():
                    break
        return trajectories, len(tasks)

    async def _offer(self, tasks: list[Task]) -> None:
        await retry(lambda: self._replay.offer_tasks(self._run, tasks), self._retry_policy)

    async def _tasks(self, plan: EvaluationPlan, prefix: str) -> list[Task]:
        listing = partial(
            self._environment.list_tasks, plan.environment, split=plan.split, one_epoch=True
        )
        refs = await first_refs(
            lambda **page: retry(partial(listing, **page), self._retry_policy), plan.num_tasks
        )
        return [
            Task(
                task_id=f"{prefix}{ref.key}",
                environment=plan.environment,
                split=plan.split,
                key=ref.key,
                seed=ref.seed,
                purpose=Purpose.EVALUATION,
                num_trajectories=plan.num_trajectories,
                min_trajectories=1,
                sampling=plan.sampling,
            )
            for ref in refs
        ]

    async def _take(self, prefix: str) -> list[Group]:
        """Return the groups that arrived for one evaluation; drop those of ended evaluations."""
        leased = await self._replay.lease_groups(
            self._run,
            Stage.EVALUATION,
            worker=WORKER,
            max_groups=_OFFER,
            lease_s=_LEASE_S,
            wait_s=_WAIT_S,
            task_id_prefix=_PREFIX,
        )
        waiting = [(lease, self._waits_for(lease.group)) for lease in leased.leases]
        awaited = [lease.lease_id for lease, arrived in waiting if arrived is not None]
        abandoned = [lease.lease_id for lease, arrived in waiting if arrived is None]
        await self._replay.acknowledge(self._run, awaited)
        for lease, arrived in waiting:
            if arrived is not None:
                arrived.append(lease.group)
        await self._replay.drop(self._run, abandoned, DropReason.ABANDONED)
        groups, self._arrived[prefix] = self._arrived[prefix], []
        return groups

    def _waits_for(self, group: Group) -> list[Group] | None:
        """Return the list of the running evaluation that the group belongs to, if there is one."""
        task_id = group.task.task_id
        return next((kept for own, kept in self._arrived.items() if task_id.startswith(own)), None)

    async def _nothing_live(self) -> bool:
        """Return whether no group is open: then the missing ones were all dropped."""
        return not (await self._replay.get_stats(self._run)).evaluation.num_open


def _summarise(trajectories: list[Trajectory], num_episodes: int) -> EvaluationResult:
    versions = [v for t in trajectories for v in t.policy_versions]
    trajectories = [t for t in trajectories if not t.is_unrewarded]
    successes = [t.success for t in trajectories]
    stated = [success for success in successes if success is not None]
    count = max(1, len(trajectories))
    return EvaluationResult(
        accuracy=sum(stated) / count if stated and len(stated) == len(successes) else None,
        mean_reward=sum(t.reward for t in trajectories) / count,
        tool_call_rate=sum(t.num_tool_calls > 0 for t in trajectories) / count,
        num_trajectories=len(trajectories),
        num_failed=num_episodes - len(trajectories),
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
        trial_rewards=trial_means(map(trial_rewards_of, trajectories)),
    )
