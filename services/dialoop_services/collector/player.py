"""Play one leased task: its members at once, and a member again if the policy is not at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from dialoop.clients.errors import DEATHS
from dialoop.clients.retry import SERVICE_AWAY, RetryPolicy
from dialoop.episode import Redo, TurnLog
from dialoop.reasons import DropReason, Reason
from dialoop.rollout import LOST_SESSIONS, sampling_of_member
from dialoop.rollout import play as play_chat
from dialoop.trajectory import Failure, Owner, SamplingParams, Task, Trajectory

from dialoop_services.collector.replicas import policy_of_group

if TYPE_CHECKING:
    from dialoop.clients.replay import TaskLease
    from dialoop.episode import Policy, Sessions

    from dialoop_services.collector.counters import Counters
    from dialoop_services.collector.settings import CollectorSettings
    from dialoop_services.config.tables import EnvironmentSection

# Reasons for which the turns of an earlier play are of no use.
_RESTARTS = frozenset({Reason.REDO_DIFFERS, Reason.SNAPSHOT_TORN, *LOST_SESSIONS})
# So many sessions of an episode may be lost at one turn; then it is played from the start.
_MAX_LOST = 2
_NAMED = frozenset({Reason.ANSWER_TIMED_OUT, Reason.DEADLINE_EXCEEDED, *DEATHS})


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMember:
    """A member that is not in the queue: why, in snake_case and in words.

    `kind`: what failures of its kind have in common. `is_outage`: a service was away, which is no
    fault of the task.
    """

    reason: str
    message: str
    kind: str = ""
    is_outage: bool = False


@dataclass(slots=True, kw_only=True)
class GroupPlay:
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
    def num_left(self) -> int:
        """Return how many members are still to be finished."""
        return max(0, len(self.lease.members) - self.num_played)

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
    """Plays the tasks of an environment in a way of its own: with an agent, as trials, as texts."""

    async def play(
        self, task: Task, *, policy: Policy, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """Play a task once; what goes wrong is a failure of the trajectory."""


class LogOf(Protocol):
    """Gives a member's log, with the turns of an earlier play unless it is played `anew`."""

    async def __call__(self, member: int, *, anew: bool) -> TurnLog:
        """Return the log."""


async def log_in_memory(member: int, *, anew: bool) -> TurnLog:
    """Return an empty log that outlives no process."""
    return TurnLog()


MakePlayer: TypeAlias = Callable[["EnvironmentSection", "CollectorSettings"], TaskPlayer]
"""A function that makes the player of an environment's section."""


class GroupPlayer:
    """Plays groups on an environment and a policy; `players` by the environment they play."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        sessions: Sessions,
        policy: Policy,
        counters: Counters,
        *,
        member_retries: int,
        max_turns: int,
        retry_policy: RetryPolicy,
        players: Mapping[str, TaskPlayer] = MappingProxyType({}),
    ) -> None:
        self._players = players
        self._sessions = sessions
        self._policy = policy
        self._counters = counters
        self._member_retries = member_retries
        self._max_turns = max_turns
        self._retry_policy = retry_policy

    async def play(
        self,
        play: GroupPlay,
        sampling: SamplingParams,
        deliver: Callable[[PlayedMember], Awaitable[FailedMember | None]],
        *,
        log_of: LogOf = log_in_memory,
    ) -> dict[int, FailedMember]:
        """Play all members of the lease and deliver each as soon as it is finished.

        A member that fails does not stop the others. Return those that failed, or that `deliver`
        could not bring into the queue.
        """
        members = play.lease.members
        # Only the members of a chat begin with the same question.
        is_chat = play.task.environment not in self._players
        num_alike = len(members) - len(play.lease.recorded_members) if is_chat else 0
        policy = policy_of_group(self._policy, play.group_id, num_members=num_alike)
        num_playing, failed = len(members), dict[int, FailedMember]()

        async def play_one(member: int) -> None:
            nonlocal num_playing
            own_sampling = sampling_of_member(sampling, member)
            ended = await self._play_member(play, member, own_sampling, policy, log_of)
            num_playing -= 1
            play.is_ending = not num_playing
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

    async def _play_member(
        self,
        play: GroupPlay,
        member: int,
        sampling: SamplingParams,
        policy: Policy,
        log_of: LogOf,
    ) -> PlayedMember | FailedMember:
        attempt, num_discarded = 1, 0
        log = await log_of(member, anew=False)
        while True:
            num_kept = len(log.turns)
            trajectory = await self._play_episode(play, sampling, policy, log)
            failure = _blameless_failure(trajectory)
            if log.turns and failure is not None and failure.reason in _RESTARTS:
                self._counters.count_restarted(failure.reason)
                if len(log.turns) == num_kept:  # nothing was sampled here: this was no play
                    log = await log_of(member, anew=True)
                    continue
            play.num_played += 1
            self._counters.count_trajectory(trajectory, play.task.purpose)
            if failure is None:
                return PlayedMember(
                    member=member, trajectory=trajectory, num_discarded=num_discarded
                )
            is_outage = failure.reason in (SERVICE_AWAY, Reason.LEASE_LOST)
            # What a service died under was tried again already: a third time only as a new attempt.
            is_last = is_outage or failure.reason in DEATHS or attempt > self._member_retries
            if is_last:
                return _failed_member(failure, is_outage=is_outage)
            await asyncio.sleep(self._retry_policy.wait_s(attempt))
            attempt, num_discarded = attempt + 1, num_discarded + 1
            log = await log_of(member, anew=True)

    async def _play_episode(
        self, play: GroupPlay, sampling: SamplingParams, policy: Policy, log: TurnLog
    ) -> Trajectory:
        """Play one episode with the environment's player, or else as a chat with the policy.

        A chat goes on in a new session where its own is lost and its steps may be taken again.
        """
        task, player = play.task, self._players.get(play.task.environment)
        if player is not None:
            return await player.play(task, policy=policy, group_id=play.group_id, sampling=sampling)
        num_lost, num_turns = 0, len(log.turns)
        while True:
            is_continued = bool(log.turns)
            trajectory = await play_chat(
                task,
                sessions=self._sessions,
                policy=policy,
                group_id=play.group_id,
                sampling=sampling,
                max_turns=self._max_turns,
                log=log,
            )
            failure = _blameless_failure(trajectory)
            if is_continued and (failure is None or failure.reason not in _RESTARTS):
                self._counters.count_continued()
            is_lost = failure is not None and failure.reason in LOST_SESSIONS
            if not (is_lost and log.turns and log.redo is not Redo.NEVER):
                return trajectory
            # The next turn may be what ends the environment's service.
            num_lost = num_lost + 1 if len(log.turns) == num_turns else 1
            num_turns = len(log.turns)
            if num_lost > _MAX_LOST:
                return trajectory


def _failed_member(failure: Failure, *, is_outage: bool) -> FailedMember:
    """Return why the member goes back; long answers and deaths have reasons of their own."""
    reason: str = DropReason.SERVICE_AWAY if is_outage else DropReason.MEMBER_FAILED
    if failure.reason in _NAMED:
        reason = failure.reason.lower()
    kind = f"{failure.owner.name.lower()}: {failure.reason}"
    message = f"{kind}: {failure.message}"
    return FailedMember(reason=reason, message=message, kind=kind, is_outage=is_outage)


def _blameless_failure(trajectory: Trajectory) -> Failure | None:
    """Return the last failure that the policy did not cause, or None."""
    failures = [f for f in trajectory.failures if f.owner is not Owner.POLICY]
    return failures[-1] if failures else None
