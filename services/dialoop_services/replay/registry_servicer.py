"""RegistryService: who serves a run, from the queue's store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
from dialoop.errors import InvalidInput
from dialoop.v1 import registry_service_pb2 as pb
from dialoop.v1 import registry_service_pb2_grpc as rpc

from dialoop_services.replay.servicer import (
    LEAST_INTERVAL_S,
    check_run,
    check_seconds,
    wait_for,
)
from dialoop_services.replay.store import QueueStore
from dialoop_services.runtime.access.principals import require_instance

_MAX_TEXT, _MAX_SERVED = 256, 1024
# Above it Lua's JSON would round.
_MAX_EPOCH = 100_000_000_000_000

_Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(rpc.RegistryServiceServicer):
    """Instances of a run over the wire."""

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._stop = asyncio.Event()

    def stop_waiting(self) -> None:
        """End all watches, so that the service can end without breaking them off."""
        self._stop.set()

    async def Announce(self, request: pb.AnnounceRequest, context: _Context) -> pb.AnnounceResponse:
        check_run(request.run)
        instance = request.instance
        _check_name(instance.role, instance.name, instance.epoch)
        require_instance(request.run, instance.role, instance.name)
        for text in (instance.address, instance.rest_address, *instance.serves):
            _check_text("address, rest_address and each of serves", text)
        if len(instance.serves) > _MAX_SERVED:
            raise InvalidInput(
                f"`serves` has {len(instance.serves)} entries.",
                remedy=f"Give {_MAX_SERVED} at most.",
            )
        version = instance.policy_version
        if not 0 <= version.number <= _MAX_EPOCH or (version.number and not version.lineage):
            raise InvalidInput(
                f"Policy version '{version.lineage}-{version.number}' is incomplete or out of "
                "range.",
                remedy="Give a lineage and a number from 0 on, or no version.",
            )
        if not (math.isfinite(instance.load) and instance.load >= 0):
            raise InvalidInput(f"`load` is {instance.load}.", remedy="Give a number from 0 on.")
        check_seconds("lease_s", request.lease_s)
        if not request.lease_s:
            raise InvalidInput("`lease_s` is 0.", remedy="Give seconds above 0.")
        return await self._store.apply(request, pb.AnnounceResponse)

    async def Withdraw(self, request: pb.WithdrawRequest, context: _Context) -> pb.WithdrawResponse:
        check_run(request.run)
        _check_name(request.role, request.name, request.epoch)
        require_instance(request.run, request.role, request.name)
        return await self._store.apply(request, pb.WithdrawResponse)

    async def Admit(self, request: pb.AdmitRequest, context: _Context) -> pb.AdmitResponse:
        check_run(request.run)
        _check_name(request.role, request.name, request.epoch)
        return await self._store.apply(request, pb.AdmitResponse)

    async def ListInstances(
        self, request: pb.ListInstancesRequest, context: _Context
    ) -> pb.ListInstancesResponse:
        check_run(request.run)
        _check_text("role", request.role)
        return await self._store.apply(request, pb.ListInstancesResponse)

    async def WatchInstances(
        self, request: pb.WatchInstancesRequest, context: _Context
    ) -> AsyncIterator[pb.WatchInstancesResponse]:
        check_run(request.run)
        _check_text("role", request.role)
        check_seconds("interval_s", request.interval_s)
        if not request.interval_s:
            raise InvalidInput("`interval_s` is 0.", remedy="Give seconds above 0.")
        listing = pb.ListInstancesRequest(run=request.run, role=request.role)
        last: pb.ListInstancesResponse | None = None
        while not self._stop.is_set():
            answer = await self._store.apply(listing, pb.ListInstancesResponse)
            if answer != last:
                last = answer
                yield pb.WatchInstancesResponse(instances=answer.instances)
            # Leases end without a call, so the list is read again and again.
            await wait_for(self._stop, max(request.interval_s, LEAST_INTERVAL_S))


def _check_name(role: str, name: str, epoch: int) -> None:
    for label, text in (("role", role), ("name", name)):
        _check_text(label, text)
        if not text or "/" in text:
            raise InvalidInput(
                f"`{label}` is empty or has a slash.",
                remedy="Name the instance, as inference, gpu-0.",
            )
    if not 0 <= epoch <= _MAX_EPOCH:
        raise InvalidInput(f"`epoch` is {epoch}.", remedy="Give 0 to join, or the epoch you have.")


def _check_text(label: str, text: str) -> None:
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise InvalidInput(
            f"`{label}` has more than {_MAX_TEXT} characters, or some that cannot be printed.",
            remedy="Give a short text.",
        )
