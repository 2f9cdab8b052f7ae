"""Instances of a run that come and go: announce oneself, and follow those of a role.

A registry that does not answer changes nothing for `GRACE_S`: the last known instances serve on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dialoop.clients.channel import EPOCH_METADATA, Channel
from dialoop.clients.errors import is_worth_retrying
from dialoop.errors import DialoopError, Unavailable
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

    from dialoop.clients.registry import RegistryClient, ServiceInstance

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds after which an instance that does not renew its lease is no longer listed."""
GRACE_S = 300.0
"""Seconds without a registry after which nobody counts as an instance."""
_RENEWALS = 3
_LIST_EVERY_S, _AGAIN_S = 0.5, 1.0
_CLOSE_AFTER_S = 900.0
_ANYWHERE = ("0.0.0.0", "::", "[::]")

C = TypeVar("C")


class Incarnation:
    """Which instance of the registry a service is: its epoch, 0 before it has joined.

    audience: for whom proofs of its callers are signed, as "inference/gpu-0/7".
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.audience = ""

    def require_in(self, metadata: Iterable[tuple[str, Any]]) -> None:
        """Raise Unavailable (OTHER_INCARNATION) for a call to an instance that this one is not.

        It may have got the address of one that died, and its caller does not know that yet.
        """
        for key, value in metadata:
            if key == EPOCH_METADATA and value != str(self.epoch):
                raise Unavailable(
                    "Another incarnation of the service was called than listens here.",
                    reason=Reason.OTHER_INCARNATION,
                    remedy="Ask the registry for the instances of the run, and call one of these.",
                )


def reachable_address(address: str) -> str:
    """Return host:port for others; a service that listens everywhere has the name of its machine.

    reachable_address("10.0.0.7:7002")  # "10.0.0.7:7002"
    """
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in _ANYWHERE else address


async def announce(
    registry: RegistryClient,
    run: str,
    instance: ServiceInstance,
    state: Callable[[ServiceInstance], ServiceInstance],
    incarnation: Incarnation,
    *,
    lease_s: float = LEASE_S,
) -> None:
    """Join and renew the lease until cancelled, then leave; `state` fills in what changes.

    `incarnation` gets the epoch.
    Raise PreconditionFailed (MEMBER_REPLACED) once another instance has the name.
    """
    instance = replace(instance, epoch=0)
    is_away = False
    try:
        while True:
            try:
                joined = await registry.announce(run, state(instance), lease_s=lease_s)
                if not instance.epoch:
                    facts = {"instance": instance.name, "epoch": joined.epoch}
                    log.info("Joined the run.", extra=facts)
                instance, is_away = replace(instance, epoch=joined.epoch), False
                incarnation.epoch, incarnation.audience = joined.epoch, joined.audience
            except DialoopError as error:
                if not is_worth_retrying(error):
                    raise
                if not is_away:
                    log.warning("The registry does not answer.", extra={"reason": error.reason})
                is_away = True
            await asyncio.sleep(lease_s / _RENEWALS)
    finally:
        if instance.epoch and not is_away:
            await _leave(registry, run, instance)


@asynccontextmanager
async def membership(
    registry: RegistryClient,
    run: str,
    instance: ServiceInstance,
    state: Callable[[ServiceInstance], ServiceInstance],
    incarnation: Incarnation,
) -> AsyncIterator[asyncio.Task[None]]:
    """Be an instance while the block runs; yield the task that fails if another replaces it.

    The instance has left when the block has ended.
    """
    announcing = asyncio.create_task(announce(registry, run, instance, state, incarnation))
    try:
        yield announcing
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def _leave(registry: RegistryClient, run: str, instance: ServiceInstance) -> None:
    try:
        async with asyncio.timeout(1.0):
            await registry.withdraw(run, instance)
    except (DialoopError, TimeoutError):
        log.warning("The registry was not told of the end; the lease runs out by itself.")


async def follow(
    registry: RegistryClient,
    run: str,
    role: str,
    update: Callable[[tuple[ServiceInstance, ...]], Awaitable[None]],
    *,
    grace_s: float = GRACE_S,
) -> None:
    """Call `update` with a role's instances, at once and after every change, until cancelled."""
    clock = asyncio.get_running_loop().time
    heard_at, is_known = clock(), False
    while True:
        try:
            async for instances in registry.watch(run, role, interval_s=_LIST_EVERY_S):
                heard_at, is_known = clock(), True
                await update(instances)
                heard_at = clock()
        except DialoopError as error:
            if not is_worth_retrying(error):
                raise
            log.warning("The registry does not answer.", extra={"reason": error.reason})
        if is_known and clock() - heard_at > grace_s:
            log.error("Without a registry for too long: no instance gets calls.")
            is_known = False
            await update(())
        await asyncio.sleep(_AGAIN_S)


@dataclass(frozen=True, slots=True)
class _Joined(Generic[C]):
    channel: Channel
    client: C


class Fleet(Generic[C]):
    """Connections to instances, by name and epoch.

    Calls in flight to an instance that left go on. Those to one that was replaced under its name
    break off, so that no answer of an older incarnation arrives.
    """

    def __init__(
        self,
        connect: Callable[[ServiceInstance], Channel],
        client_of: Callable[[Channel, ServiceInstance], C],
    ) -> None:
        self._connect = connect
        self._client_of = client_of
        self._joined: dict[tuple[str, int], _Joined[C]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def update(self, instances: Iterable[ServiceInstance]) -> Mapping[ServiceInstance, C]:
        """Return the clients of these instances; one that stays keeps its client."""
        present = {(instance.name, instance.epoch): instance for instance in instances}
        newest: dict[str, int] = {}
        for name, epoch in present:
            newest[name] = max(epoch, newest.get(name, 0))
        for key in self._joined.keys() - present.keys():
            left = self._joined.pop(key)
            is_replaced = newest.get(key[0], 0) > key[1]
            self._close(left.channel, after_s=0.0 if is_replaced else _CLOSE_AFTER_S)
        for key in present.keys() - self._joined.keys():
            channel = self._connect(present[key])
            self._joined[key] = _Joined(channel, self._client_of(channel, present[key]))
        return {instance: self._joined[key].client for key, instance in present.items()}

    def _close(self, channel: Channel, *, after_s: float) -> None:
        async def close() -> None:
            try:
                await asyncio.sleep(after_s)
            finally:
                await channel.close()

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all connections."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for joined in self._joined.values():
            await joined.channel.close()
        self._joined.clear()
