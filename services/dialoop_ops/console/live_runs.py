"""The running stacks behind a console's runs: what they do, their dead letters, pause and requeue.

A stack is found by its run's directory, at every question: it may start, end or start again. Every
question carries the token of whoever asks the console, and no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dialoop.clients.channel import Channel
from dialoop.clients.replay import DeadLetter, ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.trainer import TrainerClient
from dialoop.errors import Unavailable
from dialoop.reasons import Reason
from dialoop.running_stacks import Stack, find_stack

from dialoop_ops.now import Watcher

LOOK_EVERY_S = 1.0
_MAX_DEAD_LETTERS = 200
_UNASKED_S = 30.0


@dataclass(slots=True)
class _Watched:
    """The watcher of one run's stack with one token, and its newest look."""

    watcher: Watcher | None = None
    answer: dict[str, Any] | None = None
    looked_at: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class LiveRuns:
    """Asks the stacks of runs, once a second however many pages with the same token ask."""

    def __init__(self) -> None:
        self._watched: dict[tuple[Path, str], _Watched] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for watched in self._watched.values():
            await self._end(watched)

    async def now(self, run_dir: Path, token: str) -> dict[str, Any] | None:
        """Return what the run's stack does, as `Now.as_json`; None while no stack serves it."""
        await self._drop_unasked()
        watched = self._watched.setdefault((run_dir, token), _Watched())
        async with watched.lock:
            is_new = watched.watcher is None and watched.answer is None
            if is_new or time.monotonic() - watched.looked_at >= LOOK_EVERY_S / 2:
                watched.answer = await self._look(run_dir, token, watched)
                watched.looked_at = time.monotonic()
        return watched.answer

    async def _drop_unasked(self) -> None:
        """Forget those whom nobody has asked about for a while, with their connections."""
        before = time.monotonic() - _UNASKED_S
        for key, watched in list(self._watched.items()):
            if watched.looked_at < before and not watched.lock.locked():
                del self._watched[key]
                await self._end(watched)

    async def _look(self, run_dir: Path, token: str, watched: _Watched) -> dict[str, Any] | None:
        stack = await asyncio.to_thread(find_stack, run_dir)
        if watched.watcher is not None:
            old = watched.watcher.stack
            if stack is None or (old.pid, old.addresses) != (stack.pid, stack.addresses):
                await self._end(watched)
        if stack is None:
            return None
        if watched.watcher is None:
            watched.watcher = await Watcher(stack, token=token).__aenter__()
        now = await watched.watcher.look(stack.processes)
        return {"pid": stack.pid, "run_id": stack.run_id, **now.as_json()}

    async def _end(self, watched: _Watched) -> None:
        if watched.watcher is not None:
            await watched.watcher.__aexit__(None, None, None)
            watched.watcher = None

    async def dead_letters(self, run_dir: Path, token: str) -> list[dict[str, Any]]:
        """Return the groups that the run's queue gave up, with their reasons."""
        async with _channel(run_dir, "replay", token) as (stack, channel):
            letters = await ReplayClient(channel).list_dead_letters(
                stack.run_id, max_groups=_MAX_DEAD_LETTERS
            )
        return [_letter(each) for each in letters]

    async def requeue(self, run_dir: Path, token: str, group_ids: Sequence[str]) -> int:
        """Put dead letters back into the queue; return how many."""
        async with _channel(run_dir, "replay", token) as (stack, channel):
            return await ReplayClient(channel).requeue(stack.run_id, group_ids)

    async def pause(self, run_dir: Path, token: str, *, is_paused: bool) -> None:
        """Let training end its step and wait, or let it go on."""
        async with _channel(run_dir, "trainer", token) as (_, channel):
            trainer = TrainerClient(channel)
            await (trainer.pause() if is_paused else trainer.resume())


@asynccontextmanager
async def _channel(run_dir: Path, service: str, token: str) -> AsyncIterator[tuple[Stack, Channel]]:
    stack = await asyncio.to_thread(find_stack, run_dir)
    if stack is None or service not in stack.addresses:
        raise Unavailable(
            f"No stack is serving {run_dir.name}.",
            reason=Reason.NO_STACK,
            remedy="Its queue can be read and its training paused while it runs.",
        )
    stack.require_own(token)
    address, once = stack.addresses[service], RetryPolicy(max_attempts=1)
    async with Channel(address, token=token, retry=once) as channel:
        yield stack, channel


def _letter(letter: DeadLetter) -> dict[str, Any]:
    trajectories = letter.group.trajectories
    return {
        "group_id": letter.group_id,
        "stage": letter.stage.name.lower(),
        "reason": letter.reason,
        "num_deliveries": letter.num_deliveries,
        "task_key": letter.group.task.key,
        "environment": letter.group.task.environment,
        "rewards": [trajectory.reward for trajectory in trajectories],
        "num_tokens": sum(len(s.token_ids) for t in trajectories for s in t.sequences),
    }
