"""The instances of one run in memory; `redis_store` does the same in Lua, function for function."""

from __future__ import annotations

from dataclasses import dataclass, field

from dialoop.reasons import Reason
from dialoop.v1 import registry_service_pb2 as pb
from dialoop_services.replay.refusals import refusal

REMEMBERED_S = 24 * 3600.0
"""Seconds that an ended lease is remembered, so that an orphan that renews it late is refused."""


@dataclass(slots=True, kw_only=True)
class _Lease:
    """An instance as it announced itself; times are those of the store's clock, in seconds."""

    instance: pb.Instance
    ends_at: float


@dataclass(slots=True)
class Instances:
    """Who is there, by role and name; `last_epoch` is the highest that anybody had."""

    last_epoch: int = 0
    _leases: dict[str, _Lease] = field(default_factory=dict)

    def announce(self, request: pb.AnnounceRequest, now: float) -> pb.AnnounceResponse:
        """Let an instance join (epoch 0) or renew its lease; MEMBER_REPLACED if its name is taken.

        MEMBER_MOVED if it has another address than the one with which it got its epoch. An epoch
        that is not known is taken over: the store may have lost it.
        """
        instance = pb.Instance()
        instance.CopyFrom(request.instance)
        name = f"{instance.role}/{instance.name}"
        present = self._leases.get(name)
        if instance.epoch > 0 and present is not None and present.instance.epoch > instance.epoch:
            raise refusal(Reason.MEMBER_REPLACED, name)
        instance.is_admitted = False
        if not instance.epoch:
            # Above all epochs that a store gave which has lost this run.
            instance.epoch = max(self.last_epoch + 1, round(now * 1000))
        elif present is not None and present.instance.epoch == instance.epoch:
            if _places(present.instance) != _places(instance):
                raise refusal(Reason.MEMBER_MOVED, name)
            instance.is_admitted = present.instance.is_admitted
        self.last_epoch = max(self.last_epoch, instance.epoch)
        self._leases[name] = _Lease(instance=instance, ends_at=now + request.lease_s)
        return pb.AnnounceResponse(epoch=instance.epoch, is_admitted=instance.is_admitted)

    def withdraw(self, request: pb.WithdrawRequest, now: float) -> pb.WithdrawResponse:
        """End the lease of an instance, if it still has that epoch."""
        lease = self._present(request, now)
        if lease is not None:
            lease.ends_at = now
        return pb.WithdrawResponse(was_listed=lease is not None)

    def admit(self, request: pb.AdmitRequest, now: float) -> pb.AdmitResponse:
        """Say whether an instance is in rotation; MEMBER_NOT_FOUND if it left or was replaced."""
        lease = self._present(request, now)
        if lease is None:
            raise refusal(Reason.MEMBER_NOT_FOUND, f"{request.role}/{request.name}")
        lease.instance.is_admitted = request.is_admitted
        return pb.AdmitResponse()

    def list_instances(
        self, request: pb.ListInstancesRequest, now: float
    ) -> pb.ListInstancesResponse:
        """Return those whose lease has not ended, by role and name."""
        self._leases = {
            name: lease
            for name, lease in self._leases.items()
            if lease.ends_at + REMEMBERED_S > now
        }
        present = [
            lease.instance
            for _, lease in sorted(self._leases.items())
            if lease.ends_at > now and request.role in ("", lease.instance.role)
        ]
        return pb.ListInstancesResponse(instances=present)

    def _present(self, request: pb.WithdrawRequest | pb.AdmitRequest, now: float) -> _Lease | None:
        lease = self._leases.get(f"{request.role}/{request.name}")
        if lease is None or lease.instance.epoch != request.epoch or lease.ends_at <= now:
            return None
        return lease


def _places(instance: pb.Instance) -> tuple[str, str]:
    return instance.address, instance.rest_address
