"""Collect batches of trajectories: an environment and a policy enter, batches leave.

    async for batch in dialoop.collect(arithmetic(), policy, turns_per_batch=2, total_turns=4):
        print(batch.groups)

`for` does the same where there is no event loop. Episodes are played as `dialoop.play` and the
collector service play them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dialoop.clients.blocking.loop import BackgroundLoop
from dialoop.clients.channel import Channel
from dialoop.episode import Sessions
from dialoop.errors import InvalidConfig, InvalidInput, NotFound, PreconditionFailed
from dialoop.local.client import LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.rollout import EpisodePlayer, sampling_of_member
from dialoop.trajectory import Group, SamplingParams, Task
from dialoop.user_functions import call

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator
    from typing import Self

    from dialoop.clients.environment import EnvironmentInfo
    from dialoop.environments.environment import Environment
    from dialoop.environments.tasks.source import TaskPage, TaskRef
    from dialoop.episode import Policy
    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import Trajectory

_PAGE_SIZE = 32


@runtime_checkable
class TaskSessions(Sessions, Protocol):
    """Where tasks are listed and played: an EnvironmentClient or a LocalEnvironmentClient."""

    async def list_environments(self) -> tuple[EnvironmentInfo, ...]:
        """Return all environments."""
        ...

    async def get_environment(self, environment: str) -> EnvironmentInfo:
        """Describe an environment."""
        ...

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
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """The options of `collect` that say what a batch is and how it is played."""

    turns_per_batch: int | None
    total_turns: int
    completed_only: bool
    last_turn_only: bool
    flatten: bool
    reset_each_batch: bool
    play_ahead: bool
    num_sessions: int
    group_size: int
    sampling: SamplingParams | None
    max_turns: int

    def __post_init__(self) -> None:
        self._require_types()
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

    def _require_types(self) -> None:
        for rule in fields(self):
            value = getattr(self, rule.name)
            if value is None and rule.name in ("turns_per_batch", "sampling"):
                continue
            if rule.name == "sampling":
                _require(isinstance(value, SamplingParams), rule.name, value, "SamplingParams")
            elif rule.type == "bool":
                _require(isinstance(value, bool), rule.name, value, "True or False")
            else:
                _require(_is_whole(value), rule.name, value, "a whole number")

    def quota(self, num_turns: int) -> int:
        """Return the turns of the next batch, after `num_turns` in all."""
        quota = self.turns_per_batch or 1
        return quota if self.total_turns < 0 else min(quota, self.total_turns - num_turns)

    def parts(self, trajectory: Trajectory, start: int) -> Iterator[Trajectory]:
        """Yield what a batch holds of a trajectory whose turns from `start` on are new."""
        end = len(trajectory.turns)
        if self.last_turn_only:
            start = max(0, end - 1)
        if not self.flatten or end - start <= 1:
            yield trajectory.part(start, end)
            return
        for turn in range(start, end):
            yield trajectory.part(turn, turn + 1)


def _bad_options(message: str, remedy: str) -> InvalidConfig:
    return InvalidConfig(message, reason=Reason.BAD_OPTIONS, remedy=remedy)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require(is_sound: bool, name: str, value: object, expected: str) -> None:
    """Raise InvalidInput (WRONG_TYPE) for something else in a value's place."""
    if not is_sound:
        raise InvalidInput(
            f"{name} is {value!r:.40}.", reason=Reason.WRONG_TYPE, remedy=f"Give {expected}."
        )


def _require_parts(environment: object, policy: object) -> None:
    """Raise InvalidInput (WRONG_TYPE) for something else in their place, or for their class."""
    is_environment = isinstance(environment, TaskSessions) or hasattr(environment, "tasks")
    _require(
        is_environment and not isinstance(environment, type),
        "environment",
        environment,
        "an environment, an EnvironmentClient or a LocalEnvironmentClient",
    )
    _require(
        callable(getattr(policy, "generate", None)) and not isinstance(policy, type),
        "policy",
        policy,
        "an InferenceClient or a ScriptedPolicy",
    )


class _Tasks:
    """The next tasks of a split, or of the caller's; the position outlives a loop over them."""

    def __init__(
        self,
        name: str,
        split: str,
        shuffle_seed: int,
        group_size: int,
        tasks: Iterable[Task] | None,
    ) -> None:
        _require(isinstance(name, str), "name", name, "the environment's name")
        _require(isinstance(split, str), "split", split, "the split's name")
        _require(_is_whole(shuffle_seed), "shuffle_seed", shuffle_seed, "a whole number")
        _require(
            tasks is None or isinstance(tasks, Iterable), "tasks", tasks, "Tasks in their order"
        )
        if tasks is not None and (group_size != 1 or name or split or shuffle_seed):
            raise _bad_options(
                "Both tasks and a name, group_size, split or shuffle_seed were given.",
                "Set environment and num_trajectories of each task, and give the tasks in order.",
            )
        self._name = name
        self._split = split
        self._shuffle_seed = shuffle_seed
        self._group_size = group_size
        self._tasks = None if tasks is None else iter(tasks)
        self._refs: deque[TaskRef] = deque()
        self._page_token = ""
        self._infos: dict[str, EnvironmentInfo] = {}

    async def take(self, sessions: TaskSessions) -> Task | None:
        """Return the next task; None after the last one of the caller's."""
        if self._tasks is not None:
            task = next(self._tasks, None)
            _require(task is None or isinstance(task, Task), "A task", task, "Tasks")
            return task
        if not self._refs:
            await self._read_page(sessions)
        return self._refs.popleft().task(self._name, self._split, num_trajectories=self._group_size)

    async def sampling_of(
        self, task: Task, sampling: SamplingParams | None, sessions: TaskSessions
    ) -> SamplingParams:
        """Return how to sample: the environment's stop texts where there are no others."""
        if task.environment not in self._infos:
            self._infos[task.environment] = await call(sessions.get_environment, task.environment)
        sampling = sampling or task.sampling
        return replace(sampling, stop=sampling.stop or self._infos[task.environment].stop)

    async def _read_page(self, sessions: TaskSessions) -> None:
        if not self._page_token:
            self._name = self._name or await _only_environment(sessions)
            info: EnvironmentInfo = await call(sessions.get_environment, self._name)
            splits = [split.name for split in info.splits]
            if not self._split:
                self._split = splits[0] if len(splits) == 1 else "train"
        page: TaskPage = await call(
            sessions.list_tasks,
            self._name,
            split=self._split,
            page_size=_PAGE_SIZE,
            page_token=self._page_token,
            shuffle_seed=self._shuffle_seed,
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

    def __init__(  # noqa: PLR0913 - what a batch is, and what is played
        self,
        environment: Environment | TaskSessions,
        policy: Policy,
        *,
        turns_per_batch: int | None = None,
        total_turns: int = -1,
        completed_only: bool = True,
        last_turn_only: bool = False,
        flatten: bool = False,
        reset_each_batch: bool = False,
        play_ahead: bool = False,
        num_sessions: int = 1,
        group_size: int = 1,
        name: str = "",
        split: str = "",
        shuffle_seed: int = 0,
        tasks: Iterable[Task] | None = None,
        sampling: SamplingParams | None = None,
        max_turns: int = 64,
    ) -> None:
        self._rules = _Rules(
            turns_per_batch=turns_per_batch,
            total_turns=total_turns,
            completed_only=completed_only,
            last_turn_only=last_turn_only,
            flatten=flatten,
            reset_each_batch=reset_each_batch,
            play_ahead=play_ahead,
            num_sessions=num_sessions,
            group_size=group_size,
            sampling=sampling,
            max_turns=max_turns,
        )
        _require_parts(environment, policy)
        self._environment = environment
        self._policy = policy
        self._tasks = _Tasks(name, split, shuffle_seed, group_size, tasks)
        self._loops: list[AsyncGenerator[CollectedBatch]] | None = None
        self.num_turns = 0
        """Turns that count towards `total_turns`."""

    def __iter__(self) -> Iterator[CollectedBatch]:
        if asyncio._get_running_loop() is not None:
            raise PreconditionFailed(
                "A blocking loop over batches was begun inside a running event loop, which it "
                "would stop.",
                reason=Reason.EVENT_LOOP_RUNNING,
                remedy="Write `async for batch in ...`.",
            )
        for service in (self._environment, self._policy):
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
        async with self._running() as run:
            upcoming: asyncio.Task[CollectedBatch | None] | None = None
            try:
                while True:
                    batch = await (upcoming or run.next_batch())
                    if batch is None:
                        return
                    if self._rules.play_ahead:
                        upcoming = asyncio.create_task(run.next_batch())
                    yield batch
            finally:
                if upcoming is not None:
                    upcoming.cancel()
                    await asyncio.gather(upcoming, return_exceptions=True)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[_Run]:
        """Open the environment if it is of this process; at the end close what was opened."""
        async with AsyncExitStack() as exits:
            environment = self._environment
            if not isinstance(environment, TaskSessions):
                environment = await exits.enter_async_context(LocalEnvironmentClient(environment))
            run = _Run(self, environment, self._policy, self._rules, self._tasks)
            exits.push_async_callback(run.close)
            yield run


collect = Collection
"""The name to call it by: `for batch in dialoop.collect(...)`."""


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode of a group, and how much of it earlier batches hold."""

    player: EpisodePlayer
    task: Task
    num_collected_turns: int = 0
    num_collected_failures: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """One loop over a collection: the episodes that it plays.

    `waiting` fills with members of a new group and with episodes between two turns; `_next` drains
    it. Nobody waits for it: a batch is over when nothing is to begin and nothing is at work.
    """

    collection: Collection
    sessions: TaskSessions
    policy: Policy
    rules: _Rules
    tasks: _Tasks
    waiting: deque[_Episode] = field(default_factory=deque)
    working: dict[asyncio.Task[None], _Episode] = field(default_factory=dict)

    async def next_batch(self) -> CollectedBatch | None:
        """Play the next batch; None when the turns or the tasks are at their end."""
        quota = self.rules.quota(self.collection.num_turns)
        if quota < 1:
            return None
        episodes, num_turns = await self._play(quota)
        if not episodes:
            return None
        self.collection.num_turns += num_turns
        is_last = self.rules.quota(self.collection.num_turns) < 1
        if self.rules.reset_each_batch or is_last:
            await self._cut_off()
        groups: dict[int, list[Trajectory]] = {}
        tasks: dict[int, Task] = {}
        for episode in episodes:
            tasks[id(episode.task)] = episode.task
            groups.setdefault(id(episode.task), []).extend(self._new_parts(episode))
        return CollectedBatch(
            groups=tuple(
                Group(group_id=task.task_id, task=task, trajectories=tuple(groups[number]))
                for number, task in tasks.items()
            )
        )

    async def close(self) -> None:
        """End the episodes under way and close their sessions."""
        working = list(self.working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        self.waiting.extend(self.working.values())
        self.working.clear()
        await self._cut_off()

    async def _play(self, quota: int) -> tuple[list[_Episode], int]:
        """Play a batch; return its episodes in the order they joined it, and its turns."""
        episodes: dict[_Episode, None] = {}
        num_begun = 0
        while True:
            while len(self.working) < self.rules.num_sessions:
                counted = self._count(episodes, num_begun)
                episode = await self._next(has_room=counted < quota)
                if episode is None:
                    break
                num_begun += 1
                episodes[episode] = None
                self.working[asyncio.create_task(self._advance(episode.player))] = episode
            if not self.working:
                return list(episodes), self._count(episodes, num_begun)
            finished, _ = await asyncio.wait(self.working, return_when=asyncio.FIRST_COMPLETED)
            played = []
            for task in [task for task in self.working if task in finished]:
                played.append(self.working.pop(task))
                task.result()
            # Before members that have not begun, so that no more than num_sessions are open.
            self.waiting.extendleft(e for e in reversed(played) if not e.player.is_over)

    def _count(self, episodes: Iterable[_Episode], num_begun: int) -> int:
        """Return the batch's turns: those begun, or of whole episodes one at least for each."""
        if not self.rules.completed_only:
            return num_begun
        return sum(max(1, episode.player.num_turns) for episode in episodes)

    async def _next(self, *, has_room: bool) -> _Episode | None:
        """Return the episode that plays next: one that waits, or the first of a new group."""
        if self.rules.completed_only and self.waiting:
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
        sampling = await self.tasks.sampling_of(task, self.rules.sampling, self.sessions)
        task = replace(task)  # a task may come twice: each time it is a group of its own
        self.waiting.extend(
            _Episode(
                EpisodePlayer(
                    task,
                    sessions=self.sessions,
                    policy=self.policy,
                    group_id=task.task_id,
                    sampling=sampling_of_member(sampling, member),
                    max_turns=self.rules.max_turns,
                ),
                task,
            )
            for member in range(task.num_trajectories)
        )

    async def _advance(self, player: EpisodePlayer) -> None:
        """Play one turn, or to the end where only completed trajectories count."""
        while await player.play_turn():
            if not self.rules.completed_only:
                return
        await player.close()

    def _new_parts(self, episode: _Episode) -> tuple[Trajectory, ...]:
        """Return what this batch has of the episode."""
        whole = episode.player.trajectory()
        start, num_failures = episode.num_collected_turns, len(whole.failures)
        new = replace(whole, failures=whole.failures[episode.num_collected_failures :])
        episode.num_collected_turns = len(whole.turns)
        episode.num_collected_failures = num_failures
        return tuple(self.rules.parts(new, start))

    async def _cut_off(self) -> None:
        """Close the episodes that are not over, which are truncated then."""
        await asyncio.gather(*(episode.player.close() for episode in self.waiting))
        self.waiting.clear()
