"""A replica's sleep: it gives its device up to the trainer, and comes back with a policy.

    awake --sleep--> nothing new, what is under way ends --> engine asleep --> the lock is let go
      ^                                                                              |
      +-- engine awake <-- the lock is shared again <-- a load of the policy, or wake +

Whoever asks for a sample meanwhile is told ASLEEP. A replica that was killed waits for the lock
before it builds its engine, so it cannot take the device from a trainer that has it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError, InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason

from dialoop_services.inference.engine import SupportsSleep
from dialoop_services.inference.replica.device_lease import to_the_end
from dialoop_services.inference.weights.adapters import Adapters
from dialoop_services.inference.weights.data_planes import Arrived

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dialoop.clients.weights import WeightsManifest

    from dialoop_services.inference.engine import Engine, LoadTimes
    from dialoop_services.inference.replica.device_lease import DeviceTurn
    from dialoop_services.inference.weights.publications import Publications

log = logging.getLogger(__name__)


class Sleeper:
    """What of a replica knows sleep; loads are the replica's own."""

    def __init__(
        self,
        engine: Engine,
        publications: Publications,
        turn: DeviceTurn,
        report: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._publications = publications
        self._turn = turn
        self._report = report
        self._adapters = Adapters(engine)
        # Held by whatever changes the weights, or whether they are there.
        self._loading = asyncio.Lock()
        self._fault = ""
        # Asleep without weights: the published policy is what wakes us.
        self._has_no_weights = False

    async def sleep(self, *, drain_s: float) -> None:
        """Give the device up. What is under way has `drain_s` seconds to end. Idempotent."""
        self._turn.require_lock()
        await to_the_end(self._sleep_alone(drain_s))

    async def wake(self) -> None:
        """Take the device again, with the policy it had; Unavailable (ASLEEP) while it is taken."""
        self._turn.require_lock()
        if self._turn.is_over:
            await to_the_end(self._wake_alone())

    async def wake_when_left(self, *, after_s: float, look_every_s: float = 1.0) -> None:
        """Until cancelled: wake once nobody has had the device for so long.

        The trainer that put us to sleep is gone, or has forgotten us. Should it come back, it puts
        us to sleep again: the device is never taken from anyone.
        """
        left_s = 0.0
        while True:
            await asyncio.sleep(look_every_s)
            try:
                left_s = left_s + look_every_s if self._turn.is_left else 0.0
                if left_s < after_s:
                    continue
                left_s = 0.0
                log.warning("Nobody has the device: waking.", extra={"after_s": after_s})
                await self.wake()
            except DialoopError as error:
                log.warning("The replica does not wake.", extra={"reason": error.reason})
            except Exception:
                log.exception("The replica does not wake.")

    async def _sleep_alone(self, drain_s: float) -> None:
        engine = self._require_sleep()
        async with self._loading:
            if engine.is_asleep:
                await self._leave_again()
                return
            # Without a publication there is nothing to come back with.
            named = await asyncio.to_thread(self._named)
            keep = bool(self._adapters.versions) or named is None
            await self._end_turn(drain_s)
            try:
                await engine.sleep(keep_weights=keep)
            except BaseException:
                await self._leave_rotation(Reason.WEIGHTS_BAD)  # and the device stays ours
                self._turn.begin()
                raise
            self._has_no_weights = not keep
            self._turn.let_go()
        log.info("Asleep.")

    async def _end_turn(self, drain_s: float) -> None:
        """Nothing new, and what is under way ends; an error leaves the replica awake."""
        self._turn.close()
        try:
            await self._report(False)
            await self._turn.drain(drain_s)
        except BaseException:
            self._turn.begin()
            await self._report(not self._why_not())
            raise

    async def _leave_again(self) -> None:
        """Hold nothing of the device: whoever failed to wake may have left a hold on it behind."""
        self._turn.close()
        await self._require_sleep().sleep(keep_weights=not self._has_no_weights)
        self._turn.let_go()

    async def _wake_alone(self) -> None:
        if self._has_no_weights:
            manifest = await asyncio.to_thread(self._publications.latest)
            if manifest is not None:
                await self._load(self._named_file(manifest), manifest)
                return
        async with self._loading:
            await self._require_device()
            await self._be_awake()
        log.info("Awake.")

    async def _require_device(self) -> None:
        """Hold the device before anything is done on it; Unavailable (ASLEEP) while it is taken."""
        if self._turn.is_over:
            await self._turn.take()

    async def _be_awake(self) -> None:
        """The device is ours and the policy on it is good, or will be as soon as it wakes."""
        try:
            if self._turn.is_over and self._is_asleep:
                await self._require_sleep().wake()
        except BaseException:
            self._settle_turn()
            raise
        self._has_no_weights = False
        self._turn.begin()
        await self._report(not self._why_not())

    def _settle_turn(self) -> None:
        """After a load or a wake that failed: the device is ours only if the engine woke."""
        if self._turn.is_over and self._is_asleep:
            self._turn.let_go()
        else:
            self._turn.begin()

    @property
    def _is_asleep(self) -> bool:
        return isinstance(self._engine, SupportsSleep) and self._engine.is_asleep

    def _require_sleep(self) -> SupportsSleep:
        if isinstance(self._engine, SupportsSleep):
            return self._engine
        raise PreconditionFailed(
            f"The engine {self._engine.name} does not sleep.",
            reason=Reason.SLEEP_DISABLED,
            remedy='Set placement = "split", or serve with another engine.',
        )

    def _why_not(self) -> str:
        if self._fault or not self._engine.is_alive:
            return self._fault or Reason.NOT_READY
        return Reason.ASLEEP if self._turn.is_over else ""

    async def _leave_rotation(self, fault: str) -> None:
        self._fault = fault
        await self._report(False)
        log.error("Out of rotation until a load succeeds.", extra={"reason": fault})

    def _named(self) -> WeightsManifest | None:
        """What latest.json names; None, said in the log, where it cannot be read."""
        try:
            return self._publications.latest()
        except InvalidConfig as error:
            log.warning("The latest policy is not known.", extra={"reason": error.reason})
            return None

    def _named_file(self, manifest: WeightsManifest) -> Arrived:
        return Arrived(path=self._publications.file_of(manifest))

    async def _load(self, arrived: Arrived, manifest: WeightsManifest) -> LoadTimes:
        raise NotImplementedError
