"""Where the trainer computes: on its own device (split), or on the engines' device (shared).

    take ---> replicas sleep ---> trainer has the lock ---> weights and optimiser state move in
                                                                     |
              train steps, held-out losses, export, own probes       |
                                                                     v
    replicas load the new policy and wake <--- leave: all moves to the host, the lock is released

The device's lock decides, not messages: awake replicas hold it together, and the trainer computes
only while it holds the lock alone (`dialoop_services.runtime.device_lock`). The lock of a killed
trainer is free at once. Replicas that no trainer wakes wake by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError, PreconditionFailed, Unsupported
from dialoop.waits import waiting_for

from dialoop_services.runtime.device_lock import DeviceLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dialoop.clients.inference import InferenceClient

    from dialoop_services.trainer.learner.learner import Learner
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_RETRY_S, _WARN_EVERY_S = 0.25, 30.0
_ANSWER_S = 10.0
HOST = "cpu"


class Split:
    """The trainer has a device of its own, and the engines are always awake."""

    is_shared = False

    async def leave(self) -> None:
        """Give up the device and leave nothing of the trainer on it. Engines still sleep."""

    @asynccontextmanager
    async def engines_awake(self, between_steps: asyncio.Lock) -> AsyncIterator[None]:
        """Keep the engines awake in the context, and the trainer off a device that they need."""
        yield


class Shared(Split):
    """The trainer and the replicas take turns on one device. One task at a time calls its methods.

    The learner takes the device before it computes anything. The job calls `leave` when it does not
    need the device for now.
    """

    is_shared = True

    def __init__(
        self,
        lock: DeviceLock,
        learner: Learner,
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
        """Wait for running evaluations, put every replica to sleep, and move to the device.

        A replica that does not answer may be starting, asleep or dead. Only the lock shows whether
        it has the device, so the trainer asks again until it has the lock.
        """
        async with self._taking:
            if not self._lock.is_held:
                await self._none_evaluates.wait()
                await self._acquire_lock()
                await asyncio.to_thread(self._learner.move_to, self._device)

    async def _acquire_lock(self) -> None:
        warn_at = self._loop.time() + _WARN_EVERY_S
        with waiting_for("inference", "the device"):
            await self._sleep_all()
            while not self._lock.try_own():
                await asyncio.sleep(_RETRY_S)
                if self._loop.time() > warn_at:
                    lock = str(self._lock.path)
                    log.warning("Still waiting for the device.", extra={"lock": lock})
                    warn_at = self._loop.time() + _WARN_EVERY_S
                await self._sleep_all()

    def _take_from_thread(self) -> None:
        """Call `take` for the learner, which computes in a thread beside the loop."""
        if not self._lock.is_held:
            asyncio.run_coroutine_threadsafe(self.take(), self._loop).result()

    async def leave(self) -> None:
        """Move to the host and release the lock."""
        if self._lock.is_held:
            await asyncio.to_thread(self._learner.move_to, HOST)
            self._lock.release()

    @asynccontextmanager
    async def engines_awake(self, between_steps: asyncio.Lock) -> AsyncIterator[None]:
        """Wake the engines between two train steps; the next step waits for the context to end."""
        async with between_steps:
            self._num_evaluations += 1
            self._none_evaluates.clear()
            try:
                await self._hand_over()
            except BaseException:
                self._end_evaluation()
                raise
        try:
            yield
        finally:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
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
            raise  # the replica has no lock to release: waiting cannot fix that config
        except DialoopError as error:
            log.info("A replica did not take the call to sleep.", extra={"reason": error.reason})

    async def _wake(self, replica: InferenceClient) -> None:
        try:
            await replica.wake()
        except DialoopError as error:
            log.warning("A replica does not wake.", extra={"reason": error.reason})


def placement_of(
    settings: TrainerSettings, learner: Learner, replicas: Sequence[InferenceClient]
) -> Split:
    """Return a Shared placement when the settings name a device lock, else a Split one."""
    if settings.device_lock is None:
        return Split()
    return Shared(
        DeviceLock(settings.device_lock),
        learner,
        replicas,
        device=settings.device,
        drain_s=settings.sleep_drain_s,
    )
