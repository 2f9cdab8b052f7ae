"""Play one leased task: its members at once, and a member again if the policy is not at fault."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dialoop.clients.errors import DEATHS
from dialoop.clients.retry import SERVICE_AWAY, RetryPolicy
from dialoop.reasons import DropReason, Reason
from dialoop.rollout import play, sampling_of_member
from dialoop.trajectory import Failure, Owner, SamplingParams, Task, Trajectory

from dialoop_services.collector.batched_group import BatchedGroup
from dialoop_services.collector.replicas import policy_of_group

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from dialoop.clients.replay import TaskLease
    from dialoop.episode import Policy, Sessions

    from dialoop_services.collector.batched_group import Groups
    from dialoop_services.collector.counters import Counters

_SEVERAL = 2
_NAMED = frozenset({Reason.ANSWER_TIMED_OUT, Reason.DEADLINE_EXCEEDED, *DEATHS})


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMember:
    """A member that is not in the queue: why, in snake_case and in words.

    `is_outage`: a service was away, which is no fault of the task.
    """

    reason: str
    message: str
    is_outage: bool = False


@dataclass(slots=True, kw_only=True)
class Round:
    """The play of a leased task's open members under one lease.

    num_played: finished plays, also those that failed. num_counted: those that the queue counts,
    with the members it has. `is_ending` is set once no member is being played any more, and
    `has_begun` once one is.
    """

    lease: TaskLease
    num_played: int = 0
    num_counted: int = 0
    has_begun: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedMember:
    """A finished member and the number of its plays before, which failed."""

    member: int
    trajectory: Trajectory
    num_discarded: int


class TaskPlayer(Protocol):
    """Plays whole episodes of some environments: agents, or trials and text episodes."""

    def __contains__(self, environment: str) -> bool:
        """Return whether it plays this environment's tasks."""
        ...

    async def play(self, task: Task, *, group_id: str, sampling: SamplingParams) -> Trajectory:
        """Play a task once; what goes wrong is a failure of the trajectory."""
        ...


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
        players: Iterable[TaskPlayer] = (),
        groups: Groups | None = None,
    ) -> None:
        self._players = tuple(players)
        self._groups = groups
        self._sessions = sessions
        self._policy = policy
        self._counters = counters
        self._member_retries = member_retries
        self._max_turns = max_turns
        self._retry_policy = retry_policy

    async def play(
        self,
        round_: Round,
        sampling: SamplingParams,
        deliver: Callable[[PlayedMember], Awaitable[FailedMember | None]],
    ) -> dict[int, FailedMember]:
        """Play all members of the lease and deliver each as soon as it is finished.

        A member that fails does not stop the others. Return those that failed, or that `deliver`
        could not bring into the queue.
        """
        members = round_.lease.members
        policy = policy_of_group(self._policy, round_.group_id)
        batched = self._batched_group(round_, policy)
        num_playing, failed = len(members), dict[int, FailedMember]()

        async def play_one(member: int) -> None:
            nonlocal num_playing
            own_sampling = sampling_of_member(sampling, member)
            ended = await self._play_member(round_, member, own_sampling, policy, batched)
            num_playing -= 1
            round_.is_ending = not num_playing
            failure = await deliver(ended) if isinstance(ended, PlayedMember) else ended
            if failure is not None:
                failed[member] = failure

        try:
            async with asyncio.TaskGroup() as playing:
                for member in members:
                    playing.create_task(play_one(member))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return failed

    def _batched_group(self, round_: Round, policy: Policy) -> BatchedGroup | None:
        """Return the requests that members share, or None where each makes its own."""
        task, num_members = round_.task, len(round_.lease.members)
        is_alone = num_members < _SEVERAL or self._player_of(task) is not None
        if self._groups is None or is_alone:
            return None
        return BatchedGroup(task, self._groups, policy, self._retry_policy, num_members)

    async def _play_member(
        self,
        round_: Round,
        member: int,
        sampling: SamplingParams,
        policy: Policy,
        batched: BatchedGroup | None,
    ) -> PlayedMember | FailedMember:
        for attempt in range(1, self._member_retries + 2):
            # A later attempt shares no requests: the other members do not repeat theirs.
            joined = batched if attempt == 1 else None
            trajectory = await self._play_episode(round_, sampling, policy, joined)
            round_.num_played += 1
            self._counters.count_trajectory(trajectory, round_.task.purpose)
            failure = _blameless_failure(trajectory)
            if failure is None:
                return PlayedMember(member=member, trajectory=trajectory, num_discarded=attempt - 1)
            is_outage = failure.reason == SERVICE_AWAY
            # What a service died under was tried again already: a third time only as a new attempt.
            is_last = is_outage or failure.reason in DEATHS or attempt > self._member_retries
            if is_last:
                return _failed_member(failure, is_outage=is_outage)
            await asyncio.sleep(self._retry_policy.wait_s(attempt))
        raise AssertionError("unreachable: the last attempt returns")

    async def _play_episode(
        self,
        round_: Round,
        sampling: SamplingParams,
        policy: Policy,
        batched: BatchedGroup | None,
    ) -> Trajectory:
        """Play one episode with the environment's player, or else as a chat with the policy."""
        task, group_id = round_.task, round_.group_id
        player = self._player_of(task)
        if player is not None:
            return await player.play(task, group_id=group_id, sampling=sampling)
        return await play(
            task,
            sessions=batched or self._sessions,
            policy=batched or policy,
            group_id=group_id,
            sampling=sampling,
            max_turns=self._max_turns,
        )

    def _player_of(self, task: Task) -> TaskPlayer | None:
        return next((player for player in self._players if task.environment in player), None)


def _failed_member(failure: Failure, *, is_outage: bool) -> FailedMember:
    """Return why the member goes back; long answers and deaths have reasons of their own."""
    reason: str = DropReason.SERVICE_AWAY if is_outage else DropReason.MEMBER_FAILED
    if failure.reason in _NAMED:
        reason = failure.reason.lower()
    message = f"{failure.owner.name.lower()}: {failure.reason}: {failure.message}"
    return FailedMember(reason=reason, message=message, is_outage=is_outage)


def _blameless_failure(trajectory: Trajectory) -> Failure | None:
    """Return the last failure that the policy did not cause, or None."""
    failures = [f for f in trajectory.failures if f.owner is not Owner.POLICY]
    return failures[-1] if failures else None
