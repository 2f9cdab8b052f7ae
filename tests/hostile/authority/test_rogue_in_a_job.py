"""A rogue beside a real job: it names every address it can, and notes who calls it with what."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.errors import error_of
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import DialoopError
from dialoop.wire.scopes import SCOPES
from dialoop_services.runtime.access.principals import digest_of
from dialoop_services.runtime.access.tickets import Authority, Proofs

from tests.support.samples.scoped_services import descriptors
from tests.support.stack_jobs import Job, assert_accounted, write_config

OWN, ADMIN = "the-own-token-of-the-job", "the-admin-token-of-the-job"
ROLES = ("inference", "collector", "environment", "trainer", "scorer", "replay")
TRIES_S = 8.0
PATIENCE_S = 240.0
ONCE = RetryPolicy(max_attempts=1)
REFUSALS = {"TICKET_FOR_OTHER_SERVICE", "OTHER_INCARNATION"}
SERVED = {
    "environment": ("EnvironmentService",),
    "inference": ("InferenceService", "TemplateService"),
    "replay": ("ReplayService", "RegistryService"),
    "scorer": ("ScorerService",),
    "trainer": ("TrainerService",),
}


@dataclass
class Listener:
    """A foreign service: it answers nothing, and notes each authorization that reaches it."""

    address: str = ""
    heard: set[tuple[str, str]] = field(default_factory=set)


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()

    class Everything(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            metadata = dict(call.invocation_metadata)
            listener.heard.add((call.method, metadata.get("authorization", "")))

            async def refuse(request: Any, context: Any) -> Any:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "later")

            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Everything(),))
    listener.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield listener
    finally:
        await server.stop(0)


def write_tokens(path: Path) -> Path:
    tables = [
        f"[tokens.t{number}]\nscopes = {json.dumps([scope])}\n"
        f'sha256 = "{hashlib.sha256(f"only-{scope}".encode()).hexdigest()}"'
        for number, scope in enumerate(SCOPES)
    ]
    path.write_text("\n".join(tables))
    return path


async def attack(replay: str, run: str, listener: Listener, token: Any) -> set[str]:
    """Announce every role, move, replace and end every member; return with what it was answered."""
    answers: set[str] = set()

    async def attempt(call: Any) -> None:
        try:
            await call
            answers.add("OK")
        except DialoopError as error:
            answers.add(str(error.reason))

    async with Channel(replay, token=token, retry=ONCE) as channel:
        registry = RegistryClient(channel)
        async with Channel(replay, token=OWN, retry=ONCE) as owners:
            members = await RegistryClient(owners).list_instances(run)
        mine = {"address": listener.address, "rest_address": listener.address, "is_ready": True}
        for role in ROLES:
            await attempt(
                registry.announce(run, ServiceInstance(role=role, name="rogue", **mine), lease_s=9)
            )
        for member in members:
            for epoch in (member.epoch, 0):
                moved = replace(member, **mine, epoch=epoch)
                await attempt(registry.announce(run, moved, lease_s=9))
            await attempt(registry.withdraw(run, member))
    return answers


async def replayed_anywhere(
    addresses: Mapping[str, str], authorizations: Iterable[str]
) -> list[str]:
    """What the authorizations that a listener heard open at real services, by method."""
    opened = []
    for name, address in addresses.items():
        rpcs = [r for s in descriptors() if s.name in SERVED.get(name, ()) for r in s.methods]
        async with grpc.aio.insecure_channel(address) as channel:
            for authorization in authorizations:
                for rpc in (rpc for rpc in rpcs if not rpc.client_streaming):
                    answer = await answer_of(channel, rpc, authorization)
                    if answer not in REFUSALS:
                        opened.append(f"{rpc.name} at {address}: {answer}")
    return opened


async def answer_of(channel: grpc.aio.Channel, rpc: Any, authorization: str) -> str:
    """The reason for which a call is refused, or the name of its status."""
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"
    call = channel.unary_stream(path)(b"", metadata=[("authorization", authorization)])
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return str(error_of(error, address="").reason)
    return str((await call.code()).name)


def tokens_in(job: Job) -> list[str]:
    """Processes of the job, but for the stack itself, that have a token of the job."""
    holders = []
    for pid, command in job.left_running().items():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            if OWN.encode() in variables or ADMIN.encode() in variables:
                holders.append(command)
    return holders


def stack_of(job: Job) -> dict[str, Any]:
    path = job.run_dir / "stack.json"
    with contextlib.suppress(OSError, ValueError):
        stack: dict[str, Any] = json.loads(path.read_text())
        if stack["addresses"]:
            return stack
    return {}


@pytest.mark.heavy(reason="two whole jobs beside a rogue, two minutes")
@pytest.mark.timeout(600)
@pytest.mark.redis
@pytest.mark.parametrize(("discovery", "store"), [("registry", "redis"), ("addresses", "memory")])
async def test_no_foreign_listener_hears_more_than_it_may(
    tmp_path: Path, discovery: str, store: str
) -> None:
    config = write_config(tmp_path, num_warm_start_steps=10, num_train_steps=4, store=store)
    config.write_text(f'discovery = "{discovery}"\n{config.read_text()}')
    variables = {
        "DIALOOP_TOKEN": OWN,
        "DIALOOP_ADMIN_TOKEN": ADMIN,
        "DIALOOP_TOKEN_FILE": str(write_tokens(tmp_path / "tokens.toml")),
    }
    with Job(tmp_path, "train", str(config), **variables) as job:
        async with asyncio.timeout(PATIENCE_S), listening() as outsider, listening() as insider:
            while not (stack := stack_of(job)):
                assert job.process.poll() is None, job.output
                await asyncio.sleep(0.1)
            assert tokens_in(job) == []
            run, addresses = stack["run_id"], stack["addresses"]
            replay = addresses["replay"]
            began = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < began + TRIES_S:
                for scope in SCOPES:
                    answers = await attack(replay, run, outsider, f"only-{scope}")
                    assert answers <= {"TICKET_MISSING", "SCOPE_MISSING"}, (scope, answers)
                await join(replay, run, insider)
                await asyncio.sleep(0.5)
            assert outsider.heard == set()
            heard = {authorization for _, authorization in insider.heard}
            assert OWN not in repr(heard)
            assert ADMIN not in repr(heard)
            assert digest_of(OWN) not in repr(heard)
            # The trainer looks at a member with a ticket before it trusts it; what it sends is for
            # that member.
            assert bool(heard) == (discovery == "registry")
            assert await replayed_anywhere(addresses, heard) == []
        ended = job.end(PATIENCE_S)
    assert ended.exit_code == 0, ended.output[-4000:]
    assert_accounted(ended.summary)
    assert os.environ.get("DIALOOP_TOKEN") != OWN


async def join(replay: str, run: str, listener: Listener) -> None:
    """Join with a ticket that an admin signed, and be of no use."""
    authority = Authority.of(OWN, ADMIN)
    assert authority is not None
    proofs = Proofs(authority.issue(run=run, role="inference", name="insider"))
    async with Channel(replay, token=lambda: proofs.to("replay"), retry=ONCE) as channel:
        me = ServiceInstance(role="inference", name="insider", address=listener.address)
        await RegistryClient(channel).announce(run, replace(me, is_ready=True), lease_s=9)
