"""Play a group turn by turn with requests that its members share.

    create and reset, 8 times      ->    CreateGroup, once
    generate, in the first turn    ->    Generate with 8 samples, once
    generate, in later turns       ->    Generate, for each member, since their prompts differ
    step, in each turn             ->    BatchStep of all members that have answered

A trajectory takes part in at most two requests a turn. Where an answer may be long, each member
sends its own Generate in the first turn too, so that nobody waits for the longest answer. A step
waits for the other members a fraction of the time that its own answer took, and goes without those
that are not there by then. Where steps themselves are slow, each member steps alone, so that no
tool keeps the others waiting.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dialoop.clients.environment import StepItem
from dialoop.clients.retry import retry
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.errors import DialoopError

from dialoop_services.collector.partial_answer import may_be_long

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from collections.abc import Sequence as Several

    from dialoop.chat import ChatHistory, History
    from dialoop.clients.environment import GroupOpening
    from dialoop.clients.retry import RetryPolicy
    from dialoop.episode import Policy, ResetResult, Sample, StepResult
    from dialoop.sequences import Sequence
    from dialoop.trajectory import SamplingParams, Task

# A step waits for other members this part of the time that its answer took, and at least so long:
# as answers arrive that were sampled side by side.
_WAIT_SHARE = 0.1
_LEAST_WAIT_S = 0.02
# A request costs about a millisecond: where steps take longer than this, sharing saves nothing.
_SLOW_STEP_S = 0.1

# Tasks that close sessions which were opened after their member had been cancelled.
_closing: set[asyncio.Task[bool]] = set()

A = TypeVar("A")
R = TypeVar("R")


class Groups(Protocol):
    """The environment service's calls for many sessions: an EnvironmentClient."""

    async def create_group(
        self, group_id: str, environment: str, *, num_sessions: int, choice: TaskChoice
    ) -> GroupOpening:
        """Open sessions at the start of one task, all or none."""
        ...

    async def batch_step(self, items: Iterable[StepItem]) -> tuple[StepResult | DialoopError, ...]:
        """Step many sessions; the result of an item that failed is its error."""
        ...

    async def close_session(self, session_id: str) -> bool:
        """Forget the session."""
        ...


class JoinedCall(Generic[A, R]):
    """One call for all members of a group, made once every member has joined or left.

    Each member gets its own answer, or its own error is raised.
    """

    def __init__(
        self, num_members: int, call: Callable[[list[A]], Awaitable[Several[R | DialoopError]]]
    ) -> None:
        self._num_members = num_members
        self._call = call
        self._requests: list[A] = []
        self._answers: asyncio.Future[Several[R | DialoopError]] | None = None
        self._has_started = asyncio.Event()

    async def join(self, request: A) -> R:
        """Return the answer to one member's request."""
        index = len(self._requests)
        self._requests.append(request)
        self._start_when_complete()
        await self._has_started.wait()
        assert self._answers is not None
        # Shielded: a member that is cancelled must not cancel the call of the others.
        answer = (await asyncio.shield(self._answers))[index]
        if isinstance(answer, DialoopError):
            raise answer
        return answer

    def leave(self) -> None:
        """Take a member out; the last one cancels the call."""
        self._num_members -= 1
        if self._num_members:
            self._start_when_complete()
        elif self._answers is not None:
            self._answers.cancel()

    def _start_when_complete(self) -> None:
        if self._requests and len(self._requests) >= self._num_members and self._answers is None:
            self._answers = asyncio.ensure_future(self._call(self._requests))
            self._has_started.set()


class JoinedSteps:
    """Steps of members that have answered, in one call; it does not wait for all of them.

    A call begins as soon as no member that could join is missing, or when one that waits has waited
    long enough. `_waiting` holds what the next call sends, and `_num_away` counts the members whose
    call is under way, which cannot join.
    """

    def __init__(
        self,
        num_members: int,
        call: Callable[[list[StepItem]], Awaitable[Several[StepResult | DialoopError]]],
    ) -> None:
        self._num_members = num_members
        self._call = call
        self._waiting: dict[asyncio.Future[StepResult], StepItem] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._num_away = 0
        self._are_slow = False

    async def join(self, item: StepItem, *, wait_s: float) -> StepResult:
        """Return the result of one member's step, which goes to the service within `wait_s`."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[StepResult] = loop.create_future()
        self._waiting[place] = item
        timer = loop.call_later(wait_s, self._send)
        if self._are_slow:
            self._send()
        else:
            self._send_when_complete()
        try:
            return await place
        finally:
            timer.cancel()
            self._waiting.pop(place, None)

    def leave(self) -> None:
        """Take a member out, for which nobody waits from now on; the last one ends all calls."""
        self._num_members -= 1
        self._send_when_complete()
        if not self._num_members:
            for call in self._calls:
                call.cancel()

    def _send_when_complete(self) -> None:
        if len(self._waiting) >= self._num_members - self._num_away:
            self._send()

    def _send(self) -> None:
        if not self._waiting:
            return
        batch, self._waiting = self._waiting, {}
        self._num_away += len(batch)
        call = asyncio.create_task(self._answer(batch))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, batch: dict[asyncio.Future[StepResult], StepItem]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        answers: list[tuple[asyncio.Future[StepResult], StepResult | Exception]]
        try:
            answers = list(zip(batch, await self._call(list(batch.values())), strict=True))
        except Exception as error:
            answers = [(place, error) for place in batch]
        finally:
            self._num_away -= len(batch)
        self._are_slow = loop.time() - started > _SLOW_STEP_S
        for place, answer in answers:
            if place.done():
                continue  # the member was cancelled
            if isinstance(answer, Exception):
                place.set_exception(answer)
            else:
                place.set_result(answer)


class BatchedGroup:
    """Sessions and policy for the members of one group.

    Satisfies `dialoop.episode.Sessions` and `dialoop.episode.Policy`. Every member must close its
    session, also when it fails.
    """

    def __init__(
        self,
        task: Task,
        groups: Groups,
        policy: Policy,
        retry_policy: RetryPolicy,
        num_members: int,
    ) -> None:
        self._task = task
        self._groups = groups
        self._policy = policy
        self._retry_policy = retry_policy
        self._served: dict[str, str] = {}
        self._answering_since: dict[str, float] = {}
        self._opening: asyncio.Task[GroupOpening] | None = None
        self._resets: JoinedCall[str, ResetResult] = JoinedCall(num_members, self._open)
        self._answers: JoinedCall[History, Sample] = JoinedCall(num_members, self._generate)
        self._steps = JoinedSteps(num_members, self._step)
        self._sampling: SamplingParams | None = None

    async def create_session(self, session_id: str, environment: str) -> float:
        """Do nothing: `reset` opens the sessions of the whole group."""
        return 0.0

    async def reset(
        self, session_id: str, *, episode: int, split: str, task_key: str, seed: int = 0
    ) -> ResetResult:
        """Return the result of this member's reset."""
        opening = await self._resets.join(session_id)
        self._answering_since[session_id] = asyncio.get_running_loop().time()
        return opening

    async def generate(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        """Return one sample; in the first turn all members give the same `sampling`.

        Those with seeds ask alone: each has a seed of its own. So do those whose answers may be
        long, so that nobody waits for the longest one.
        """
        has_seed = sampling is not None and sampling.seed is not None
        if turn == 0 and not has_seed and not may_be_long(sampling):
            self._sampling = sampling
            return (await self._answers.join(history),)
        return await self._policy.generate(
            history,
            context=context,
            num_context_messages=num_context_messages,
            sampling=sampling,
            turn=turn,
        )

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> StepResult:
        """Return the result of this member's step."""
        item = StepItem(
            session_id=self._served[session_id],
            episode=episode,
            step_index=step_index,
            history=history,
        )
        answer_s = asyncio.get_running_loop().time() - self._answering_since[session_id]
        result = await self._steps.join(item, wait_s=max(_LEAST_WAIT_S, _WAIT_SHARE * answer_s))
        self._answering_since[session_id] = asyncio.get_running_loop().time()
        return result

    async def close_session(self, session_id: str) -> bool:
        """Leave the group's calls, so that the others do not wait for this member.

        A session that is being opened is closed once it exists, even if the caller is cancelled.
        """
        self._resets.leave()
        self._answers.leave()
        self._steps.leave()
        if self._opening is None or self._opening.done():
            return await self._close(session_id)
        closing = asyncio.create_task(self._close_when_opened(session_id, self._opening))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        return await asyncio.shield(closing)

    async def _close_when_opened(
        self, session_id: str, opening: asyncio.Task[GroupOpening]
    ) -> bool:
        await asyncio.wait({opening})
        return await self._close(session_id)

    async def _close(self, session_id: str) -> bool:
        served = self._served.get(session_id)
        return served is not None and await self._groups.close_session(served)

    async def _open(self, members: list[str]) -> tuple[ResetResult, ...]:
        group_id = uuid.uuid4().hex

        async def create() -> GroupOpening:
            # Shielded: a cancelled call would leave sessions open whose ids nobody knows.
            self._opening = asyncio.create_task(self._create(group_id, members))
            return await asyncio.shield(self._opening)

        return (await retry(create, self._retry_policy)).openings

    async def _create(self, group_id: str, members: list[str]) -> GroupOpening:
        task = self._task
        choice = TaskChoice(split=task.split, task_key=task.key, seed=task.seed)
        opening = await self._groups.create_group(
            group_id, task.environment, num_sessions=len(members), choice=choice
        )
        self._served = dict(zip(members, opening.session_ids, strict=True))
        return opening

    async def _generate(self, histories: list[History]) -> tuple[Sample, ...]:
        if all(history == histories[0] for history in histories):
            return await self._policy.generate(
                histories[0], sampling=self._sampling, num_samples=len(histories)
            )
        # An environment may word the same task differently in each session.
        calls = (self._policy.generate(h, sampling=self._sampling) for h in histories)
        return tuple(sample for (sample,) in await asyncio.gather(*calls))

    async def _step(self, items: list[StepItem]) -> tuple[StepResult | DialoopError, ...]:
        return await retry(lambda: self._groups.batch_step(items), self._retry_policy)
