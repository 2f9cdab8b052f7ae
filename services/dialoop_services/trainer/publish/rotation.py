"""Which replicas may serve: those of the registry, each admitted once it has proved itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dialoop.clients.inference import InferenceClient
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.errors import DialoopError, NotFound

from dialoop_services.runtime.fleet import Fleet, follow

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from dialoop_services.hosting.hosts import Connect
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class Rotation:
    """The replicas of a run as the registry lists them, and who of them is in rotation."""

    def __init__(self, settings: TrainerSettings, connect: Connect) -> None:
        self._channel = connect(settings.replay_address, "replay")
        self._registry = RegistryClient(self._channel)
        self._run = settings.run
        self._fleet = Fleet(
            lambda instance: connect(instance.address, instance),
            lambda channel, _: InferenceClient(channel),
        )
        self._instances: dict[InferenceClient, ServiceInstance] = {}

    async def follow(
        self, update: Callable[[Collection[InferenceClient], Collection[InferenceClient]], None]
    ) -> None:
        """Call `update` with all replicas, and those in rotation, after every change.

        It runs until it is cancelled. Raise what the registry refuses.
        """

        async def take(instances: tuple[ServiceInstance, ...]) -> None:
            clients = await self._fleet.update(instances)
            self._instances = {client: instance for instance, client in clients.items()}
            admitted = [client for instance, client in clients.items() if instance.is_admitted]
            update(tuple(self._instances), admitted)

        await follow(self._registry, self._run, "inference", take)

    async def put(self, replicas: Iterable[InferenceClient], *, is_in: bool) -> None:
        """Put replicas into rotation, or take them out; one that left meanwhile is passed over."""
        for replica in replicas:
            instance = self._instances.get(replica)
            if instance is None or (instance.is_admitted and is_in):
                continue
            try:
                await self._registry.admit(self._run, instance, is_admitted=is_in)
            except NotFound:
                continue
            except DialoopError as error:  # the next look at the replicas says it again
                log.warning("The registry was not told.", extra={"reason": error.reason})
                continue
            message = "A replica is in rotation." if is_in else "A replica is out of rotation."
            log.info(message, extra={"replica": instance.name, "epoch": instance.epoch})

    def name_of(self, replica: InferenceClient) -> str:
        """Return the name that the replica announced; empty if it left."""
        instance = self._instances.get(replica)
        return "" if instance is None else instance.name

    async def close(self) -> None:
        """Close the connections."""
        await self._fleet.close()
        await self._channel.close()
