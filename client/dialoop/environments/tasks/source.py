"""Sources of tasks: splits, endless pages of task references, and the tasks themselves.

page = tasks.page("train", page_size=2, shuffle_seed=7)
page.tasks              # (TaskRef(key="35+40", epoch=0, seed=...), TaskRef(...))
tasks.page("train", page_token=page.next_page_token)      # goes on, through epoch after epoch
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from dialoop.environments.episode import TaskData
from dialoop.errors import InvalidConfig, InvalidInput, NotFound
from dialoop.reasons import Reason
from dialoop.trajectory import Task

MAX_PAGE_SIZE = 10_000
_PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRef:
    """A reference to one task in one epoch: TaskRef(key="35+40", epoch=0, seed=1207)."""

    key: str
    epoch: int
    seed: int

    def task(self, environment: str, split: str, *, num_trajectories: int = 1) -> Task:
        """Return the task, under an id that no other epoch has."""
        return Task(
            task_id=f"{environment}/{split}/{self.epoch}/{self.key}",
            environment=environment,
            split=split,
            key=self.key,
            epoch=self.epoch,
            seed=self.seed,
            num_trajectories=num_trajectories,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPage:
    """Some task references, and the token of the next page (empty at the end)."""

    tasks: tuple[TaskRef, ...]
    next_page_token: str


async def first_refs(
    list_tasks: Callable[..., Awaitable[TaskPage]], num_tasks: int | None
) -> list[TaskRef]:
    """Return the first references of pages, all without a number.

    `list_tasks` gets `page_size` and `page_token`.
    """
    refs: list[TaskRef] = []
    token = ""
    while num_tasks is None or len(refs) < num_tasks:
        size = _PAGE_SIZE if num_tasks is None else min(_PAGE_SIZE, num_tasks - len(refs))
        page = await list_tasks(page_size=size, page_token=token)
        refs.extend(page.tasks)
        token = page.next_page_token
        if not token:
            break
    return refs


class TaskSource(ABC):
    """Tasks by split and key. An author writes `splits`, `keys` and `get`."""

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""

    @abstractmethod
    def keys(self, split: str) -> Sequence[str]:
        """Return the keys of a split in the source's own order, the same each time."""

    @abstractmethod
    def get(self, split: str, key: str) -> TaskData:
        """Return the task; NotFound (SPLIT_NOT_FOUND, TASK_NOT_FOUND) when there is none."""

    def num_tasks(self, split: str) -> int:
        """Return how many tasks the split holds."""
        return len(self.keys(split))

    def require_split(self, split: str) -> str:
        """Return the split's name; an empty one means "train", or the only split."""
        if split in self.splits:
            return split
        if not split and "train" in self.splits:
            return "train"
        if not split and len(self.splits) == 1:
            return self.splits[0]
        raise NotFound(
            f"There is no split '{split[:80]}'.",
            reason=Reason.SPLIT_NOT_FOUND,
            remedy=f"Choose one of: {', '.join(self.splits)}.",
        )

    def page(
        self,
        split: str,
        *,
        page_token: str = "",
        page_size: int = 0,
        one_epoch: bool = False,
        shuffle_seed: int = 0,
    ) -> TaskPage:
        """Return the next tasks, a pure function of the arguments; its cost grows with the page.

        Seed 0 keeps the source's order; another seed shuffles each epoch differently. Without
        `one_epoch` a page is always full and there is always a next one.
        """
        split = self.require_split(split)
        keys = self.keys(split)
        size = _page_size(page_size)
        start = _position(page_token, len(keys))
        end = min(start + size, max(start, len(keys))) if one_epoch else start + size
        if not keys:
            return TaskPage(tasks=(), next_page_token="")
        refs = [_ref(keys, split, position, shuffle_seed) for position in range(start, end)]
        over = one_epoch and end >= len(keys)
        token = "" if over else "{}:{}".format(*divmod(end, len(keys)))
        return TaskPage(tasks=tuple(refs), next_page_token=token)


class ListedTasks(TaskSource):
    """A source that lists the keys of each split when it is made. An author writes `task`."""

    def __init__(self, keys: Mapping[str, Sequence[str]]) -> None:
        self._keys = {split: tuple(its_keys) for split, its_keys in keys.items()}
        self._members = {split: frozenset(its_keys) for split, its_keys in self._keys.items()}

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits."""
        return tuple(self._keys)

    def keys(self, split: str) -> Sequence[str]:
        """Return the keys as they were listed."""
        return self._keys[self.require_split(split)]

    def get(self, split: str, key: str) -> TaskData:
        """Return the task; NotFound (SPLIT_NOT_FOUND, TASK_NOT_FOUND) when there is none."""
        split = self.require_split(split)
        if key not in self._members[split]:
            raise task_not_found(split, key)
        return self.task(split, key)

    @abstractmethod
    def task(self, split: str, key: str) -> TaskData:
        """Return the task of a key that is listed."""


class NoTasks(TaskSource):
    """The source of an environment whose questions all come from the caller."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Return no splits."""
        return ()

    def keys(self, split: str) -> Sequence[str]:
        """Raise NotFound (SPLIT_NOT_FOUND)."""
        return (self.require_split(split),)

    def get(self, split: str, key: str) -> TaskData:
        """Raise NotFound (SPLIT_NOT_FOUND)."""
        raise task_not_found(self.require_split(split), key)

    def require_split(self, split: str) -> str:
        """Raise NotFound (SPLIT_NOT_FOUND)."""
        raise NotFound(
            "This environment has no tasks of its own.",
            reason=Reason.SPLIT_NOT_FOUND,
            remedy="Reset with a query or messages.",
        )


def task_not_found(split: str, key: str) -> NotFound:
    """Return the error for a key that a split does not hold."""
    return NotFound(
        f"Split '{split}' holds no task '{key[:80]}'.",
        reason=Reason.TASK_NOT_FOUND,
        remedy="Take keys from ListTasks of the same environment and split.",
    )


def require_share(heldout_fraction: float, others: object) -> None:
    """Raise InvalidConfig for a share out of range, or one beside other tasks to hold out."""
    if not 0 <= heldout_fraction < 1 or (others and heldout_fraction):
        raise InvalidConfig(
            f"heldout_fraction is {heldout_fraction}, and the held-out tasks are "
            f"{others if others else 'a share'}.",
            remedy="Use a share from 0 to below 1, and only one of the two.",
        )


def share_of(text: str) -> float:
    """Return a fixed number in [0, 1) for a text, the same in every process."""
    return hash_of(text) / 2**64


def permute(index: int, size: int, seed: str) -> int:
    """Return the image of `index` under a permutation of range(size).

    It walks a Feistel network into range, so it needs no memory and no work for other indices.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_number in range(4):
            left, right = right, left ^ (hash_of(f"{seed}:{round_number}:{right}") & mask)
        index = left << half | right
        if index < size:
            return index


def hash_of(text: str) -> int:
    """Return the first 64 bits of a text's BLAKE2b digest, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _ref(keys: Sequence[str], split: str, position: int, shuffle_seed: int) -> TaskRef:
    epoch, offset = divmod(position, len(keys))
    if shuffle_seed:
        offset = permute(offset, len(keys), f"{shuffle_seed}:{split}:{epoch}")
    key = keys[offset]
    seed = hash_of(f"{shuffle_seed}:{split}:{epoch}:{key}") >> 33
    return TaskRef(key=key, epoch=epoch, seed=seed)


def _page_size(page_size: int) -> int:
    if not 0 <= page_size <= MAX_PAGE_SIZE:
        raise InvalidInput(
            f"page_size is {page_size}.",
            reason=Reason.BAD_PAGE_SIZE,
            remedy=f"Give 1 to {MAX_PAGE_SIZE}, or 0 for 100.",
        )
    return page_size or 100


def _position(token: str, num_tasks: int) -> int:
    """Return the number of tasks before the page, over all epochs."""
    if not token:
        return 0
    epoch, _, offset = token.partition(":")
    is_valid = len(token) <= 40 and token.isascii() and epoch.isdecimal() and offset.isdecimal()
    if not is_valid or int(offset) >= num_tasks:
        raise InvalidInput(
            "page_token does not come from this source.",
            reason=Reason.BAD_PAGE_TOKEN,
            remedy="Send next_page_token of the previous page, or nothing for the first page.",
        )
    return int(epoch) * num_tasks + int(offset)
