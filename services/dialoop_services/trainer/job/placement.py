"""Whose turn the device is: the trainer's own (split), or one that engines sample on (shared).

    take ---> replicas sleep ---> the lock is ours ---> weights and optimiser state move in
                                                                     |
              train steps, held-out losses, export, own probes       |
                                                                     v
    replicas load what is published, and so wake <--- leave: all moves to the host, lock let go

Nobody has to be believed: an awake replica holds the device's lock with the other replicas, and the
trainer works only while it holds that lock alone (`dialoop_services.runtime.device_lock`). A
trainer that is killed leaves the lock free, and replicas that nobody wakes wake by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from dialoop.errors import DialoopError, PreconditionFailed, Unsupported

from dialoop_services.runtime.device_lock import DeviceLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from dialoop.clients.inference import InferenceClient

    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_AGAIN_S, _SAY_EVERY_S = 0.25, 30.0
_ANSWER_S = 10.0
HOST = "cpu"


class Computing(Protocol):
    """What computes on a device."""

    def move_to(self, device: str) -> None:
        """Move all of it there."""

    def ask_before_computing(self, ask: Callable[[], None]) -> None:
        """From now on, call `ask` before anything is computed; it may block."""


class Placement(Protocol):
    """The device between the trainer and the engines; its methods are for one task at a time."""

    is_shared: bool

    async def leave(self) -> None:
        """Give the device up, with nothing of the trainer's left on it. Engines still sleep."""

    def engines_awake(self, between_steps: asyncio.Lock) -> AbstractAsyncContextManager[None]:
        """Inside, engines are awake and the trainer does not take the device."""


class Split:
    """The trainer has a device of its own."""

    is_shared = False

    async def leave(self) -> None:
        """It stays."""

    @asynccontextmanager
    async def engines_awake(self, between_steps: asyncio.Lock) -> AsyncIterator[None]:
        """They always are."""
        yield


class Shared:
    """The trainer and the replicas take turns.

    The learner asks for the device before it computes anything, whoever called it; who is done with
    it for now says so by `leave`.
    """

    is_shared = True

    def __init__(
        self,
        lock: DeviceLock,
        learner: Computing,
        replicas: Sequence[InferenceClient],
        *,
        device: str,
        drain_s: float,
    ) -> None:
        self._lock = lock
        self._learner = learner
        self._loop = asyncio.get_running_loop()
        self._taking = asyncio.Lock()
        learner.ask_before_computing(self._take_from_thread)
        self._replicas = tuple(replicas)
        self._device = device
        self._drain_s = drain_s
        self._num_evaluations = 0
        self._none_evaluates = asyncio.Event()
        self._none_evaluates.set()

    async def take(self) -> None:
        """Wait for evaluations under way, put every replica to sleep, and move in.

        A replica that is away may be starting, asleep or dead: the lock says whether it has the
        device. So it is asked again until the lock is ours.
        """
        async with self._taking:
            if not self._lock.is_held:
                await self._none_evaluates.wait()
                await self._own()
                await asyncio.to_thread(self._learner.move_to, self._device)

    async def _own(self) -> None:
        say_at = self._loop.time() + _SAY_EVERY_S
        await self._sleep_all()
        while not self._lock.try_own():
            await asyncio.sleep(_AGAIN_S)
            if self._loop.time() > say_at:
                log.warning("Still waiting for the device.", extra={"lock": str(self._lock.path)})
                say_at = self._loop.time() + _SAY_EVERY_S
            await self._sleep_all()

    def _take_from_thread(self) -> None:
        """`take` for the learner, which computes in a thread beside the loop."""
        if not self._lock.is_held:
            asyncio.run_coroutine_threadsafe(self.take(), self._loop).result()

    async def leave(self) -> None:
        """Move to the host and let the lock go."""
        if self._lock.is_held:
            await asyncio.to_thread(self._learner.move_to, HOST)
            self._lock.release()

    @asynccontextmanager
    async def engines_awake(self, between_steps: asyncio.Lock) -> AsyncIterator[None]:
        """Wake them between two train steps; the next one waits until the context is left."""
        async with between_steps:
            self._num_evaluations += 1
            self._none_evaluates.clear()
            try:
                await self._hand_over()
            except BaseException:
                self._evaluated()
                raise
        try:
            yield
        finally:
            self._evaluated()

    def _evaluated(self) -> None:
        self._num_evaluations -= 1
        if not self._num_evaluations:
            self._none_evaluates.set()

    async def _hand_over(self) -> None:
        await self.leave()
        await asyncio.gather(*(self._wake(replica) for replica in self._replicas))

    async def _sleep_all(self) -> None:
        await asyncio.gather(*(self._sleep(replica) for replica in self._replicas))

    async def _sleep(self, replica: InferenceClient) -> None:
        try:
            await replica.sleep(drain_s=self._drain_s, deadline_s=self._drain_s + _ANSWER_S)
        except (PreconditionFailed, Unsupported):
            raise  # it has no lock to let go: a mistake that no waiting mends
        except DialoopError as error:
            log.info("A replica was not told to sleep.", extra={"reason": error.reason})

    async def _wake(self, replica: InferenceClient) -> None:
        try:
            await replica.wake()
        except DialoopError as error:
            log.warning("A replica does not wake.", extra={"reason": error.reason})


def placement_of(
    settings: TrainerSettings, learner: Computing, replicas: Sequence[InferenceClient]
) -> Placement:
    """Shared when the settings name a lock."""
    if settings.device_lock is None:
        return Split()
    return Shared(
        DeviceLock(settings.device_lock),
        learner,
        replicas,
        device=settings.device,
        drain_s=settings.sleep_drain_s,
    )
