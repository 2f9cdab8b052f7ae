"""A rogue with a token of some scopes speaks for instances, and gets nowhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dialoop.clients.channel import Channel
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import DialoopError, PermissionDenied, PreconditionFailed
from dialoop.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server
from dialoop.wire.scopes import SCOPES
from dialoop_services.hosting import GrpcServer
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.registry_servicer import RegistryServicer
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime import load
from dialoop_services.runtime.access.tickets import ROLE_SCOPES, Authority, Proofs

from tests.support.queue_model.store import ModelStore
from tests.support.redis_server import new_run, redis_url  # noqa: F401

OWN = "the-own-token-of-the-job"
ONCE = RetryPolicy(max_attempts=1)
REAL = ServiceInstance(
    role="inference", name="gpu-0", address="127.0.0.1:7002", rest_address="127.0.0.1:8002"
)
ROGUE = "127.0.0.1:666"


@pytest.fixture(autouse=True)
def _as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dialoop_services.runtime.access.token_file._LOOK_EVERY_S", 0.0)


class World:
    """A replay service of a run with one admitted replica, and ways to call it."""

    def __init__(self, run: str, server: GrpcServer) -> None:
        self.run, self.server = run, server
        authority = Authority.of(OWN)
        assert authority is not None
        self.authority = authority

    @asynccontextmanager
    async def registry(self, token: Any) -> AsyncIterator[RegistryClient]:
        async with Channel(self.server.address, token=token, retry=ONCE) as channel:
            yield RegistryClient(channel)

    def ticket(self, role: str, name: str = "", run: str = "") -> Any:
        ticket = self.authority.issue(run=run or self.run, role=role, name=name)
        return lambda: Proofs(ticket).to("replay")

    async def instances(self) -> tuple[ServiceInstance, ...]:
        async with self.registry(OWN) as registry:
            return await registry.list_instances(self.run)


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    store = (
        ModelStore(QueueLimits())
        if request.param == "memory"
        else RedisStore(request.getfixturevalue("redis_url"), QueueLimits())
    )
    tables = [
        f"[tokens.t{number}]\nscopes = {json.dumps([scope])}\n"
        f'sha256 = "{hashlib.sha256(f"only-{scope}".encode()).hexdigest()}"'
        for number, scope in enumerate(SCOPES)
    ]
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("\n".join(tables))
    servicer = RegistryServicer(store)
    server = GrpcServer(load(ReplaySettings, token=OWN, token_file=tokens, drain_s=1))
    server.add(add_RegistryServiceServicer_to_server, servicer, "dialoop.v1.RegistryService")
    async with server:
        made = World(new_run(), server)
        async with made.registry(made.ticket("inference", "gpu-0")) as registry:
            joined = await registry.announce(made.run, REAL, lease_s=60)
        async with made.registry(OWN) as registry:
            await registry.admit(made.run, joined, is_admitted=True)
        yield made
        servicer.stop_waiting()
    await store.close()


async def reason_of(call: Any) -> str:
    """The reason for which a call is refused; empty where it is answered."""
    try:
        await call
    except DialoopError as error:
        return str(error.reason)
    return ""


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_token_of_one_scope_speaks_for_no_instance(world: World, scope: str) -> None:
    before = await world.instances()
    (real,) = before
    hijacked = replace(real, address=ROGUE, is_admitted=False)
    async with world.registry(f"only-{scope}") as registry:
        attempts = {
            "joins": registry.announce(
                world.run, ServiceInstance(role="inference", name="rogue", address=ROGUE), lease_s=9
            ),
            "joins as a collector": registry.announce(
                world.run, ServiceInstance(role="collector", name="c", address=ROGUE), lease_s=9
            ),
            "moves an instance": registry.announce(world.run, hijacked, lease_s=9),
            "renews an instance": registry.announce(world.run, real, lease_s=0.001),
            "replaces an instance": registry.announce(
                world.run, replace(hijacked, epoch=0), lease_s=9
            ),
            "ends an instance": registry.withdraw(world.run, real),
        }
        reasons = {what: await reason_of(attempt) for what, attempt in attempts.items()}
    wanted = "TICKET_MISSING" if scope == "rollout" else "SCOPE_MISSING"
    assert reasons == dict.fromkeys(attempts, wanted)
    assert await world.instances() == before


async def test_not_even_the_jobs_own_token_speaks_for_a_instance(world: World) -> None:
    before = await world.instances()
    async with world.registry(OWN) as registry:
        assert await reason_of(registry.announce(world.run, REAL, lease_s=9)) == "TICKET_MISSING"
    assert await world.instances() == before


@pytest.mark.parametrize("announced", sorted(ROLE_SCOPES))
@pytest.mark.parametrize("held", sorted(ROLE_SCOPES))
async def test_a_ticket_announces_its_own_role_and_name_alone(
    world: World, held: str, announced: str
) -> None:
    before = await world.instances()
    mine = ServiceInstance(role=announced, name="mine", address=ROGUE)
    may_ask = "rollout" in ROLE_SCOPES[held]
    async with world.registry(world.ticket(held, "mine")) as registry:
        reason = await reason_of(registry.announce(world.run, mine, lease_s=9))
        if held == announced and may_ask:
            assert reason == ""
            assert await registry.withdraw(
                world.run, next(m for m in await world.instances() if m.name == "mine")
            )
        else:
            assert reason == ("TICKET_OF_OTHER_MEMBER" if may_ask else "SCOPE_MISSING")
        other = await reason_of(registry.announce(world.run, REAL, lease_s=9))
        assert other == ("TICKET_OF_OTHER_MEMBER" if may_ask else "SCOPE_MISSING")
    assert await world.instances() == before


async def test_a_ticket_without_a_name_speaks_for_any_of_its_role(world: World) -> None:
    async with world.registry(world.ticket("collector")) as registry:
        for name in ("a", "b"):
            await registry.announce(
                world.run, ServiceInstance(role="collector", name=name), lease_s=9
            )
        with pytest.raises(PermissionDenied, match="collector/\\*, and speaks for inference/gpu-0"):
            await registry.announce(world.run, REAL, lease_s=9)


async def test_a_instance_keeps_the_addresses_with_which_it_got_its_epoch(world: World) -> None:
    (real,) = before = await world.instances()
    async with world.registry(world.ticket("inference", "gpu-0")) as registry:
        for moved in (replace(real, address=ROGUE), replace(real, rest_address=ROGUE)):
            with pytest.raises(PreconditionFailed) as refused:
                await registry.announce(world.run, moved, lease_s=60)
            assert refused.value.reason == "MEMBER_MOVED"
        assert await world.instances() == before
        again = await registry.announce(
            world.run, replace(real, address=ROGUE, epoch=0), lease_s=60
        )
    assert (again.epoch > real.epoch, again.is_admitted) == (True, False), "it proves itself anew"


async def test_a_instance_asks_about_its_own_run_alone(world: World) -> None:
    other = new_run()
    async with world.registry(world.ticket("inference", "gpu-0", run=other)) as registry:
        assert await registry.list_instances(other) == ()
        for call in (
            registry.list_instances(world.run),
            registry.announce(world.run, REAL, lease_s=9),
            anext(registry.watch(world.run)),
        ):
            assert await reason_of(call) == "TICKET_OF_OTHER_RUN"
