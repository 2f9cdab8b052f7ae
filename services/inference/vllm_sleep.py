"""Sleep of a vLLM engine that shares its device with the trainer.

On CUDA it is vLLM's own sleep mode: keys are dropped, and weights either wait on the host (level 1)
or are dropped too (level 2), which only a load of the policy ends: a core that woke without one
would answer from whatever the memory holds. What stays on the device is the process' CUDA context.
On a CPU there is no memory to give back, and vLLM's sleep mode does nothing: the core stands still.

Nothing is under way when it begins, which vLLM's sleep does not stand (the replica sees to that).
The core's worker, which has the memory, holds the device's lock itself: an engine core that
outlives its killed service for a moment still keeps the trainer off. The CUDA calls are tested
against the installed vLLM's interface; they have not been run on a device.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import InternalError

from services.runtime.device_lock import DeviceLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.v1.engine.async_llm import AsyncLLM

    from services.inference.vllm_options import VllmOptions

_KEEP, _DROP = 1, 2


class Sleep:
    """Whether the core sleeps, and the way in and out; used by one caller at a time."""

    def __init__(self, llm: AsyncLLM, options: VllmOptions) -> None:
        self._llm = llm
        self._lock = options.device_lock
        self._gives_memory_back = options.frees_memory_asleep
        self._has_lost_weights = False
        self._is_half_awake = False
        self.is_asleep = False

    async def hold_device(self) -> None:
        """Let the worker hold the lock beside us."""
        if self._lock is not None:
            held = await self._llm.collective_rpc("dialoop_hold_device", args=(str(self._lock),))
            if not all(held):
                raise InternalError("vLLM's worker does not get the device that is ours.")

    async def begin(self, *, keep_weights: bool) -> None:
        """Fall asleep; if it sleeps, the worker lets go of the device once more."""
        if self.is_asleep:
            await self._leave_device()
            return
        if self._gives_memory_back:
            await self._llm.sleep(level=_KEEP if keep_weights else _DROP, mode="abort")
            self._has_lost_weights = not keep_weights
        else:
            core = self._llm.engine_core
            await core.pause_scheduler_async(mode="abort", clear_cache=True)
        await self._leave_device()
        self.is_asleep = True

    async def make_room_for_weights(self) -> None:
        """Take the device and the weights' memory on it, before new ones are copied there."""
        if not self.is_asleep:
            return
        async with self._or_leave():
            await self.hold_device()
            if self._gives_memory_back:
                await self._llm.wake_up(tags=["weights"])
        self._is_half_awake = True

    async def end(self) -> None:
        """All of the memory is back; whether the weights in it are right is for others to say."""
        if not self._is_half_awake:
            return
        async with self._or_leave():
            if self._gives_memory_back:
                await self._llm.wake_up(tags=["kv_cache"])
        self.is_asleep = self._is_half_awake = self._has_lost_weights = False

    async def wake(self) -> None:
        """Wake with the weights that were kept."""
        if not self.is_asleep:
            return
        if self._has_lost_weights:
            raise InternalError("vLLM's weights were dropped: only a load wakes it.")
        async with self._or_leave():
            await self.hold_device()
            if self._gives_memory_back:
                await self._llm.wake_up()
        self.is_asleep = False

    @asynccontextmanager
    async def _or_leave(self) -> AsyncIterator[None]:
        """A step of waking up; if it fails, the worker holds nothing of the device."""
        try:
            yield
        except BaseException:
            try:
                if self._is_half_awake and self._gives_memory_back:  # the weights are there
                    level = _DROP if self._has_lost_weights else _KEEP
                    await self._llm.sleep(level=level, mode="abort")
            finally:
                self._is_half_awake = False
                await self._leave_device()
            raise

    async def _leave_device(self) -> None:
        if self._lock is not None:
            await self._llm.collective_rpc("dialoop_leave_device")


class SharedDevice:
    """Mixed into vLLM's worker: the worker's own hold on the device."""

    _dialoop_device: DeviceLock | None = None

    def dialoop_hold_device(self, path: str) -> bool:
        """Share the lock; the service holds it by now, so nobody can own it."""
        if self._dialoop_device is None:
            self._dialoop_device = DeviceLock(Path(path))
        return self._dialoop_device.try_share()

    def dialoop_leave_device(self) -> None:
        """Let it go; the memory has been given back."""
        if self._dialoop_device is not None:
            self._dialoop_device.release()
