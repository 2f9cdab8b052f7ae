"""A replica's sleep: it gives its device to the trainer, and wakes with a policy.

    awake --sleep--> nothing new, what is under way ends --> engine asleep --> the lock is free
      ^                                                                              |
      +-- engine awake <-- the lock is shared again <-- a load of the policy, or wake +

Meanwhile requests fail with ASLEEP. A replica that restarts waits for the lock before it builds its
engine, so it never takes the device from a trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dialoop.clients.weights import WeightsManifest
from dialoop.errors import DialoopError, InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason

from dialoop_services.inference.engine import Engine, LoadTimes, SupportsSleep
from dialoop_services.inference.replica.device_lease import DeviceLease, to_the_end
from dialoop_services.inference.weights.adapters import Adapters
from dialoop_services.inference.weights.data_planes import Arrived
from dialoop_services.inference.weights.publications import Publications

log = logging.getLogger(__name__)


class Sleeper:
    """The part of a replica that sleeps and wakes; Replica adds sampling and loads."""

    def __init__(
        self,
        engine: Engine,
        publications: Publications,
        lease: DeviceLease,
        report: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.engine = engine
        self._publications = publications
        self._lease = lease
        self._report = report
        self._adapters = Adapters(engine)
        # Held by everything that changes the weights, or drops them.
        self._loading = asyncio.Lock()
        self._fault = ""
        # Asleep without weights: only a load of the published policy wakes the engine.
        self._has_no_weights = False

    async def sleep(self, *, drain_s: float) -> None:
        """Give the device up. What is under way has `drain_s` seconds to end. Idempotent."""
        self._lease.require_lock()
        await to_the_end(self._sleep_locked(drain_s))

    async def wake(self) -> None:
        """Take the device again, with the policy it had; Unavailable (ASLEEP) while it is taken."""
        self._lease.require_lock()
        if self._lease.is_over:
            await to_the_end(self._wake_locked())

    async def wake_when_left(self, *, after_s: float, look_every_s: float = 1.0) -> None:
        """Wake once nobody has had the device for `after_s` seconds; run until cancelled.

        The trainer that put the replica to sleep has ended, or does not wake it. If it comes back,
        it puts the replica to sleep again. The device is never taken while somebody holds it.
        """
        left_s = 0.0
        while True:
            await asyncio.sleep(look_every_s)
            try:
                left_s = left_s + look_every_s if self._lease.is_left else 0.0
                if left_s < after_s:
                    continue
                left_s = 0.0
                log.warning("Nobody has the device: waking.", extra={"after_s": after_s})
                await self.wake()
            except DialoopError as error:
                log.warning("The replica does not wake.", extra={"reason": error.reason})
            except Exception:
                log.exception("The replica does not wake.")

    async def _sleep_locked(self, drain_s: float) -> None:
        engine = self._require_sleep()
        async with self._loading:
            if engine.is_asleep:
                await self._leave_device()
                return
            # Without a published policy the weights must stay: no load could bring them back.
            manifest = await asyncio.to_thread(self._latest_manifest)
            keep = bool(self._adapters.versions) or manifest is None
            await self._end_lease(drain_s)
            try:
                await engine.sleep(keep_weights=keep)
            except BaseException:
                await self._leave_rotation(Reason.WEIGHTS_BAD)  # and keep the device
                self._lease.begin()
                raise
            self._has_no_weights = not keep
            self._lease.release()
        log.info("Asleep.")

    async def _end_lease(self, drain_s: float) -> None:
        """Begin nothing new and wait for what is under way; an error leaves the replica awake."""
        self._lease.close()
        try:
            await self._report(False)
            await self._lease.drain(drain_s)
        except BaseException:
            self._lease.begin()
            await self._report(not self.fault)
            raise

    async def _leave_device(self) -> None:
        """Free the device again: a wake that failed may still hold part of it."""
        self._lease.close()
        await self._require_sleep().sleep(keep_weights=not self._has_no_weights)
        self._lease.release()

    async def _wake_locked(self) -> None:
        if self._has_no_weights:
            manifest = await asyncio.to_thread(self._publications.latest)
            if manifest is not None:
                await self._load(self._arrived_file(manifest), manifest)
                return
        async with self._loading:
            await self._require_device()
            await self._be_awake()
        log.info("Awake.")

    async def _require_device(self) -> None:
        """Hold the device before anything is done on it; Unavailable (ASLEEP) while it is taken."""
        if self._lease.is_over:
            await self._lease.take()

    async def _be_awake(self) -> None:
        """Wake the engine if it sleeps, then take requests again; the device is held already."""
        try:
            if self._lease.is_over and self._is_asleep:
                await self._require_sleep().wake()
        except BaseException:
            self._resolve_lease()
            raise
        self._has_no_weights = False
        self._lease.begin()
        await self._report(not self.fault)

    def _resolve_lease(self) -> None:
        """Keep the device after a failed load or wake only if the engine woke."""
        if self._lease.is_over and self._is_asleep:
            self._lease.release()
        else:
            self._lease.begin()

    @property
    def _is_asleep(self) -> bool:
        return isinstance(self.engine, SupportsSleep) and self.engine.is_asleep

    def _require_sleep(self) -> SupportsSleep:
        if isinstance(self.engine, SupportsSleep):
            return self.engine
        raise PreconditionFailed(
            f"The engine {self.engine.name} does not sleep.",
            reason=Reason.SLEEP_DISABLED,
            remedy='Set placement = "split", or serve with another engine.',
        )

    @property
    def fault(self) -> str:
        """Return why the replica takes no requests: WEIGHTS_BAD, NOT_READY, ASLEEP, or empty."""
        if self._fault or not self.engine.is_alive:
            return self._fault or Reason.NOT_READY
        return Reason.ASLEEP if self._lease.is_over else ""

    async def _leave_rotation(self, fault: str) -> None:
        self._fault = fault
        await self._report(False)
        log.error("Out of rotation until a load succeeds.", extra={"reason": fault})

    def _latest_manifest(self) -> WeightsManifest | None:
        """Return what latest.json names; None, with a warning in the log, if it cannot be read."""
        try:
            return self._publications.latest()
        except InvalidConfig as error:
            log.warning("latest.json cannot be read.", extra={"reason": error.reason})
            return None

    def _arrived_file(self, manifest: WeightsManifest) -> Arrived:
        return Arrived(manifest=manifest, path=self._publications.file_of(manifest))

    async def _load(self, arrived: Arrived, manifest: WeightsManifest) -> LoadTimes:
        raise NotImplementedError
