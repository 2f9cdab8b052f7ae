"""The Redis of `store = "memory"`: a child of the replay service that only a clean stop saves.

Nobody else reaches its socket. A clean stop leaves its queue in the folder as `queue.rdb`; the next
start takes it from there. So a queue that was lost since is never read from an older file.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import redis.asyncio
import redis.exceptions
from dialoop.errors import Unavailable
from dialoop.reasons import Reason
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dialoop_services.replay.redis_program import OF_GLIBC, redis_program
from dialoop_services.runtime.access.principals import without_tokens
from dialoop_services.runtime.durable import sync_file

_SNAPSHOT = "queue.rdb"
_POLL_S = 0.01
_NEVER_S = str(10 * 365 * 86_400)
_LOADED_IN_S, _SAVED_IN_S = 300.0, 60.0
_PR_SET_PDEATHSIG = 1
_EMPTY = 'The next start begins with an empty queue; store = "redis" keeps it on disk at all times.'


@asynccontextmanager
async def unsaved_redis(folder: Path | None, *, on_end: Callable[[], None]) -> AsyncIterator[str]:
    """Run a Redis until the context is left, then save it; without a folder nothing is kept.

    `on_end` is called where it ends before. Raise InvalidConfig (NO_REDIS) where there is no
    program for it, Unavailable (STORE_UNAVAILABLE) where it ends too early or cannot save.
    """
    # A socket's path may have 107 characters, which those of runs may exceed.
    with tempfile.TemporaryDirectory(prefix="dialoop-queue-") as place:
        own = _UnsavedRedis(Path(place), folder)
        try:
            await own.until_ready()
            watching = asyncio.create_task(own.watch(on_end))
            try:
                yield own.url
            finally:
                watching.cancel()
                await own.stop()
        finally:
            own.kill()


class _UnsavedRedis:
    """A redis-server that answers at `url`."""

    def __init__(self, place: Path, folder: Path | None) -> None:
        self._snapshot = folder and (folder / _SNAPSHOT).resolve()
        self._log = place / "redis.log"
        self.url = f"unix://{place}/redis.sock"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        options = {
            "port": "0",
            "unixsocket": f"{place}/redis.sock",
            "unixsocketperm": "700",
            "dir": str((folder or place).resolve()),
            "dbfilename": _SNAPSHOT,
            "appendonly": "no",
            "rdbcompression": "no",
            "logfile": str(self._log),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        words += ["--save", _NEVER_S, "1"]  # it saves at SIGTERM only where some interval is set
        self._process = subprocess.Popen(
            [redis_program(), *words],
            env=without_tokens(os.environ) | OF_GLIBC,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C ends the service, and the service ends this
            preexec_fn=_die_with_parent(),
        )
        self._client = redis.asyncio.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0))

    async def until_ready(self) -> None:
        """Wait until it has read its snapshot, and delete that."""
        end = time.monotonic() + _LOADED_IN_S
        while True:
            try:
                await self._client.ping()
                break
            except redis.exceptions.ConnectionError:  # or BusyLoadingError, which is one
                if self._process.poll() is not None or time.monotonic() > end:
                    raise _unavailable(
                        f"does not start: {self._last_line()}",
                        f"Mend that, or begin with an empty queue: delete {self._snapshot}.",
                    ) from None
            await asyncio.sleep(_POLL_S)
        if self._snapshot is not None:
            self._snapshot.unlink(missing_ok=True)
            sync_file(self._snapshot.parent)  # no power loss brings it back

    async def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` once it has ended."""
        await asyncio.to_thread(self._process.wait)
        on_end()

    async def stop(self) -> None:
        """End it, after it has saved its queue where there is a folder.

        Whoever signals a group of processes may have ended it before: it saved its queue then too.
        """
        try:
            await self._client.shutdown(save=self._snapshot is not None, nosave=not self._snapshot)
            code = await asyncio.to_thread(self._process.wait, _SAVED_IN_S)
        except (redis.exceptions.RedisError, subprocess.TimeoutExpired) as error:
            raise _unavailable(f"cannot save its queue: {self._last_line()}", _EMPTY) from error
        finally:
            await self._client.aclose()
        if code != 0 or (self._snapshot is not None and not self._snapshot.is_file()):
            raise _unavailable("has ended, and its queue is lost", _EMPTY)

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()
        self._process.wait()

    def _last_line(self) -> str:
        lines = self._log.read_text("utf-8").splitlines() if self._log.is_file() else []
        return lines[-1].rpartition("# ")[2].rstrip(".") if lines else "it says nothing"


def _unavailable(what: str, remedy: str) -> Unavailable:
    message = f'The Redis of store = "memory" {what}.'
    return Unavailable(message, reason=Reason.STORE_UNAVAILABLE, remedy=remedy)


def _die_with_parent() -> partial[int] | None:
    """Return what lets a child end as soon as its parent has ended, however that came."""
    if sys.platform != "linux":
        return None
    # Loaded before the fork, after which nothing but the call may happen.
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL.value)
