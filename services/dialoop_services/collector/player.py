"""Play one leased task: all members at once, and a member again if the policy is not at fault."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dialoop.clients.retry import SERVICE_AWAY, RetryPolicy
from dialoop.reasons import DropReason, Reason
from dialoop.rollout import play, sampling_of_member
from dialoop.trajectory import Failure, Group, Owner, SamplingParams, Task, Trajectory

from dialoop_services.collector.batched_group import BatchedGroup

if TYPE_CHECKING:
    from dialoop.clients.replay import TaskLease
    from dialoop.episode import Policy, Sessions

    from dialoop_services.collector.agents import Agents
    from dialoop_services.collector.batched_group import Groups
    from dialoop_services.collector.counters import Counters

_SEVERAL = 2


class MemberFailed(Exception):
    """A member failed too often; `failure` is the last one, which the policy did not cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.owner.name.lower()}: {failure.reason}: {failure.message}")
        self.failure = failure

    @property
    def is_outage(self) -> bool:
        """Return whether a service was away, which is no fault of the task."""
        return self.failure.reason == SERVICE_AWAY

    @property
    def drop_reason(self) -> str:
        """Return why the task goes back; what took too long has a reason of its own."""
        if self.is_outage:
            return DropReason.SERVICE_AWAY
        is_late = self.failure.reason in (Reason.ANSWER_TIMED_OUT, Reason.DEADLINE_EXCEEDED)
        return self.failure.reason.lower() if is_late else DropReason.MEMBER_FAILED


@dataclass(slots=True, kw_only=True)
class Round:
    """One attempt at a task under one lease, and every trajectory finished in it so far.

    `is_ending` is set once its group is appended or its lease given back.
    """

    lease: TaskLease
    finished: list[Trajectory] = field(default_factory=list)
    is_ending: bool = False

    @property
    def lease_id(self) -> str:
        """Return the id of the lease."""
        return self.lease.lease_id

    @property
    def task(self) -> Task:
        """Return the task."""
        return self.lease.task

    @property
    def group_id(self) -> str:
        """Return the id of its group."""
        return self.lease.group_id


class GroupPlayer:
    """Plays rounds on an environment and a policy."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        sessions: Sessions,
        policy: Policy,
        counters: Counters,
        *,
        member_retries: int,
        max_turns: int,
        retry_policy: RetryPolicy,
        agents: Agents | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._agents = agents
        self._groups = groups
        self._sessions = sessions
        self._policy = policy
        self._counters = counters
        self._member_retries = member_retries
        self._max_turns = max_turns
        self._retry_policy = retry_policy

    async def play(
        self, round_: Round, sampling: SamplingParams, *, has_one_turn: bool = False
    ) -> Group:
        """Play the whole group. If one member fails, stop the others and raise MemberFailed.

        Members of an environment that `has_one_turn` share their requests.
        """
        batched = self._batched_group(round_.task, sampling) if has_one_turn else None
        try:
            async with asyncio.TaskGroup() as members:
                playing = [
                    members.create_task(
                        self._play_member(round_, sampling_of_member(sampling, member), batched)
                    )
                    for member in range(round_.task.num_trajectories)
                ]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        trajectories = tuple(member.result() for member in playing)
        return Group(group_id=round_.group_id, task=round_.task, trajectories=trajectories)

    def _batched_group(self, task: Task, sampling: SamplingParams) -> BatchedGroup | None:
        """Return the requests that members share, or None where each makes its own."""
        has_agent = self._agents is not None and task.environment in self._agents
        alone = task.num_trajectories < _SEVERAL or sampling.seed is not None or has_agent
        if self._groups is None or alone:
            return None
        return BatchedGroup(task, self._groups, self._policy, self._retry_policy)

    async def _play_member(
        self, round_: Round, sampling: SamplingParams, batched: BatchedGroup | None
    ) -> Trajectory:
        for attempt in range(1, self._member_retries + 2):
            # A later attempt shares no requests: the other members do not repeat theirs.
            joined = batched if attempt == 1 else None
            trajectory = await self._play_episode(round_, sampling, joined)
            round_.finished.append(trajectory)
            self._counters.count_trajectory(trajectory, round_.task.purpose)
            failure = _blameless_failure(trajectory)
            if failure is None:
                return trajectory
            failed = MemberFailed(failure)
            if failed.is_outage or attempt > self._member_retries:
                raise failed
            await asyncio.sleep(self._retry_policy.wait_s(attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _play_episode(
        self, round_: Round, sampling: SamplingParams, batched: BatchedGroup | None
    ) -> Trajectory:
        """Play one episode with the environment's agent, or else with the policy itself."""
        task, group_id = round_.task, round_.group_id
        if self._agents is not None and task.environment in self._agents:
            return await self._agents.play(task, group_id=group_id, sampling=sampling)
        return await play(
            task,
            sessions=batched or self._sessions,
            policy=batched or self._policy,
            group_id=group_id,
            sampling=sampling,
            max_turns=self._max_turns,
        )


def _blameless_failure(trajectory: Trajectory) -> Failure | None:
    """Return the last failure that the policy did not cause, or None."""
    failures = [f for f in trajectory.failures if f.owner is not Owner.POLICY]
    return failures[-1] if failures else None


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one error of a task group; unexpected errors come before failed members."""
    unexpected = [e for e in errors.exceptions if not isinstance(e, MemberFailed)]
    return unexpected[0] if unexpected else errors.exceptions[0]
