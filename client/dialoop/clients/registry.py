"""RegistryClient: who serves a run, under leases that instances renew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial

from dialoop.clients.channel import Channel, rpc_of
from dialoop.sequences import PolicyVersion
from dialoop.v1 import registry_service_pb2 as pb
from dialoop.wire.codec import Codec, submessage
from dialoop.wire.sequences import POLICY_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInstance:
    """A service that takes part in a run.

    role, name: "inference", "gpu-0"; a service that is started again keeps them and gets a new
    `epoch`, 0 before it has joined. address, rest_address: host:port, empty where it serves none.
    serves: names of environments, or the base model's digest. load: requests that run or wait in
    it. is_admitted: whether it is in rotation; the trainer decides.

    ServiceInstance(role="inference", name="gpu-0", address="10.0.0.7:7002", load=3.0)
    """

    role: str
    name: str
    address: str = ""
    rest_address: str = ""
    epoch: int = 0
    serves: tuple[str, ...] = ()
    policy_version: PolicyVersion | None = None
    is_ready: bool = False
    load: float = 0.0
    is_admitted: bool = False

    @property
    def audience(self) -> str:
        """Return for whom a proof of a call to it is signed; the role alone before it joined."""
        return f"{self.role}/{self.name}/{self.epoch}" if self.epoch else self.role


_INSTANCE = Codec(ServiceInstance, pb.Instance, policy_version=submessage(POLICY_VERSION))

_rpc = partial(rpc_of, pb, "RegistryService", is_retried=True, deadline_s=10.0)
ANNOUNCE = _rpc("Announce")
WITHDRAW = _rpc("Withdraw")
ADMIT = _rpc("Admit")
LIST_INSTANCES = _rpc("ListInstances")
WATCH_INSTANCES = _rpc("WatchInstances", is_retried=False)


class RegistryClient:
    """Asks the registry of a replay service; `run` scopes everything."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def announce(
        self, run: str, instance: ServiceInstance, *, lease_s: float
    ) -> ServiceInstance:
        """Join with epoch 0, or renew the lease; return the instance as the registry has it.

        Raise PreconditionFailed: MEMBER_REPLACED once another instance has the name, MEMBER_MOVED
        for another address under the same epoch. Where services ask for tokens, PermissionDenied
        without a ticket of that role and name: TICKET_MISSING, TICKET_OF_OTHER_MEMBER.
        """
        request = pb.AnnounceRequest(
            run=run, instance=_INSTANCE.to_proto(instance), lease_s=lease_s
        )
        answer = await self._channel.call(ANNOUNCE, request)
        return replace(instance, epoch=answer.epoch, is_admitted=answer.is_admitted)

    async def withdraw(self, run: str, instance: ServiceInstance) -> bool:
        """Leave; return whether the instance was there."""
        request = pb.WithdrawRequest(
            run=run, role=instance.role, name=instance.name, epoch=instance.epoch
        )
        was_listed: bool = (await self._channel.call(WITHDRAW, request)).was_listed
        return was_listed

    async def admit(self, run: str, instance: ServiceInstance, *, is_admitted: bool) -> None:
        """Put an instance into rotation, or take it out.

        Raise NotFound (MEMBER_NOT_FOUND) if it left or was started again.
        """
        request = pb.AdmitRequest(
            run=run,
            role=instance.role,
            name=instance.name,
            epoch=instance.epoch,
            is_admitted=is_admitted,
        )
        await self._channel.call(ADMIT, request)

    async def list_instances(self, run: str, role: str = "") -> tuple[ServiceInstance, ...]:
        """Return the instances whose lease has not ended, of one role or all, by role and name."""
        request = pb.ListInstancesRequest(run=run, role=role)
        answer = await self._channel.call(LIST_INSTANCES, request)
        return tuple(map(_INSTANCE.from_proto, answer.instances))

    async def watch(
        self, run: str, role: str = "", *, interval_s: float = 1.0
    ) -> AsyncIterator[tuple[ServiceInstance, ...]]:
        """Yield the list of instances at once and after every change, at most every interval_s."""
        request = pb.WatchInstancesRequest(run=run, role=role, interval_s=interval_s)
        async for answer in self._channel.stream(WATCH_INSTANCES, request):
            yield tuple(map(_INSTANCE.from_proto, answer.instances))
