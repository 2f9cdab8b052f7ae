"""A group of one turn as three requests: its members ask environment and policy together.

    8 times create, reset, generate, step    ->    CreateGroup, Generate (8 samples), BatchStep

Members of a group ask for the same at the same time, and the group is whole only when the last of
them is done. Where an episode has one turn, nobody therefore waits longer for being asked along.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dialoop.clients.environment import StepItem
from dialoop.clients.retry import retry
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.errors import DialoopError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from collections.abc import Sequence as Several

    from dialoop.chat import ChatHistory, History
    from dialoop.clients.environment import GroupOpening
    from dialoop.clients.retry import RetryPolicy
    from dialoop.episode import Policy, ResetResult, Sample, StepResult
    from dialoop.sequences import Sequence
    from dialoop.trajectory import SamplingParams, Task

# What still closes sessions that were opened when nobody waited for them any more.
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
        """Step many sessions; an item that failed is its error."""
        ...

    async def close_session(self, session_id: str) -> bool:
        """Forget the session."""
        ...


class JoinedCall(Generic[A, R]):
    """Asks once all members have come or left, and tells each its own answer, or raises it."""

    def __init__(
        self, num_members: int, ask: Callable[[list[A]], Awaitable[Several[R | DialoopError]]]
    ) -> None:
        self._num_members = num_members
        self._ask = ask
        self._asked: list[A] = []
        self._answers: asyncio.Future[Several[R | DialoopError]] | None = None
        self._begun = asyncio.Event()

    async def join(self, asked: A) -> R:
        """The answer to `asked`."""
        index = len(self._asked)
        self._asked.append(asked)
        self._begin_when_whole()
        await self._begun.wait()
        assert self._answers is not None
        # One member that is cancelled takes no answer from the others.
        answer = (await asyncio.shield(self._answers))[index]
        if isinstance(answer, DialoopError):
            raise answer
        return answer

    def leave(self) -> None:
        """A member comes no more; the last one calls off what nobody waits for."""
        self._num_members -= 1
        if self._num_members:
            self._begin_when_whole()
        elif self._answers is not None:
            self._answers.cancel()

    def _begin_when_whole(self) -> None:
        if self._asked and len(self._asked) >= self._num_members and self._answers is None:
            self._answers = asyncio.ensure_future(self._ask(self._asked))
            self._begun.set()


class BatchedGroup:
    """Sessions and policy of the members of one group, in their one turn.

    Satisfies `dialoop.episode.Sessions` and `dialoop.episode.Policy`; every member closes its
    session, whatever becomes of it.
    """

    def __init__(
        self, task: Task, groups: Groups, policy: Policy, retry_policy: RetryPolicy
    ) -> None:
        self._task = task
        self._groups = groups
        self._policy = policy
        self._retry_policy = retry_policy
        self._served: dict[str, str] = {}
        self._opening: asyncio.Task[GroupOpening] | None = None
        num = task.num_trajectories
        self._resets: JoinedCall[str, ResetResult] = JoinedCall(num, self._open)
        self._answers: JoinedCall[History, Sample] = JoinedCall(num, self._generate)
        self._steps: JoinedCall[StepItem, StepResult] = JoinedCall(num, self._step)
        self._sampling: SamplingParams | None = None

    async def create_session(self, session_id: str, environment: str) -> float:
        """Nothing yet: the group's sessions are opened with their first episodes."""
        return 0.0

    async def reset(
        self, session_id: str, *, episode: int, split: str, task_key: str, seed: int = 0
    ) -> ResetResult:
        """The opening of a session of the group."""
        return await self._resets.join(session_id)

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
        """One sample; all members of a group sample alike."""
        self._sampling = sampling
        return (await self._answers.join(history),)

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> StepResult:
        """The outcome of this member's step."""
        item = StepItem(
            session_id=self._served[session_id],
            episode=episode,
            step_index=step_index,
            history=history,
        )
        return await self._steps.join(item)

    async def close_session(self, session_id: str) -> bool:
        """Leave, so that the others need not wait for this member.

        A session that is being opened is closed as soon as it is there, also if the caller leaves.
        """
        for joined in (self._resets, self._answers, self._steps):
            joined.leave()
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
            # Called off half-way, it would leave sessions open whose names nobody heard.
            self._opening = asyncio.create_task(self._create(group_id, members))
            return await asyncio.shield(self._opening)

        return (await retry(create, self._retry_policy)).openings

    async def _create(self, group_id: str, members: list[str]) -> GroupOpening:
        task = self._task
        choice = TaskChoice(split=task.split, task_key=task.key, seed=task.seed)
        opened = await self._groups.create_group(
            group_id, task.environment, num_sessions=len(members), choice=choice
        )
        self._served = dict(zip(members, opened.session_ids, strict=True))
        return opened

    async def _generate(self, histories: list[History]) -> tuple[Sample, ...]:
        if all(history == histories[0] for history in histories):
            return await self._policy.generate(
                histories[0], sampling=self._sampling, num_samples=len(histories)
            )
        # An environment may open the same task in different words.
        each = (self._policy.generate(one, sampling=self._sampling) for one in histories)
        return tuple(sample for (sample,) in await asyncio.gather(*each))

    async def _step(self, items: list[StepItem]) -> tuple[StepResult | DialoopError, ...]:
        return await retry(lambda: self._groups.batch_step(items), self._retry_policy)
