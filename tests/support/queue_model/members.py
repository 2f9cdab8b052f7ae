"""The members of one run in memory; `redis_store` does the same in Lua, function for function."""

from __future__ import annotations

from dataclasses import dataclass, field

from dialoop.reasons import Reason
from dialoop.v1 import registry_service_pb2 as pb
from dialoop_services.replay.refusals import refusal

REMEMBERED_S = 24 * 3600.0
"""Seconds that an ended lease is remembered, so that an orphan that renews it late is refused."""


@dataclass(slots=True, kw_only=True)
class _Lease:
    """A member as it announced itself; times are those of the store's clock, in seconds."""

    member: pb.Member
    ends_at: float


@dataclass(slots=True)
class Members:
    """Who is there, by role and name; `last_epoch` is the highest that anybody had."""

    last_epoch: int = 0
    _leases: dict[str, _Lease] = field(default_factory=dict)

    def announce(self, request: pb.AnnounceRequest, now: float) -> pb.AnnounceResponse:
        """Let a member join (epoch 0) or renew its lease; MEMBER_REPLACED if another has its name.

        MEMBER_MOVED if it has another address than the one with which it got its epoch. An epoch
        that is not known is taken over: the store may have lost it.
        """
        member = pb.Member()
        member.CopyFrom(request.member)
        name = f"{member.role}/{member.name}"
        present = self._leases.get(name)
        if member.epoch > 0 and present is not None and present.member.epoch > member.epoch:
            raise refusal(Reason.MEMBER_REPLACED, name)
        member.is_admitted = False
        if not member.epoch:
            # Above all epochs that a store gave which has lost this run.
            member.epoch = max(self.last_epoch + 1, round(now * 1000))
        elif present is not None and present.member.epoch == member.epoch:
            if _places(present.member) != _places(member):
                raise refusal(Reason.MEMBER_MOVED, name)
            member.is_admitted = present.member.is_admitted
        self.last_epoch = max(self.last_epoch, member.epoch)
        self._leases[name] = _Lease(member=member, ends_at=now + request.lease_s)
        return pb.AnnounceResponse(epoch=member.epoch, is_admitted=member.is_admitted)

    def withdraw(self, request: pb.WithdrawRequest, now: float) -> pb.WithdrawResponse:
        """End the lease of a member, if it still has that epoch."""
        lease = self._present(request, now)
        if lease is not None:
            lease.ends_at = now
        return pb.WithdrawResponse(was_listed=lease is not None)

    def admit(self, request: pb.AdmitRequest, now: float) -> pb.AdmitResponse:
        """Say whether a member is in rotation; MEMBER_NOT_FOUND if it left or was replaced."""
        lease = self._present(request, now)
        if lease is None:
            raise refusal(Reason.MEMBER_NOT_FOUND, f"{request.role}/{request.name}")
        lease.member.is_admitted = request.is_admitted
        return pb.AdmitResponse()

    def list_members(self, request: pb.ListMembersRequest, now: float) -> pb.ListMembersResponse:
        """Return those whose lease has not ended, by role and name."""
        self._leases = {
            name: lease
            for name, lease in self._leases.items()
            if lease.ends_at + REMEMBERED_S > now
        }
        present = [
            lease.member
            for _, lease in sorted(self._leases.items())
            if lease.ends_at > now and request.role in ("", lease.member.role)
        ]
        return pb.ListMembersResponse(members=present)

    def _present(self, request: pb.WithdrawRequest | pb.AdmitRequest, now: float) -> _Lease | None:
        lease = self._leases.get(f"{request.role}/{request.name}")
        if lease is None or lease.member.epoch != request.epoch or lease.ends_at <= now:
            return None
        return lease


def _places(member: pb.Member) -> tuple[str, str]:
    return member.address, member.rest_address
