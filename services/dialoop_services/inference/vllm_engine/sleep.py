"""Sleep of a vLLM engine that shares its device with the trainer.

On CUDA this is vLLM's own sleep mode. Keys are dropped. Weights either wait on the host (level 1)
or are dropped too (level 2); then only a load of the policy may wake the core, which would
otherwise answer from random memory. The process' CUDA context stays on the device. On a CPU there
is no memory to free, and vLLM's sleep mode does nothing: the core only pauses.

The replica makes sure that nothing is under way, which vLLM's sleep needs. The core's worker has
the memory and holds the device's lock itself, so that an engine core which outlives its killed
service for a moment still keeps the trainer away. An engine that fails while it takes its memory
back is dead: nobody knows what it holds of the device, and vLLM ignores another request to sleep.
Its worker keeps the lock until it ends with its service, which a supervisor restarts. The CUDA
calls are tested against the installed vLLM's interface; they were not run on a device.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import InternalError

from dialoop_services.inference.engine import engine_stopped
from dialoop_services.inference.vllm_engine import internals
from dialoop_services.runtime.device_lock import DeviceLock

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_KEEP, _DROP = 1, 2


class Sleep:
    """Puts the engine core to sleep and wakes it; one caller uses it at a time."""

    def __init__(self, llm: AsyncLLM, *, lock: Path | None, frees_memory: bool) -> None:
        self._llm = llm
        self._lock = lock
        self._frees_memory = frees_memory
        self._has_lost_weights = False
        self._is_half_awake = False
        self.is_asleep = False
        # Nobody knows what it holds of the device: only the end of its worker frees it.
        self.is_broken = False

    async def hold_device(self) -> None:
        """Let the worker hold the device's lock beside the service."""
        if self._lock is not None:
            holds = await self._llm.collective_rpc("dialoop_hold_device", args=(str(self._lock),))
            if not all(holds):
                raise InternalError("vLLM's worker cannot hold the device that the service holds.")

    async def begin(self, *, keep_weights: bool) -> None:
        """Put the core to sleep; if it sleeps already, the worker releases the device again."""
        self._require_whole()
        if self.is_asleep:
            await self._leave_device()
            return
        if self._frees_memory:
            await self._llm.sleep(level=_KEEP if keep_weights else _DROP, mode="abort")
            self._has_lost_weights = not keep_weights
        else:
            await internals.pause(self._llm, "abort", clear_cache=True)
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
        """Take back the rest of the memory after a load; the caller knows if the load was good."""
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
        """Hold the device; if that fails, the worker holds nothing, as it has no memory there."""
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
            log.error("vLLM failed while it woke. The service must be restarted.")
            raise

    async def _leave_device(self) -> None:
        if self._lock is not None:
            await self._llm.collective_rpc("dialoop_leave_device")


class SharedDevice:
    """The worker's own hold on the device, as a base class of vLLM's worker extension."""

    _dialoop_device: DeviceLock | None = None

    def dialoop_hold_device(self, path: str) -> bool:
        """Share the lock; the service holds it already, so no trainer can own it."""
        if self._dialoop_device is None:
            self._dialoop_device = DeviceLock(Path(path))
        return self._dialoop_device.try_share()

    def dialoop_leave_device(self) -> None:
        """Release the lock; the device's memory is free by then."""
        if self._dialoop_device is not None:
            self._dialoop_device.release()
