"""Many inference replicas as one policy, and an environment that may die or be away."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.clients.errors import DEATHS, is_worth_retrying
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DialoopError, Unavailable, Unsupported
from dialoop.reasons import Reason
from dialoop.waits import waiting_for

from dialoop_services.collector.partial_answer import PartialAnswer, is_worth_streaming
from dialoop_services.collector.routing import RoutingCounts, choose

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from dialoop.chat import ChatHistory, History
    from dialoop.clients.environment import StepItem
    from dialoop.clients.inference import SampleChunk
    from dialoop.environments.tasks.choosing import TaskChoice
    from dialoop.episode import GroupOpening, Policy, ResetResult, Sample, Sessions, StepResult
    from dialoop.sequences import Sequence
    from dialoop.trajectory import SamplingParams

    from dialoop_services.collector.batched_group import Groups

T = TypeVar("T")
P = TypeVar("P")

_WAIT_FOR_ONE_S = 10.0


@dataclass(slots=True, eq=False)
class _Place:
    """Where a request runs; `is_alone` while no other one that is tried again ran beside it."""

    is_alone: bool = True


class _Suspects:
    """Let requests under which a service died try again a few at a time: 1, 2, 4, ...

    One of them may end the service again. At first each goes alone, and every success makes room
    for one more. A death beside others blames nobody: those try again, one at a time at first, and
    there are at most about half as many as before.
    """

    def __init__(self) -> None:
        self._num_places = 1
        self._running: list[_Place] = []
        self._changed = asyncio.Event()

    async def watch(self, call: Callable[[], Awaitable[T]], *, is_suspect: bool) -> T:
        """Return the call's result; a suspect waits for a place, and goes again as said above."""
        while True:
            place = await self._enter() if is_suspect else _Place()
            try:
                result = await call()
                self._num_places += is_suspect
                return result
            except DialoopError as error:
                if error.reason in DEATHS:
                    self._num_places = 1
                if error.reason not in DEATHS or place.is_alone:
                    raise
            finally:
                if is_suspect:
                    self._running.remove(place)
                    self._changed.set()

    async def _enter(self) -> _Place:
        while len(self._running) >= self._num_places:
            self._changed.clear()
            await self._changed.wait()
        place = _Place()
        self._running.append(place)
        if len(self._running) > 1:
            for other in self._running:
                other.is_alone = False
        return place


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica with its failures in a row; after one it gets no request until `back_at`."""

    name: str
    policy: Policy
    num_running: int = 0
    num_failures: int = 0
    back_at: float = 0.0
    streams: bool = True

    @property
    def stream(self) -> Callable[..., AsyncIterator[SampleChunk]] | None:
        """Return what streams an answer; None where the policy or its engine does not."""
        return getattr(self.policy, "generate_stream", None) if self.streams else None


class Replicas:
    """Sends each conversation's requests to the replica that has its prefix.

    One that is away is skipped for a growing time. Sampling has no side effect, so a request that a
    killed replica never answered goes to another. That one goes on after the tokens of a long
    answer that have arrived. Satisfies `dialoop.episode.Policy`, each request by itself.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy] | Iterable[Policy],
        retry_policy: RetryPolicy,
        counts: RoutingCounts | None = None,
    ) -> None:
        self._replicas: list[_Replica] = []
        self._joined = asyncio.Event()
        self._numbers = itertools.count()
        self._retry_policy = retry_policy
        self._suspects = _Suspects()
        self._counts = counts or RoutingCounts()
        self.update(policies)

    def update(self, policies: Mapping[str, Policy] | Iterable[Policy]) -> None:
        """Send requests to these from now on; what is known of those that stay is kept."""
        if not isinstance(policies, Mapping):
            policies = {f"unnamed {next(self._numbers)}": policy for policy in policies}
        present = {id(replica.policy): replica for replica in self._replicas}
        self._replicas = [
            present.get(id(policy)) or _Replica(name, policy) for name, policy in policies.items()
        ]
        if self._replicas:
            self._joined.set()
        else:
            self._joined.clear()

    def of_group(self, group_id: str) -> GroupPolicy:
        """Return the replicas as the policy of one group, whose calls keep to one of them."""
        return GroupPolicy(self, group_id)

    async def generate(self, history: History | None = None, **question: Any) -> tuple[Sample, ...]:
        """Answer one question that continues no other, as `GroupPolicy.generate` does."""
        return await self.of_group(str(next(self._numbers))).generate(history, **question)

    async def ask(
        self, asker: GroupPolicy, prompt: tuple[History, ...], question: Mapping[str, Any]
    ) -> tuple[Sample, ...]:
        """Ask the asker's replica, or the next one that can."""
        is_suspect = False
        is_streamed = question["num_samples"] == 1 and is_worth_streaming(question["sampling"])
        answer = PartialAnswer() if is_streamed else None

        async def ask_once() -> tuple[Sample, ...]:
            nonlocal is_suspect
            replica = await self._next_replica(asker, question["num_samples"])
            self._counts.num_samples[replica.name] += question["num_samples"]
            replica.num_running += question["num_samples"]
            try:
                samples = await self._answer(replica, prompt, question, answer)
            except DialoopError as error:
                is_suspect |= error.reason in DEATHS
                if is_worth_retrying(error):
                    self._set_aside(replica)
                raise
            finally:
                replica.num_running -= question["num_samples"]
            replica.num_failures, replica.back_at = 0, 0.0
            return samples

        with waiting_for("inference", "Generate"):
            # No wait between attempts here: `_next_replica` waits until a replica is back.
            return await retry(
                lambda: self._suspects.watch(ask_once, is_suspect=is_suspect),
                self._retry_policy,
                wait_s=lambda _: 0.0,
            )

    async def _answer(
        self,
        replica: _Replica,
        prompt: tuple[History, ...],
        question: Mapping[str, Any],
        answer: PartialAnswer | None,
    ) -> tuple[Sample, ...]:
        """Ask one replica; what arrives of a long answer is kept, and is not asked for again.

        A replica that does not stream begins anew.
        """
        stream = None if answer is None else replica.stream
        if answer is not None and stream is not None:
            alone = {key: value for key, value in question.items() if key != "num_samples"}
            num_kept = len(answer)
            try:
                samples = await answer.finish(partial(stream, *prompt, **alone))
            except Unsupported as error:
                if error.reason != Reason.UNSUPPORTED:
                    raise
                replica.streams = False
            else:
                self._counts.num_kept_tokens[replica.name] += num_kept
                return samples
        return await replica.policy.generate(*prompt, **question)

    async def _next_replica(self, asker: GroupPolicy, num_samples: int) -> _Replica:
        """Return the replica that the asker's call goes to, or wait for the first one back."""
        if not self._replicas:
            await self._wait_for_one()
        now = time.monotonic()
        present = [replica for replica in self._replicas if replica.back_at <= now]
        if not present:
            soonest = min(self._replicas, key=lambda replica: replica.back_at)
            await asyncio.sleep(soonest.back_at - now)
            present = [soonest]
        home = asker.home
        replica = choose(asker.group_id, present, home, num_samples=num_samples)
        if home not in present:
            asker.home = replica
        if home is not None and replica is not home:
            self._counts.num_moved[replica.name] += 1
        return replica

    async def _wait_for_one(self) -> None:
        try:
            async with asyncio.timeout(_WAIT_FOR_ONE_S):
                with waiting_for("registry", "a replica in rotation"):
                    await self._joined.wait()
        except TimeoutError:
            raise Unavailable(
                "No inference replica is in rotation.",
                remedy="See the logs of the replicas, and of the trainer, which admits them.",
            ) from None

    def _set_aside(self, replica: _Replica) -> None:
        now = time.monotonic()
        if replica.back_at > now:
            return  # another request of ours noticed the same outage
        replica.num_failures += 1
        replica.back_at = now + self._retry_policy.wait_s(replica.num_failures)


class GroupPolicy:
    """The replicas as the policy of one group's members, who share a prompt and so a replica.

    `home` is the replica that has their prefix. Satisfies `dialoop.episode.Policy`.
    """

    def __init__(self, replicas: Replicas, group_id: str) -> None:
        self.group_id = group_id
        self.home: _Replica | None = None
        self._replicas = replicas

    async def generate(  # noqa: PLR0913 - a policy's question
        self,
        history: History | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        """Answer a history, or continue token ids, on the first replica that can.

        Raise Unavailable: SERVICE_AWAY if none can, and ENGINE_DIED or SERVICE_DIED for a request
        under which two replicas died.
        """
        question: dict[str, Any] = {
            "context": context,
            "num_context_messages": num_context_messages,
            "sampling": sampling,
            "turn": turn,
            "num_samples": num_samples,
        }
        if token_ids is not None:
            question["token_ids"] = list(token_ids)  # the next replica gets them again
        prompt = () if history is None else (history,)
        return await self._replicas.ask(self, prompt, question)


def policy_of_group(policy: P, group_id: str) -> P | GroupPolicy:
    """Return what a group's members ask: the policy, or a view of its replicas."""
    return policy.of_group(group_id) if isinstance(policy, Replicas) else policy


class CautiousGroups:
    """Groups of an environment service; what it died under is opened again a few at a time.

    Whoever opens a group again gives it the same id. Satisfies `batched_group.Groups`.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._suspects = _Suspects()
        self._suspect_ids: set[str] = set()

    async def create_group(
        self, group_id: str, environment: str, *, num_sessions: int, choice: TaskChoice
    ) -> GroupOpening:
        """Open sessions at the start of one task, all or none."""
        is_suspect = group_id in self._suspect_ids
        opening = partial(
            self._groups.create_group,
            group_id,
            environment,
            num_sessions=num_sessions,
            choice=choice,
        )
        try:
            opened = await self._suspects.watch(opening, is_suspect=is_suspect)
        except DialoopError as error:
            if error.reason in DEATHS:
                self._suspect_ids.add(group_id)
            raise
        self._suspect_ids.discard(group_id)
        return opened

    async def batch_step(self, items: Iterable[StepItem]) -> tuple[StepResult | DialoopError, ...]:
        """Step many sessions."""
        return await self._groups.batch_step(items)

    async def close_session(self, session_id: str) -> bool:
        """Forget the session."""
        return await self._groups.close_session(session_id)


class RetryingSessions:
    """Sessions of an environment whose calls are retried while it is away.

    Every call there may be repeated. Satisfies `dialoop.episode.Sessions`.
    """

    def __init__(self, sessions: Sessions, retry_policy: RetryPolicy) -> None:
        self._sessions = sessions
        self._retry_policy = retry_policy

    async def create_session(self, session_id: str, environment: str) -> float:
        """Open a session; also wait while all sessions are in use."""
        with waiting_for("environment", "CreateSession"):
            return await retry(
                lambda: self._sessions.create_session(session_id, environment), self._retry_policy
            )

    async def reset(
        self, session_id: str, *, episode: int, split: str, task_key: str, seed: int = 0
    ) -> ResetResult:
        """Start an episode."""
        with waiting_for("environment", "Reset"):
            return await retry(
                lambda: self._sessions.reset(
                    session_id, episode=episode, split=split, task_key=task_key, seed=seed
                ),
                self._retry_policy,
            )

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> StepResult:
        """Take a step with the policy's message; a repeated step gets the first result."""
        with waiting_for("environment", "Step"):
            return await retry(
                lambda: self._sessions.step(
                    session_id, episode=episode, step_index=step_index, history=history
                ),
                self._retry_policy,
            )

    async def close_session(self, session_id: str) -> bool:
        """Close the session without retrying: the environment reaps abandoned ones."""
        return await self._sessions.close_session(session_id)
