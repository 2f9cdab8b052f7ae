"""A collector announces itself with its load, and gives its tasks back when it is drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.errors import PreconditionFailed
from dialoop_services.collector.__main__ import serve_in
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.hosting.hosts import OwnProcess

from tests.support.collector_world import RUN, ScriptedPolicy, World, adds_up, serving_policy, world
from tests.support.waiting import PATIENCE_S


class Fleet:
    """A registry with one replica in rotation, and collectors beside it."""

    def __init__(self, w: World, registry: RegistryClient) -> None:
        self.w, self.registry = w, registry

    def start(self, worker: str) -> tuple[OwnProcess, asyncio.Task[None]]:
        settings = CollectorSettings(
            run=RUN,
            worker=worker,
            discovery="registry",
            replay_address=self.w.replay_address,
            environment_address=self.w.environment_address,
            group_size=2,
            page_size=4,
            wait_s=0.2,
        )
        host = OwnProcess(settings)
        return host, asyncio.create_task(serve_in(host, settings))

    async def loads(self) -> dict[str, float]:
        members = await self.registry.list_instances(RUN, "collector")
        return {member.name: member.load for member in members}


@asynccontextmanager
async def fleet(policy: ScriptedPolicy) -> AsyncIterator[Fleet]:
    async with world() as w, serving_policy(policy) as server, AsyncExitStack() as exits:
        registry = RegistryClient(await exits.enter_async_context(Channel(w.replay_address)))
        member = ServiceInstance(role="inference", name="gpu-0", address=server.address)
        joined = await registry.announce(RUN, member, lease_s=600)
        server.incarnation.epoch = joined.epoch
        await registry.admit(RUN, joined, is_admitted=True)
        await w.allow(4)
        yield Fleet(w, registry)


async def test_a_drained_collector_leaves_and_another_plays_what_it_gave_back() -> None:
    policy = ScriptedPolicy(delay_s=60.0)
    async with asyncio.timeout(PATIENCE_S), fleet(policy) as f:
        host, first = f.start("first")
        while (await f.loads()).get("first") != 8.0:  # four groups of two
            # The lease is renewed every few seconds; a new one has the load at once.
            await asyncio.sleep(0.1)
        host.server.stop()
        await first
        assert await f.loads() == {}
        counts = await f.w.training()
        assert counts.num_groups_leased == 0
        assert not counts.num_groups_dropped
        policy.delay_s = 0.0
        host, second = f.start("second")
        await f.w.until(lambda c: c.num_groups_unscored == 4)
        host.server.stop()
        await second
        assert adds_up(await f.w.training())


async def test_a_collector_whose_name_another_takes_ends_with_the_reason() -> None:
    async with asyncio.timeout(PATIENCE_S), fleet(ScriptedPolicy(delay_s=60.0)) as f:
        _, first = f.start("same")
        while "same" not in await f.loads():
            await asyncio.sleep(0.05)
        host, second = f.start("same")
        with pytest.raises(PreconditionFailed) as caught:
            await first
        assert caught.value.reason == "MEMBER_REPLACED"
        assert "another" in str(caught.value).lower()
        host.server.stop()
        await second
