"""Services that join a run and those that follow them, over a real registry."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import InvalidInput, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server
from dialoop_services.hosting import GrpcServer
from dialoop_services.hosting.in_process import InProcessNetwork
from dialoop_services.replay.registry_servicer import RegistryServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime import ServerSettings, fleet
from dialoop_services.runtime.fleet import Fleet, Incarnation, announce, follow, reachable_address

from tests.support.queue_model.store import ModelStore
from tests.support.waiting import PATIENCE_S, until

RUN = "fleet"
ONCE = RetryPolicy(max_attempts=1)
GPU_0 = ServiceInstance(role="inference", name="gpu-0", address="127.0.0.1:1")
GPU_1 = ServiceInstance(role="inference", name="gpu-1", address="127.0.0.1:2")


@asynccontextmanager
async def serving(name: str = "gpu-0", epoch: int = 0) -> AsyncIterator[ServiceInstance]:
    """A registry that is itself an instance: any service with a call that can be held would do."""
    servicer = RegistryServicer(ModelStore(QueueLimits()))
    server = GrpcServer(ServerSettings(drain_s=1))
    server.incarnation.epoch = epoch
    server.add(add_RegistryServiceServicer_to_server, servicer, "dialoop.v1.RegistryService")
    async with server:
        yield replace(GPU_0, name=name, address=server.address, epoch=epoch)
        servicer.stop_waiting()


@asynccontextmanager
async def registry() -> AsyncIterator[RegistryClient]:
    async with serving() as instance, Channel(instance.address) as channel:
        yield RegistryClient(channel)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def announcing(
    client: RegistryClient,
    instance: ServiceInstance,
    incarnation: Incarnation,
    lease_s: float = 60.0,
) -> Coroutine[Any, Any, None]:
    return announce(
        client, RUN, instance, lambda m: replace(m, load=2.0), incarnation, lease_s=lease_s
    )


async def names(client: RegistryClient) -> list[str]:
    return [instance.name for instance in await client.list_instances(RUN)]


async def test_a_service_is_a_instance_from_its_announcement_to_its_end() -> None:
    incarnation = Incarnation()
    async with registry() as client:
        async with running(announcing(client, GPU_0, incarnation)):
            await until(lambda: incarnation.epoch)
            assert await client.list_instances(RUN) == (
                replace(GPU_0, epoch=incarnation.epoch, load=2.0),
            )
        assert await names(client) == []


async def test_a_service_ends_when_another_has_taken_its_name() -> None:
    incarnation = Incarnation()
    async with registry() as client:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            orphan = tasks.create_task(_end_of(announcing(client, GPU_0, incarnation, 0.3)))
            await until(lambda: incarnation.epoch)
            later = await client.announce(RUN, replace(GPU_0, address="b:1"), lease_s=60)
            error = await orphan
        assert isinstance(error, PreconditionFailed)
        assert error.reason == Reason.MEMBER_REPLACED
        assert await client.list_instances(RUN) == (later,)  # the orphan withdrew nobody


async def _end_of(work: Coroutine[Any, Any, None]) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None


class Flaky:
    """A registry that is away for some calls, and then refuses."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.epochs: list[int] = []

    async def announce(
        self, run: str, instance: ServiceInstance, *, lease_s: float
    ) -> ServiceInstance:
        self.epochs.append(instance.epoch)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return replace(instance, epoch=answer)

    async def watch(
        self, run: str, role: str, *, interval_s: float
    ) -> AsyncIterator[tuple[ServiceInstance, ...]]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        yield answer

    async def withdraw(self, run: str, instance: ServiceInstance) -> bool:
        raise Unavailable("Away.")


async def test_a_instance_keeps_its_epoch_while_the_registry_is_away() -> None:
    flaky = Flaky(Unavailable("Away."), 7, Unavailable("Away."), 7, InvalidInput("No such run."))
    with pytest.raises(InvalidInput):
        await announcing(cast("Any", flaky), GPU_0, Incarnation(), 0.001)
    assert flaky.epochs == [0, 0, 7, 7, 7]


@pytest.mark.parametrize(("grace_s", "ends_empty"), [(math.inf, False), (0.0, True)])
async def test_without_a_registry_members_stay_for_the_grace_only(
    monkeypatch: pytest.MonkeyPatch, grace_s: float, ends_empty: bool
) -> None:
    monkeypatch.setattr(fleet, "_AGAIN_S", 0.001)
    away = [Unavailable("Away.")] * 9
    flaky = Flaky((GPU_0,), *away, InvalidInput("It ends."))
    updates: list[tuple[ServiceInstance, ...]] = []

    async def take(instances: tuple[ServiceInstance, ...]) -> None:
        updates.append(instances)

    with pytest.raises(InvalidInput):
        await follow(cast("Any", flaky), RUN, "inference", take, grace_s=grace_s)
    assert updates == [(GPU_0,), ()] if ends_empty else [(GPU_0,)]


async def test_followers_see_who_joins_and_leaves_and_keep_the_clients_of_who_stays() -> None:
    updates: list[dict[str, object]] = []
    fleet_: Fleet[object] = Fleet(lambda instance: Channel(instance.address), lambda *_: object())

    async def take(instances: tuple[ServiceInstance, ...]) -> None:
        updates.append({m.name: c for m, c in (await fleet_.update(instances)).items()})

    async with registry() as client, running(follow(client, RUN, "inference", take)):
        await until(lambda: updates == [{}])
        async with running(announcing(client, GPU_0, Incarnation())):
            await until(lambda: list(updates[-1]) == ["gpu-0"])
            async with running(announcing(client, GPU_1, Incarnation())):
                await until(lambda: list(updates[-1]) == ["gpu-0", "gpu-1"])
            await until(lambda: list(updates[-1]) == ["gpu-0"])
        await until(lambda: updates[-1] == {})
    assert len({id(update["gpu-0"]) for update in updates if update}) == 1
    await fleet_.close()


async def test_no_answer_of_an_orphan_arrives_after_it_was_replaced() -> None:
    fleet_ = Fleet(
        lambda instance: Channel(instance.address, epoch=instance.epoch),
        lambda channel, _: RegistryClient(channel),
    )
    async with serving(epoch=1) as orphan, serving(epoch=2) as later:
        (client,) = (await fleet_.update([orphan])).values()
        held = client.watch(RUN)
        assert await anext(held) == ()  # it answers, and goes on to answer
        waiting = asyncio.create_task(anext(held))
        (replacement,) = (await fleet_.update([later])).values()
        with pytest.raises(Unavailable) as refused:
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert refused.value.reason == Reason.CHANNEL_CLOSED
        with pytest.raises(Unavailable):
            await client.list_instances(RUN)
        assert await replacement.list_instances(RUN) == ()
    await fleet_.close()


async def test_calls_in_flight_to_a_instance_that_left_go_on() -> None:
    fleet_ = Fleet(
        lambda instance: Channel(instance.address, epoch=instance.epoch),
        lambda channel, _: RegistryClient(channel),
    )
    async with serving(epoch=1) as instance:
        (client,) = (await fleet_.update([instance])).values()
        held = client.watch(RUN, interval_s=0.01)
        assert await anext(held) == ()
        assert await fleet_.update([]) == {}
        async with Channel(instance.address) as channel:
            joined = await RegistryClient(channel).announce(RUN, GPU_1, lease_s=60)
        assert await asyncio.wait_for(anext(held), PATIENCE_S) == (joined,)
        await fleet_.close()


@pytest.mark.parametrize(("epoch", "is_answered"), [(0, True), (2, True), (1, False), (3, False)])
async def test_a_service_answers_no_call_to_another_incarnation(
    epoch: int, is_answered: bool
) -> None:
    network = InProcessNetwork()
    server = network.server("gpu-0")
    server.incarnation.epoch = 2
    servicer = RegistryServicer(ModelStore(QueueLimits()))
    server.add(add_RegistryServiceServicer_to_server, servicer, "dialoop.v1.RegistryService")
    async with server, serving(epoch=2) as instance:
        for channel in (
            network.connect("gpu-0", replace(GPU_0, epoch=epoch), retry=ONCE),
            Channel(instance.address, retry=ONCE, epoch=epoch),
        ):
            async with channel:
                client = RegistryClient(channel)
                if is_answered:
                    assert await client.list_instances(RUN) == ()
                    continue
                with pytest.raises(Unavailable) as refused:
                    await client.list_instances(RUN)
                assert refused.value.reason == Reason.OTHER_INCARNATION
                with pytest.raises(Unavailable, match="Another incarnation"):
                    await anext(client.watch(RUN))


def test_others_reach_a_service_that_listens_everywhere_by_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-3")
    assert reachable_address("0.0.0.0:7002") == "node-3:7002"
    assert reachable_address("[::]:7002") == "node-3:7002"
    assert reachable_address("10.0.0.7:7002") == "10.0.0.7:7002"
    assert reachable_address("") == ""
