"""Evaluation through the same services as training: offer, wait, count."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dialoop.trajectory import Group, Purpose, SamplingParams, Stage, Task, Trajectory

if TYPE_CHECKING:
    from dialoop.clients.environment import EnvironmentClient
    from dialoop.clients.replay import ReplayClient
    from dialoop.sequences import PolicyVersion

    from services.trainer.records import RunRecords

_OFFER, _WAIT_S, _LEASE_S = 256, 2.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What to evaluate: the first `num_tasks` of a split, each `num_trajectories` times."""

    environment: str
    split: str
    num_tasks: int
    sampling: SamplingParams
    label: str
    num_trajectories: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Means over trajectories; failed tasks are counted, not scored."""

    mean_reward: float
    tool_call_rate: float
    num_trajectories: int
    num_failed: int
    oldest: PolicyVersion | None
    newest: PolicyVersion | None

    def row(self) -> dict[str, float | str | None]:
        """As it is written to metrics.jsonl."""
        row = asdict(self)
        return row | {"oldest": str(self.oldest or ""), "newest": str(self.newest or "")}


class Evaluator:
    """Offers EVALUATION tasks, which collectors play first, and gathers their groups."""

    def __init__(
        self, run: str, environment: EnvironmentClient, replay: ReplayClient, records: RunRecords
    ) -> None:
        self._run = run
        self._environment = environment
        self._replay = replay
        self._records = records

    async def evaluate(self, plan: EvaluationPlan, *, train_step: int) -> Evaluation:
        """Play the plan's tasks under whatever policy is live and return the means."""
        prefix = f"evaluation/{plan.label}/{uuid.uuid4().hex[:8]}/"
        tasks = await self._tasks(plan, prefix)
        for start in range(0, len(tasks), _OFFER):
            await self._replay.offer_tasks(self._run, tasks[start : start + _OFFER])
        trajectories: list[Trajectory] = []
        num_failed, num_open = 0, len(tasks)
        while num_open:
            groups = await self._take(prefix)
            trajectories.extend(t for group in groups for t in group.trajectories)
            num_open -= len(groups)
            if not groups and num_open and await self._nothing_live():
                num_failed, num_open = num_open, 0
        self._records.trajectories(
            trajectories, outcome="evaluation", label=plan.label, train_step=train_step
        )
        return _summarise(trajectories, num_failed)

    async def _tasks(self, plan: EvaluationPlan, prefix: str) -> list[Task]:
        tasks: list[Task] = []
        token = ""
        while len(tasks) < plan.num_tasks:
            page = await self._environment.list_tasks(
                plan.environment,
                split=plan.split,
                page_size=min(1000, plan.num_tasks - len(tasks)),
                page_token=token,
                one_epoch=True,
            )
            tasks.extend(
                Task(
                    task_id=f"{prefix}{ref.key}",
                    environment=plan.environment,
                    split=plan.split,
                    key=ref.key,
                    seed=ref.seed,
                    purpose=Purpose.EVALUATION,
                    num_trajectories=plan.num_trajectories,
                    sampling=plan.sampling,
                )
                for ref in page.tasks
            )
            token = page.next_page_token
            if not token:
                break
        return tasks

    async def _take(self, prefix: str) -> list[Group]:
        leased = await self._replay.lease_groups(
            self._run,
            Stage.EVALUATION,
            worker="trainer",
            max_groups=_OFFER,
            lease_s=_LEASE_S,
            wait_s=_WAIT_S,
            task_id_prefix=prefix,
        )
        await self._replay.acknowledge(self._run, [g.lease_id for g in leased.leases])
        return [lease.group for lease in leased.leases]

    async def _nothing_live(self) -> bool:
        """Whether the missing groups were all dropped."""
        return not (await self._replay.get_stats(self._run)).evaluation.num_open


def _summarise(trajectories: list[Trajectory], num_failed: int) -> Evaluation:
    versions = [v for t in trajectories for v in t.policy_versions]
    count = max(1, len(trajectories))
    return Evaluation(
        mean_reward=sum(t.reward for t in trajectories) / count,
        tool_call_rate=sum(t.num_tool_calls > 0 for t in trajectories) / count,
        num_trajectories=len(trajectories),
        num_failed=num_failed,
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
    )
