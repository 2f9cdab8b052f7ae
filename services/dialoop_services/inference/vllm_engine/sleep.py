"""Sleep of a vLLM engine that shares its device with the trainer.

On CUDA it is vLLM's own sleep mode: keys are dropped, and weights either wait on the host (level 1)
or are dropped too (level 2), which only a load of the policy ends: a core that woke without one
would answer from whatever the memory holds. What stays on the device is the process' CUDA context.
On a CPU there is no memory to give back, and vLLM's sleep mode does nothing: the core stands still.

Nothing is under way when it begins, which vLLM's sleep does not stand (the replica sees to that).
The core's worker, which has the memory, holds the device's lock itself: an engine core that
outlives its killed service for a moment still keeps the trainer off. For the same reason an engine
that fails while its memory comes back is dead: nobody knows what it has of the device, and asked to
sleep again vLLM does nothing. Its worker keeps the lock, and so the trainer off, until it has ended
with its service, which a supervisor starts anew. The CUDA calls are tested against the installed
vLLM's interface; they have not been run on a device.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import InternalError

from dialoop_services.inference.engine import engine_stopped
from dialoop_services.runtime.device_lock import DeviceLock

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_KEEP, _DROP = 1, 2


class Sleep:
    """Whether the core sleeps, and the way in and out; used by one caller at a time."""

    def __init__(self, llm: AsyncLLM, *, lock: Path | None, frees_memory: bool) -> None:
        self._llm = llm
        self._lock = lock
        self._frees_memory = frees_memory
        self._has_lost_weights = False
        self._is_half_awake = False
        self.is_asleep = False
        # What it has of the device is not known any more: only the end of its worker gives it back.
        self.is_broken = False

    async def hold_device(self) -> None:
        """Let the worker hold the lock beside us."""
        if self._lock is not None:
            held = await self._llm.collective_rpc("dialoop_hold_device", args=(str(self._lock),))
            if not all(held):
                raise InternalError("vLLM's worker does not get the device that is ours.")

    async def begin(self, *, keep_weights: bool) -> None:
        """Fall asleep; if it sleeps, the worker lets go of the device once more."""
        self._require_whole()
        if self.is_asleep:
            await self._leave_device()
            return
        if self._frees_memory:
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
        await self._take_device()
        await self._take_memory(["weights"])
        self._is_half_awake = True

    async def end(self) -> None:
        """All of the memory is back; whether the weights in it are right is for others to say."""
        if not self._is_half_awake:
            return
        await self._take_memory(["kv_cache"])
        self.is_asleep = self._is_half_awake = self._has_lost_weights = False

    async def wake(self) -> None:
        """Wake with the weights that were kept."""
        if not self.is_asleep:
            return
        if self._has_lost_weights:
            raise InternalError("vLLM's weights were dropped: only a load wakes it.")
        await self._take_device()
        await self._take_memory()
        self.is_asleep = False

    def _require_whole(self) -> None:
        if self.is_broken:
            raise engine_stopped()

    async def _take_device(self) -> None:
        """As `hold_device`; if that fails, the worker holds nothing, as it has no memory there."""
        self._require_whole()
        try:
            await self.hold_device()
        except BaseException:
            await self._leave_device()
            raise

    async def _take_memory(self, tags: list[str] | None = None) -> None:
        if not self._frees_memory:
            return
        try:
            await self._llm.wake_up(tags=tags)
        except BaseException:
            self.is_broken = True
            log.error("vLLM failed while it woke: only a new process helps.")
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
