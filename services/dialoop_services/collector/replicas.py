"""Many inference replicas as one policy, and an environment that may die or be away."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.clients.errors import DEATHS, is_worth_retrying, require_count
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import DialoopError, Unavailable, Unsupported
from dialoop.reasons import Reason
from dialoop.sequences import Sequence, Source, sequence_of
from dialoop.waits import waiting_for

from dialoop_services.collector.routing import Destination, RoutingCounts, choose, renewed

if TYPE_CHECKING:
    from dialoop.chat import ChatHistory, History, ToolDefinition
    from dialoop.clients.inference import SampleChunk
    from dialoop.episode import Policy, ResetResult, Sample, Sessions, StepResult
    from dialoop.trajectory import SamplingParams

    from dialoop_services.collector.window import Window

log = logging.getLogger(__name__)
T = TypeVar("T")
P = TypeVar("P")

_WAIT_FOR_ONE_S = 10.0
# Members of a group are opened at the same time: their first turn waits this long for the last one.
_OPENING_S = 0.5
# An answer that may have so many tokens is asked for alone, and streamed where that can be.
_LONG_ANSWER = 256
# So many tokens and those on their way are lost with a replica: 2 % of an answer of 2,000.
_CHUNK_TOKENS = 32


@dataclass(slots=True, eq=False)
class _Place:
    """Where a request runs; `is_alone` while no other one that is tried again ran beside it."""

    is_alone: bool = True


class _Suspects:
    """Let requests under which a service died try again a few at a time: 1, 2, 4, ...

    One of them may end the service again. At first each goes alone, and every success makes room
    for one more. A death beside others blames nobody: those try again, one at a time at first, and
    there are at most about half as many as before. Requests for one `work` share the verdict.
    """

    def __init__(self) -> None:
        self._num_places = 1
        self._running: list[_Place] = []
        self._changed = asyncio.Event()
        self._verdicts: dict[Hashable, DialoopError] = {}

    async def retry(
        self,
        call: Callable[[], Awaitable[T]],
        policy: RetryPolicy,
        *,
        work: Hashable = None,
        wait_s: Callable[[int], float] | None = None,
    ) -> T:
        """Return the call's result; it is tried again as `retry` does, a suspect as said above."""
        is_suspect = False

        async def watch() -> T:
            nonlocal is_suspect
            try:
                result = await self._try(call, work, is_suspect=is_suspect)
            except DialoopError as error:
                is_suspect |= error.reason in DEATHS
                raise
            self._verdicts.pop(work, None)
            return result

        return await retry(watch, policy, wait_s=wait_s)

    async def _try(
        self, call: Callable[[], Awaitable[T]], work: Hashable, *, is_suspect: bool
    ) -> T:
        while True:
            place = await self._enter() if is_suspect else _Place()
            try:
                if is_suspect and work in self._verdicts:
                    raise self._verdicts[work]
                result = await call()
                self._num_places += is_suspect
                return result
            except DialoopError as error:
                if error.reason in DEATHS:
                    self._num_places = 1
                    if is_suspect and place.is_alone and work is not None:
                        self._verdicts[work] = error
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
class _Replica(Destination["Policy"]):
    """A replica with its failures in a row; after one it gets no request until `back_at`."""

    num_failures: int = 0
    back_at: float = 0.0
    streams: bool = True

    @property
    def stream(self) -> Callable[..., AsyncIterator[SampleChunk]] | None:
        """Return what streams an answer; None where the policy or its engine does not."""
        return getattr(self.client, "generate_stream", None) if self.streams else None


def _may_be_long(sampling: SamplingParams | None) -> bool:
    """Return whether the answer may have so many tokens that others should not wait for it."""
    return sampling is not None and (sampling.max_new_tokens or 0) >= _LONG_ANSWER


def _is_worth_streaming(sampling: SamplingParams | None) -> bool:
    """Return whether another replica may finish the answer, and losing it would cost much.

    A seeded answer is sampled again as a whole, since its seed names all its tokens. A constrained
    one has a state that its tokens alone do not give back.
    """
    if sampling is None or sampling.seed is not None:
        return False
    return _may_be_long(sampling) and not sampling.constraint and not sampling.top_logprobs


class _PartialAnswer:
    """The tokens of one answer so far, with the log-probs and versions of who sampled them."""

    def __init__(self) -> None:
        self._chunks: list[SampleChunk] = []
        self._began_at = time.perf_counter()

    def __len__(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self._chunks)

    @property
    def sequence(self) -> Sequence | None:
        """Return the tokens as a sequence of the policy's own; None where there are none."""
        if not self._chunks:
            return None
        return sequence_of(
            (
                (chunk.token_ids, {"source": Source.MODEL, "policy_version": chunk.policy_version})
                for chunk in self._chunks
            ),
            logprobs=(value for chunk in self._chunks for value in chunk.inference_logprobs),
        )

    async def finish(self, stream: Callable[..., AsyncIterator[SampleChunk]]) -> tuple[Sample, ...]:
        """Ask a replica for the rest and return the whole answer, alone in a tuple.

        What arrives is kept, also where the replica fails.
        """
        before = self.sequence
        samples: tuple[Sample, ...] = ()
        async for chunk in stream(partial_answer=before, chunk_tokens=_CHUNK_TOKENS):
            if chunk.token_ids:
                self._chunks.append(chunk)
            samples = chunk.samples or samples
        require_count(len(samples), 1, "samples")
        if before is None:
            return samples
        # The first replica's time counts too.
        elapsed_s = time.perf_counter() - self._began_at
        return tuple(replace(sample, generate_s=elapsed_s) for sample in samples)


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
        window: Window | None = None,
    ) -> None:
        self._window = window
        self._replicas: list[_Replica] = []
        self._joined = asyncio.Event()
        self._numbers = itertools.count()
        self._retry_policy = retry_policy
        self._suspects = _Suspects()
        self._counts = counts or RoutingCounts()
        self.update(policies)

    def update(self, policies: Mapping[str, Policy] | Iterable[Policy]) -> None:
        """Send requests to these from now on; what is known of those that stay is kept."""
        self._replicas = renewed(self._replicas, policies, _Replica, self._numbers)
        if self._replicas:
            self._joined.set()
        else:
            self._joined.clear()

    def of_group(self, group_id: str, num_members: int = 0) -> GroupPolicy:
        """Return the replicas as the policy of one group, whose calls keep to one of them."""
        return GroupPolicy(self, group_id, num_members)

    async def generate(self, history: History | None = None, **question: Any) -> tuple[Sample, ...]:
        """Answer one question that continues no other, as `GroupPolicy.generate` does."""
        return await self.of_group(str(next(self._numbers))).generate(history, **question)

    async def ask(
        self, asker: GroupPolicy, prompt: tuple[History, ...], question: Mapping[str, Any]
    ) -> tuple[Sample, ...]:
        """Ask the asker's replica, or the next one that can."""
        is_streamed = question["num_samples"] == 1 and _is_worth_streaming(question["sampling"])
        answer = _PartialAnswer() if is_streamed else None

        async def ask_once() -> tuple[Sample, ...]:
            replica = await self._next_replica(asker, question["num_samples"])
            self._counts.num_samples[replica.name] += question["num_samples"]
            replica.num_running += question["num_samples"]
            begun = time.monotonic()
            try:
                samples = await self._answer(replica, prompt, question, answer)
            except DialoopError as error:
                if is_worth_retrying(error):
                    self._set_aside(replica)
                raise
            finally:
                replica.num_running -= question["num_samples"]
            replica.num_failures, replica.back_at = 0, 0.0
            if self._window is not None and samples:
                self._window.saw(samples[0].queue_s, time.monotonic() - begun)
            return samples

        with waiting_for("inference", "Generate"):
            # No wait between attempts here: `_next_replica` waits until a replica is back.
            return await self._suspects.retry(ask_once, self._retry_policy, wait_s=lambda _: 0.0)

    async def _answer(
        self,
        replica: _Replica,
        prompt: tuple[History, ...],
        question: Mapping[str, Any],
        answer: _PartialAnswer | None,
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
        return await replica.client.generate(*prompt, **question)

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

    `home` is the replica that has their prefix. The first turn of `num_members` is one request with
    a sample for each. It goes once all have asked, or after a while without those that have not
    been opened, which ask together then. Members with seeds of their own ask alone. So do those
    whose answers may be long, so that nobody waits for the longest one. Satisfies
    `dialoop.episode.Policy`.
    """

    def __init__(self, replicas: Replicas, group_id: str, num_members: int = 0) -> None:
        self.group_id = group_id
        self.home: _Replica | None = None
        self._replicas = replicas
        self._num_missing = num_members
        self._first = _SharedRequest()

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
        tools: Iterable[ToolDefinition] = (),
    ) -> tuple[Sample, ...]:
        """Answer a history, or continue token ids, on the first replica that can.

        Raise Unavailable: SERVICE_AWAY if none can, and ENGINE_DIED or SERVICE_DIED for a request
        under which two replicas died.
        """
        is_first = self._num_missing > 0 and turn == 0 and context is None and num_samples == 1
        has_seed = sampling is not None and sampling.seed is not None
        tools = tuple(tools)
        if is_first and history is not None and not has_seed and not _may_be_long(sampling):
            return (await self._share(_Opening(history, tools), sampling),)
        question: dict[str, Any] = {
            "context": context,
            "num_context_messages": num_context_messages,
            "sampling": sampling,
            "turn": turn,
            "num_samples": num_samples,
        }
        if tools:
            question["tools"] = tools
        if token_ids is not None:
            question["token_ids"] = list(token_ids)  # the next replica gets them again
        prompt = () if history is None else (history,)
        return await self._replicas.ask(self, prompt, question)

    async def _share(self, opening: _Opening, sampling: SamplingParams | None) -> Sample:
        """Return the sample of a member in its first turn, from the request of all."""
        request = self._first
        member = request.join(opening)
        try:
            if len(request.openings) < self._num_missing:
                await asyncio.wait((request.sent,), timeout=_OPENING_S)
            if not request.sent.done():
                self._first = _SharedRequest()
                self._num_missing -= len(request.openings)
                request.sent.set_result(asyncio.ensure_future(self._ask(request, sampling)))
            # Shielded: a member that is cancelled must not cancel the request of the others.
            sample = (await asyncio.shield(request.sent.result()))[member]
            if isinstance(sample, BaseException):
                raise sample
            return sample
        finally:
            request.leave()

    async def _ask(
        self, request: _SharedRequest, sampling: SamplingParams | None
    ) -> tuple[Sample | BaseException, ...]:
        """Return a sample, or the error, of each member."""
        question = {"context": None, "num_context_messages": 0, "sampling": sampling, "turn": 0}
        first, *others = request.openings
        if all(opening == first for opening in others):
            num_samples = 1 + len(others)
            question |= first.offer | {"num_samples": num_samples}
            samples = await self._replicas.ask(self, (first.history,), question)
            require_count(len(samples), num_samples, "samples")
            return samples
        if any(opening.tools != first.tools for opening in others):
            log.warning(
                "Members of a group are offered different tools, so their prompts differ.",
                extra={"group_id": self.group_id},
            )
        # An environment may word the same task differently in each session.
        question["num_samples"] = 1
        calls = (
            self._replicas.ask(self, (opening.history,), question | opening.offer)
            for opening in request.openings
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return tuple(a if isinstance(a, BaseException) else a[0] for a in answers)


@dataclass(frozen=True, slots=True)
class _Opening:
    """What a member asks first."""

    history: History
    tools: tuple[ToolDefinition, ...]

    @property
    def offer(self) -> dict[str, Any]:
        """Return the question's tools, where there are any."""
        return {"tools": self.tools} if self.tools else {}


class _SharedRequest:
    """A request for several members: `openings` fills until `sent`, and has one of each."""

    def __init__(self) -> None:
        self.openings: list[_Opening] = []
        self.sent: asyncio.Future[asyncio.Future[tuple[Sample | BaseException, ...]]] = (
            asyncio.Future()
        )
        self._num_left = 0

    def join(self, opening: _Opening) -> int:
        """Add a member and return its number."""
        self.openings.append(opening)
        return len(self.openings) - 1

    def leave(self) -> None:
        """Take a member out, with its answer or cancelled; the last one cancels the request."""
        self._num_left += 1
        if self.sent.done() and self._num_left == len(self.openings):
            self.sent.result().cancel()


def policy_of_group(policy: P, group_id: str, *, num_members: int) -> P | GroupPolicy:
    """Return what a group's members ask: the policy, or a view of its replicas."""
    return policy.of_group(group_id, num_members) if isinstance(policy, Replicas) else policy


class RetryingSessions:
    """Sessions of an environment whose calls are retried while it is away.

    Every call there may be repeated. A task that its service died under is opened again a few at a
    time. Satisfies `dialoop.episode.Sessions`.
    """

    def __init__(self, sessions: Sessions, retry_policy: RetryPolicy) -> None:
        self._sessions = sessions
        self._retry_policy = retry_policy
        self._suspects = _Suspects()
        self._environment_of: dict[str, str] = {}

    async def create_session(self, session_id: str, environment: str) -> float:
        """Open a session; also wait while all sessions are in use."""
        self._environment_of[session_id] = environment
        creating = partial(self._sessions.create_session, session_id, environment)
        return await self._retry("CreateSession", creating)

    async def reset(
        self,
        session_id: str,
        *,
        episode: int,
        split: str,
        task_key: str,
        seed: int = 0,
        **resumed: Any,
    ) -> ResetResult:
        """Start an episode, or go on with one that is `resumed`."""
        resetting = partial(
            self._sessions.reset,
            session_id,
            episode=episode,
            split=split,
            task_key=task_key,
            seed=seed,
            **resumed,
        )
        task = (self._environment_of.get(session_id), split, task_key, seed)
        return await self._retry("Reset", resetting, work=task)

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> StepResult:
        """Take a step with the policy's message; a repeated step gets the first result."""
        stepping = partial(
            self._sessions.step,
            session_id,
            episode=episode,
            step_index=step_index,
            history=history,
        )
        return await self._retry("Step", stepping)

    async def close_session(self, session_id: str) -> bool:
        """Close the session without retrying: the environment reaps abandoned ones."""
        self._environment_of.pop(session_id, None)
        return await self._sessions.close_session(session_id)

    async def _retry(
        self, rpc: str, call: Callable[[], Awaitable[T]], *, work: Hashable = None
    ) -> T:
        with waiting_for("environment", rpc):
            return await self._suspects.retry(call, self._retry_policy, work=work)
