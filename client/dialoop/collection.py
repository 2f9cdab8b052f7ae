"""Collect batches of trajectories: an environment and a policy enter, batches leave.

    async for batch in dialoop.collect(arithmetic(), policy, turns_per_batch=2, total_turns=4):
        print(batch.groups)

`for` does the same where there is no event loop. Episodes are played as `dialoop.play` and the
collector service play them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Protocol, Self, runtime_checkable

from dialoop.clients.blocking.loop import BackgroundLoop
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentInfo
from dialoop.environments.environment import Environment
from dialoop.environments.tasks.source import TaskPage, TaskRef
from dialoop.episode import Policy, Sessions
from dialoop.errors import InvalidConfig, InvalidInput, NotFound, PreconditionFailed
from dialoop.local.client import LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.rollout import EpisodePlayer, require, require_policy, sampling_of_member
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Group, SamplingParams, Task, Trajectory, is_whole
from dialoop.user_functions import call

_PAGE_SIZE = 32


@runtime_checkable
class TaskSessions(Sessions, Protocol):
    """Where tasks are listed and played: an EnvironmentClient or a LocalEnvironmentClient."""

    async def list_environments(self) -> tuple[EnvironmentInfo, ...]:
        """Return all environments."""

    async def get_environment(self, environment: str) -> EnvironmentInfo:
        """Describe an environment."""

    async def list_tasks(
        self,
        environment: str,
        *,
        split: str,
        page_size: int = 100,
        page_token: str = "",
        one_epoch: bool = False,
        shuffle_seed: int = 0,
    ) -> TaskPage:
        """Return one page of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedBatch:
    """What one round of a loop over a collection gets.

    With `completed_only` each group holds all trajectories of its task. Otherwise, and with
    `flatten`, it holds the parts of them that this batch played (`Trajectory.part`).
    """

    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return the trajectories of all groups."""
        return tuple(t for group in self.groups for t in group.trajectories)

    @property
    def num_turns(self) -> int:
        """Return how many turns the batch holds."""
        return sum(len(trajectory.turns) for trajectory in self.trajectories)

    @property
    def policy_versions(self) -> tuple[PolicyVersion, ...]:
        """Return the versions of the sampled tokens, without repeats."""
        return tuple(dict.fromkeys(v for group in self.groups for v in group.policy_versions))


@dataclass(eq=False)
class Collection:
    """Batches of played turns, for `for` or `async for`: what `dialoop.collect` returns.

        from dialoop.environments import arithmetic
        from dialoop.testing import ScriptedPolicy
        policy = ScriptedPolicy(["Result=7<submit>"])
        batches = collect(arithmetic(), policy, group_size=2, turns_per_batch=4, total_turns=8)
        sizes = [batch.num_turns async for batch in batches]
        sizes  # [4, 4]

    A turn is one answer of the policy and the environment's step on it. What a batch holds:

    - turns_per_batch: a batch begins groups until it has so many turns, where an episode that was
      just begun counts as one, and plays every episode to its end. It may hold more turns, never
      part of a group. Absent: one group.
    - completed_only=False: a batch has exactly `turns_per_batch` turns. Episodes that are not over
      go on in the next batch; each batch holds the parts that it played.
    - last_turn_only: of each trajectory the last turn alone; what came before is context.
    - flatten: each turn is a trajectory of its own.
    - reset_each_batch: without `completed_only`, episodes that are not over when a batch is full
      are cut off (`truncated`), so that each batch begins with fresh ones.

    When it ends:

    - total_turns: nothing more begins after so many turns; -1: never. The last batch may be
      smaller. An episode that failed before its first turn counts as one turn.
    - a finite `tasks` ends it, too. A second loop over the collection goes on with the next tasks,
      and with what is left of `total_turns`.

    How it is played:

    - play_ahead: while your code handles a batch, the next one is played. Otherwise nothing is
      played meanwhile, so that a new policy answers the whole next batch.
    - num_sessions: episodes that are played at the same time.
    - group_size: episodes for each task.
    - name: the environment's, where a client has several. split: absent, "train" or the only one.
    - shuffle_seed: 0 keeps the order of the tasks; another seed shuffles each epoch differently.
    - tasks: what to play instead of a split, with the environment and `num_trajectories` of each.
    - sampling: absent, each task's own. Without stop texts, the environment's are used.
    - max_turns: turns after which an episode ends if its environment has not ended it.

    Failures are on the trajectories, with their owner. Leaving a loop early ends the episodes under
    way and closes their sessions: at once in a `for`, and in an `async for` as soon as the event
    loop runs, or at the end of `async with collect(...) as batches:`. What was played ahead is
    lost.

    Raise InvalidConfig (BAD_OPTIONS) for options that contradict each other, and InvalidInput
    (WRONG_TYPE) for a value of another type. In the loop, raise NotFound where there is no such
    environment or split; a task that does not exist is a failure of its trajectories.
    """

    environment: Environment | TaskSessions
    policy: Policy
    _: KW_ONLY
    turns_per_batch: int | None = None
    total_turns: int = -1
    completed_only: bool = True
    last_turn_only: bool = False
    flatten: bool = False
    reset_each_batch: bool = False
    play_ahead: bool = False
    num_sessions: int = 1
    group_size: int = 1
    name: str = ""
    split: str = ""
    shuffle_seed: int = 0
    tasks: Iterable[Task] | None = None
    sampling: SamplingParams | None = None
    max_turns: int = 64
    num_turns: int = field(default=0, init=False)
    """Turns that count towards `total_turns`."""

    def __post_init__(self) -> None:
        self._require_types()
        self._require_sense()
        self._next_tasks = _Tasks(self)
        self._loops: list[AsyncGenerator[CollectedBatch]] | None = None

    def __iter__(self) -> Iterator[CollectedBatch]:
        if asyncio._get_running_loop() is not None:
            raise PreconditionFailed(
                "A blocking loop over batches was begun inside a running event loop, which it "
                "would stop.",
                reason=Reason.EVENT_LOOP_RUNNING,
                remedy="Write `async for batch in ...`.",
            )
        for service in (self.environment, self.policy):
            if isinstance(getattr(service, "_channel", None), Channel):
                raise PreconditionFailed(
                    "The clients of services belong to an event loop, and this thread has none.",
                    remedy="Write `for batch in BlockingDialoop(...).collect(...)`.",
                )
        return self._iterate()

    def __aiter__(self) -> AsyncIterator[CollectedBatch]:
        batches = self._batches()
        if self._loops is not None:
            self._loops.append(batches)
        return batches

    async def __aenter__(self) -> Self:
        self._loops = []
        return self

    async def __aexit__(self, *_: object) -> None:
        loops, self._loops = self._loops or [], None
        for batches in loops:
            await batches.aclose()

    def _iterate(self) -> Iterator[CollectedBatch]:
        with BackgroundLoop() as loop:
            yield from loop.iterate(self._batches())

    async def _batches(self) -> AsyncGenerator[CollectedBatch]:
        async with AsyncExitStack() as exits:
            sessions = self.environment
            if not isinstance(sessions, TaskSessions):
                sessions = await exits.enter_async_context(LocalEnvironmentClient(sessions))
            run = _Run(self, sessions, self._next_tasks)
            exits.push_async_callback(run.close)
            while (batch := await (run.ahead or run.next_batch())) is not None:
                if self.play_ahead:
                    run.ahead = asyncio.create_task(run.next_batch())
                yield batch

    def _require_types(self) -> None:
        """Raise InvalidInput (WRONG_TYPE) for something else in an option's place."""
        is_environment = isinstance(self.environment, TaskSessions) or hasattr(
            self.environment, "tasks"
        )
        require(
            is_environment and not isinstance(self.environment, type),
            "environment",
            self.environment,
            "an environment, an EnvironmentClient or a LocalEnvironmentClient",
        )
        require_policy(self.policy)
        for option in fields(self)[2:]:
            kind, _, optional = str(option.type).partition(" | ")
            sound, expected = _KINDS[kind]
            value = getattr(self, option.name)
            is_absent = value is None and optional == "None"
            require(is_absent or sound(value), option.name, value, expected)

    def _require_sense(self) -> None:
        """Raise InvalidConfig (BAD_OPTIONS) for numbers and options that contradict each other."""
        for option in ("turns_per_batch", "num_sessions", "group_size", "max_turns"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise _bad_options(f"{option} is {number}.", "Give 1 or more.")
        if self.total_turns < 1 and self.total_turns != -1:
            raise _bad_options(
                f"total_turns is {self.total_turns}.", "Give 1 or more, or -1 to go on for ever."
            )
        if self.turns_per_batch is None and not self.completed_only:
            raise _bad_options(
                "completed_only is False, and turns_per_batch is absent.",
                "Say with turns_per_batch when a batch is full.",
            )
        excluded = {
            "completed_only=False": not self.completed_only,
            "flatten": self.flatten,
            "reset_each_batch": self.reset_each_batch,
        }
        conflicts = [option for option, is_set in excluded.items() if is_set]
        if self.last_turn_only and conflicts:
            raise _bad_options(
                f"last_turn_only was set together with {' and '.join(conflicts)}.",
                "Set one of them: last turns are those of completed trajectories.",
            )
        is_chosen = self.group_size != 1 or self.name or self.split or self.shuffle_seed
        if self.tasks is not None and is_chosen:
            raise _bad_options(
                "Both tasks and a name, group_size, split or shuffle_seed were given.",
                "Set environment and num_trajectories of each task, and give the tasks in order.",
            )


collect = Collection
"""The name to call it by: `for batch in dialoop.collect(...)`."""


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "int": (is_whole, "a whole number"),
        "bool": (lambda value: isinstance(value, bool), "True or False"),
        "str": (lambda value: isinstance(value, str), "a name"),
        "SamplingParams": (lambda value: isinstance(value, SamplingParams), "SamplingParams"),
        "Iterable[Task]": (lambda value: isinstance(value, Iterable), "Tasks in their order"),
    }
)
"""What an option of each type has to be: how that is told, and in words."""


def _bad_options(message: str, remedy: str) -> InvalidConfig:
    return InvalidConfig(message, reason=Reason.BAD_OPTIONS, remedy=remedy)


class _Tasks:
    """The next tasks of a split, or of the caller's; the position outlives a loop over them."""

    def __init__(self, options: Collection) -> None:
        self._options = options
        self._given = None if options.tasks is None else iter(options.tasks)
        self._name, self._split = options.name, options.split
        self._refs: deque[TaskRef] = deque()
        self._page_token = ""
        self._stops: dict[str, tuple[str, ...]] = {}

    async def take(self, sessions: TaskSessions) -> Task | None:
        """Return the next task; None after the last one of the caller's."""
        if self._given is not None:
            task = next(self._given, None)
            require(task is None or isinstance(task, Task), "A task", task, "Tasks")
            return task
        if not self._refs:
            await self._read_page(sessions)
        group_size = self._options.group_size
        return self._refs.popleft().task(self._name, self._split, num_trajectories=group_size)

    async def sampling_of(self, task: Task, sessions: TaskSessions) -> SamplingParams:
        """Return how to sample: the environment's stop texts where there are no others."""
        sampling = self._options.sampling or task.sampling
        if task.environment not in self._stops:
            info = await call(sessions.get_environment, task.environment)
            self._stops[task.environment] = info.stop
        return replace(sampling, stop=sampling.stop or self._stops[task.environment])

    async def _read_page(self, sessions: TaskSessions) -> None:
        if not self._page_token:
            self._name = self._name or await _only_environment(sessions)
            info: EnvironmentInfo = await call(sessions.get_environment, self._name)
            splits = [split.name for split in info.splits]
            self._split = self._split or (splits[0] if len(splits) == 1 else "train")
        page: TaskPage = await call(
            sessions.list_tasks,
            self._name,
            split=self._split,
            page_size=_PAGE_SIZE,
            page_token=self._page_token,
            shuffle_seed=self._options.shuffle_seed,
        )
        if not page.tasks:
            raise NotFound(f"Split {self._split} of {self._name} is empty.", reason=Reason.NO_TASKS)
        self._refs.extend(page.tasks)
        self._page_token = page.next_page_token


async def _only_environment(sessions: TaskSessions) -> str:
    """Return the name of a client's environment; InvalidInput where it has several."""
    infos: tuple[EnvironmentInfo, ...] = await call(sessions.list_environments)
    names = [info.name for info in infos]
    if len(names) != 1:
        raise InvalidInput(
            f"The client has {len(names)} environments.",
            remedy=f"Give the name of one of them: {', '.join(names)}.",
        )
    return names[0]


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode of a group, and how much of it earlier batches hold."""

    player: EpisodePlayer
    num_turns: int = 0
    num_failures: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """One loop over a collection: the episodes that it plays.

    `waiting` fills with members of a new group and with episodes between two turns; `_next` drains
    it. Nobody waits for it: a batch is over when nothing is to begin and nothing is at work.
    `ahead` plays the next batch.
    """

    options: Collection
    sessions: TaskSessions
    tasks: _Tasks
    waiting: deque[_Episode] = field(default_factory=deque)
    working: dict[asyncio.Task[None], _Episode] = field(default_factory=dict)
    ahead: asyncio.Task[CollectedBatch | None] | None = None

    async def next_batch(self) -> CollectedBatch | None:
        """Play the next batch; None when the turns or the tasks are at their end."""
        quota = self._quota()
        episodes, num_turns = await self._play(quota) if quota > 0 else ({}, 0)
        if not episodes:
            return None
        self.options.num_turns += num_turns
        if self.options.reset_each_batch or self._quota() < 1:
            await self._cut_off()
        groups: dict[int, tuple[Task, list[Trajectory]]] = {}
        for episode in episodes:
            task = episode.player.task
            groups.setdefault(id(task), (task, []))[1].extend(self._new_parts(episode))
        return CollectedBatch(
            groups=tuple(
                Group(group_id=task.task_id, task=task, trajectories=tuple(parts))
                for task, parts in groups.values()
            )
        )

    async def close(self) -> None:
        """End the episodes under way and close their sessions."""
        tasks = [*self.working, *([self.ahead] if self.ahead is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.waiting.extend(self.working.values())
        await self._cut_off()

    def _quota(self) -> int:
        """Return the turns of the next batch."""
        quota, total = self.options.turns_per_batch or 1, self.options.total_turns
        return quota if total < 0 else min(quota, total - self.options.num_turns)

    async def _play(self, quota: int) -> tuple[dict[_Episode, None], int]:
        """Play a batch; return its episodes in the order they joined it, and its turns."""
        episodes: dict[_Episode, None] = {}
        num_begun = 0
        while True:
            while len(self.working) < self.options.num_sessions:
                counted = self._count(episodes, num_begun)
                episode = await self._next(has_room=counted < quota)
                if episode is None:
                    break
                num_begun += 1
                episodes[episode] = None
                self.working[asyncio.create_task(self._advance(episode.player))] = episode
            if not self.working:
                return episodes, self._count(episodes, num_begun)
            finished, _ = await asyncio.wait(self.working, return_when=asyncio.FIRST_COMPLETED)
            played = []
            for task in [task for task in self.working if task in finished]:
                played.append(self.working.pop(task))
                task.result()
            # Before members that have not begun, so that no more than num_sessions are open.
            self.waiting.extendleft(e for e in reversed(played) if not e.player.is_over)

    def _count(self, episodes: Iterable[_Episode], num_begun: int) -> int:
        """Return the batch's turns: those begun, or of whole episodes one at least for each."""
        if not self.options.completed_only:
            return num_begun
        return sum(max(1, episode.player.num_turns) for episode in episodes)

    async def _next(self, *, has_room: bool) -> _Episode | None:
        """Return the episode that plays next: one that waits, or the first of a new group."""
        if self.options.completed_only and self.waiting:
            return self.waiting.popleft()  # the group was begun
        if not has_room:
            return None
        if not self.waiting:
            await self._begin_group()
        return self.waiting.popleft() if self.waiting else None

    async def _begin_group(self) -> None:
        task = await self.tasks.take(self.sessions)
        if task is None:
            return
        sampling = await self.tasks.sampling_of(task, self.sessions)
        task = replace(task)  # a task may come twice: each time it is a group of its own
        self.waiting.extend(
            _Episode(
                EpisodePlayer(
                    task,
                    sessions=self.sessions,
                    policy=self.options.policy,
                    group_id=task.task_id,
                    sampling=sampling_of_member(sampling, member),
                    max_turns=self.options.max_turns,
                )
            )
            for member in range(task.num_trajectories)
        )

    async def _advance(self, player: EpisodePlayer) -> None:
        """Play one turn, or to the end where only completed trajectories count."""
        while await player.play_turn():
            if not self.options.completed_only:
                return
        await player.close()

    def _new_parts(self, episode: _Episode) -> Iterator[Trajectory]:
        """Yield what this batch has of the episode."""
        whole = episode.player.trajectory()
        start, end = episode.num_turns, len(whole.turns)
        new = replace(whole, failures=whole.failures[episode.num_failures :])
        episode.num_turns, episode.num_failures = end, len(whole.failures)
        if self.options.last_turn_only:
            start = max(0, end - 1)
        length = 1 if self.options.flatten else max(1, end - start)
        for turn in range(start, max(end, start + 1), length):
            yield new.part(turn, min(turn + length, end))

    async def _cut_off(self) -> None:
        """Close the episodes that are not over, which are truncated then."""
        await asyncio.gather(*(episode.player.close() for episode in self.waiting))
        self.waiting.clear()
