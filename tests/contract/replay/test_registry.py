"""The registry over gRPC: who takes part in a run, under leases, on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from dialoop.clients.channel import Channel
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.errors import InvalidInput, NotFound, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server
from dialoop_services.hosting import GrpcServer
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.registry_servicer import RegistryServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime import ServerSettings

from tests.support.queue_model.store import ModelStore
from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.waiting import PATIENCE_S

GPU_0 = ServiceInstance(
    role="inference",
    name="gpu-0",
    address="127.0.0.1:7002",
    rest_address="127.0.0.1:7102",
    serves=("a base", "another"),
    policy_version=PolicyVersion(lineage="a", number=10**12),
    is_ready=True,
    load=2.5,
)


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[RegistryClient]:
    store = (
        ModelStore(QueueLimits())
        if request.param == "memory"
        else RedisStore(request.getfixturevalue("redis_url"), QueueLimits())
    )
    servicer = RegistryServicer(store)
    server = GrpcServer(ServerSettings(drain_s=1))
    server.add(add_RegistryServiceServicer_to_server, servicer, "dialoop.v1.RegistryService")
    async with server, Channel(server.address) as channel:
        yield RegistryClient(channel)
        servicer.stop_waiting()
    await store.close()


async def test_a_instance_is_listed_as_it_announced_itself(registry: RegistryClient) -> None:
    run = new_run()
    joined = await registry.announce(run, GPU_0, lease_s=60)
    assert joined == replace(GPU_0, epoch=joined.epoch)
    bare = await registry.announce(run, ServiceInstance(role="collector", name="c"), lease_s=60)
    assert await registry.list_instances(run) == (bare, joined)
    assert await registry.list_instances(run, "inference") == (joined,)
    assert await registry.list_instances(new_run()) == ()
    assert await registry.withdraw(run, joined)
    assert not await registry.withdraw(run, joined)
    assert await registry.list_instances(run) == (bare,)


async def test_who_comes_later_under_a_name_stays(registry: RegistryClient) -> None:
    run = new_run()
    orphan = await registry.announce(run, GPU_0, lease_s=60)
    await registry.admit(run, orphan, is_admitted=True)
    later = await registry.announce(run, GPU_0, lease_s=60)
    assert later.epoch > orphan.epoch
    with pytest.raises(PreconditionFailed) as replaced:
        await registry.announce(run, orphan, lease_s=60)
    assert replaced.value.reason == "MEMBER_REPLACED"
    with pytest.raises(NotFound) as gone:
        await registry.admit(run, orphan, is_admitted=True)
    assert gone.value.reason == "MEMBER_NOT_FOUND"
    assert not await registry.withdraw(run, orphan), "the orphan would take the later one away"
    assert await registry.list_instances(run) == (later,), "it inherited the orphan's admission"
    await registry.admit(run, later, is_admitted=True)
    renewed = await registry.announce(run, replace(later, load=7.0), lease_s=60)
    assert renewed == replace(later, load=7.0, is_admitted=True)


async def test_a_store_that_lost_the_instances_takes_them_back(registry: RegistryClient) -> None:
    run = new_run()
    epoch = 10**13  # above the clock in milliseconds
    back = await registry.announce(run, replace(GPU_0, epoch=epoch), lease_s=60)
    assert (back.epoch, back.is_admitted) == (epoch, False)
    assert (await registry.announce(run, GPU_0, lease_s=60)).epoch == epoch + 1


async def test_a_watch_tells_of_every_change_and_of_a_lease_that_ends(
    registry: RegistryClient,
) -> None:
    run = new_run()
    async with asyncio.timeout(PATIENCE_S), aclosing(registry.watch(run, interval_s=0.01)) as lists:
        assert await anext(lists) == ()
        joined = await registry.announce(run, GPU_0, lease_s=0.3)
        assert await anext(lists) == (joined,)
        assert await anext(lists) == ()


async def test_a_thousand_instances_renew_and_are_listed(registry: RegistryClient) -> None:
    run = new_run()
    names = [f"gpu-{number:04}" for number in range(1000)]
    instances = [replace(GPU_0, name=name) for name in names]
    joined = await asyncio.gather(*(registry.announce(run, m, lease_s=60) for m in instances))
    assert len({instance.epoch for instance in joined}) == len(names)
    await asyncio.gather(*(registry.announce(run, m, lease_s=60) for m in joined))
    assert await registry.list_instances(run, "inference") == tuple(joined)


BAD = {
    "no role": ServiceInstance(role="", name="a"),
    "no name": ServiceInstance(role="inference", name=""),
    "a slash": ServiceInstance(role="inference", name="a/b"),
    "a control character": ServiceInstance(role="inference", name="a\n"),
    "a long address": ServiceInstance(role="inference", name="a", address="x" * 257),
    "an epoch below 0": ServiceInstance(role="inference", name="a", epoch=-1),
    "an epoch too large": ServiceInstance(role="inference", name="a", epoch=10**15),
    "load that is no number": ServiceInstance(role="inference", name="a", load=float("nan")),
    "load below 0": ServiceInstance(role="inference", name="a", load=-1.0),
    "much served": ServiceInstance(role="inference", name="a", serves=("e",) * 1025),
    "a version without lineage": ServiceInstance(
        role="inference", name="a", policy_version=PolicyVersion(lineage="", number=1)
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_instance_is_refused_and_changes_nothing(
    registry: RegistryClient, what: str
) -> None:
    run = new_run()
    with pytest.raises(InvalidInput):
        await registry.announce(run, BAD[what], lease_s=60)
    assert await registry.list_instances(run) == ()


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_bad_lease_is_refused(registry: RegistryClient, lease_s: float) -> None:
    run = new_run()
    with pytest.raises(InvalidInput):
        await registry.announce(run, GPU_0, lease_s=lease_s)
    assert await registry.list_instances(run) == ()


async def test_who_watches_without_a_pause_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store, num_looks = ModelStore(QueueLimits()), 0
    apply = store.apply

    async def apply_and_count(request: Any, answer: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return await apply(request, answer)

    monkeypatch.setattr(store, "apply", apply_and_count)
    servicer, server = RegistryServicer(store), GrpcServer(ServerSettings(drain_s=1))
    server.add(add_RegistryServiceServicer_to_server, servicer, "dialoop.v1.RegistryService")
    async with server, Channel(server.address) as channel:
        client = RegistryClient(channel)
        with suppress(TimeoutError):
            async with asyncio.timeout(1), aclosing(client.watch("r", interval_s=1e-300)) as lists:
                async for _ in lists:
                    pass
        servicer.stop_waiting()
    assert 2 < num_looks < 30
