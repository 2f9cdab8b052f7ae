"""Who may call what: a token for each scope against every rpc and route of the protos."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import grpc
import httpx
import pytest
from dialoop.errors import InvalidConfig
from dialoop.wire.scopes import SCOPES
from dialoop_ops.cli.main import main
from dialoop_services.hosting import GrpcServer
from dialoop_services.rest.routes import Route, routes_of
from dialoop_services.runtime import ServerSettings, load
from dialoop_services.runtime.access.token_file import TokenFile
from google.protobuf import descriptor_pool
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.support.rest_world import service
from tests.support.samples.scoped_services import (
    ADMIN,
    OWN,
    PROTOS,
    descriptors,
    grpc_status,
    scope_in_proto,
    serve,
    write_tokens,
)


def test_every_rpc_has_exactly_one_scope():
    rpcs = [rpc for service in descriptors() for rpc in service.methods]
    assert len(rpcs) > 60
    assert [rpc.full_name for rpc in rpcs if not scope_in_proto(rpc)] == []
    assert {scope_in_proto(rpc) for rpc in rpcs} == set(SCOPES)


async def test_a_token_opens_the_rpcs_of_its_scopes_and_no_others(tmp_path):
    path = write_tokens(tmp_path / "tokens.toml", {f"only-{name}": [name] for name in SCOPES})
    async with (
        serve(path, descriptors()) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for rpc in (rpc for service in descriptors() for rpc in service.methods):
            needed = scope_in_proto(rpc)
            for name in SCOPES:
                status = await grpc_status(channel, rpc, f"only-{name}")
                wanted = "UNIMPLEMENTED" if name == needed else "PERMISSION_DENIED"
                assert status == wanted, (rpc.full_name, name)
            assert await grpc_status(channel, rpc, OWN) == "UNIMPLEMENTED", rpc.full_name
            assert await grpc_status(channel, rpc, "stranger") == "UNAUTHENTICATED", rpc.full_name


async def test_a_token_opens_the_routes_of_its_scopes_and_no_others(tmp_path):
    path = write_tokens(tmp_path / "tokens.toml", {f"only-{name}": [name] for name in SCOPES})
    for described in descriptors():
        async with (
            serve(path, [described], rest_port=0) as server,
            httpx.AsyncClient(base_url=f"http://{server.rest_address}") as http,
        ):
            for route in routes_of(described):
                await check_route(http, route)


async def check_route(http: httpx.AsyncClient, route: Route) -> None:
    url = "/".join("x" if part.startswith("{") else part for part in route.path.split("/"))
    needed = scope_in_proto(route.rpc)
    for name in [*SCOPES, OWN, "stranger"]:
        token = f"only-{name}" if name in SCOPES else name
        headers = {"authorization": f"Bearer {token}"}
        answer = await http.request(route.method, url, json={}, headers=headers)
        reason = answer.json().get("reason", "")
        if name == "stranger":
            assert answer.status_code == 401, (url, name)
        elif name in (OWN, needed):
            assert answer.status_code not in (401, 403), (url, name, answer.text)
        else:
            assert (answer.status_code, reason) == (403, "SCOPE_MISSING"), (url, name)


async def test_routes_of_other_protocols_have_a_scope_too(tmp_path):
    path = write_tokens(tmp_path / "tokens.toml", {"roll": ["rollout"], "play": ["env"]})
    async with (
        service("inference", token=OWN, token_file=path) as inference,
        service("environment", token=OWN, token_file=path, openenv=True) as environment,
    ):
        for server, url, allowed in (
            (inference, "/v1/models", "roll"),
            (environment, "/openenv/calculator/state", "play"),
        ):
            async with httpx.AsyncClient(base_url=f"http://{server.rest_address}") as http:
                for token in ("roll", "play"):
                    answer = await http.get(url, headers={"authorization": f"Bearer {token}"})
                    assert (answer.status_code != 403) == (token == allowed), (url, answer.text)
                metrics = await http.get("/metrics", headers={"authorization": "Bearer roll"})
                assert metrics.status_code == 200, "any token may read these"
                assert (await http.get("/metrics")).status_code == 401
                for page in ("/healthz", "/readyz", "/docs", "/openapi.json"):
                    assert (await http.get(page)).status_code == 200, page


async def test_a_websocket_needs_the_scope_of_its_route(tmp_path):
    path = write_tokens(tmp_path / "tokens.toml", {"roll": ["rollout"], "play": ["env"]})
    async with service("environment", token=OWN, token_file=path, openenv=True) as server:
        url = f"ws://{server.rest_address}/openenv/calculator/ws"
        async with connect(url, additional_headers={"authorization": "Bearer play"}):
            pass
        for token in ("roll", "stranger"):
            with pytest.raises(InvalidStatus, match="403"):
                await connect(url, additional_headers={"authorization": f"Bearer {token}"})


async def test_a_token_is_replaced_while_the_service_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("dialoop_services.runtime.access.token_file._LOOK_EVERY_S", 0.0)
    path = write_tokens(tmp_path / "tokens.toml", {"old": ["env"]})
    (rpc,) = [r for s in descriptors() for r in s.methods if r.name == "ListEnvironments"]
    async with (
        serve(path, descriptors()) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):

        async def statuses() -> list[str]:
            return [await grpc_status(channel, rpc, token) for token in ("old", "new")]

        assert await statuses() == ["UNIMPLEMENTED", "UNAUTHENTICATED"]
        write_tokens(path, {"old": ["env"], "new": ["env"]})
        assert await statuses() == ["UNIMPLEMENTED", "UNIMPLEMENTED"]
        write_tokens(path, {"new": ["env"]})
        assert await statuses() == ["UNAUTHENTICATED", "UNIMPLEMENTED"]
        path.write_text("[tokens.half")
        assert await statuses() == ["UNAUTHENTICATED", "UNIMPLEMENTED"], "a broken file"
        path.unlink()
        assert await statuses() == ["UNAUTHENTICATED", "UNIMPLEMENTED"], "no file"
        write_tokens(path, {"new": ["env"]}, expires="2026-01-01")
        assert await statuses() == ["UNAUTHENTICATED", "UNAUTHENTICATED"]


async def test_with_an_admin_token_the_own_token_lacks_the_scope_admin(tmp_path):
    path = write_tokens(tmp_path / "tokens.toml", {"ops": ["admin"]})
    async with (
        serve(path, descriptors(), admin_token=ADMIN) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for rpc in (rpc for service in descriptors() for rpc in service.methods):
            is_admins = scope_in_proto(rpc) == "admin"
            wanted = "PERMISSION_DENIED" if is_admins else "UNIMPLEMENTED"
            assert await grpc_status(channel, rpc, OWN) == wanted, rpc.full_name
            assert await grpc_status(channel, rpc, ADMIN) == "UNIMPLEMENTED", rpc.full_name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tokens", "cannot be used"),
        ('tokens = "a"', "tokens"),
        ('[tokens.a]\nsha256 = "short"\nscopes = ["env"]', "sha256"),
        (f'[tokens.a]\nsha256 = "{"0" * 64}"\nscopes = []', "scopes"),
        (f'[tokens.a]\nsha256 = "{"0" * 64}"\nscopes = ["envy"]', "'envy'; there are env, rollout"),
        (f'[tokens.a]\nsha256 = "{"0" * 64}"\nscopes = ["env"]\nsecret = "x"', "secret"),
        (
            f'[tokens.a]\nsha256 = "{"0" * 64}"\nscopes = ["env"]\n'
            f'[tokens.b]\nsha256 = "{"0" * 64}"\nscopes = ["rollout"]',
            "the same sha256",
        ),
        (None, "No such file"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_named_at_the_start(tmp_path, text, why):
    path = tmp_path / "tokens.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidConfig, match=why) as caught:
        TokenFile(path)
    assert caught.value.reason == "TOKEN_FILE"


def test_beyond_loopback_a_token_file_is_enough(tmp_path):
    path = write_tokens(tmp_path / "tokens.toml", {"old": ["env"]})
    with pytest.raises(InvalidConfig, match="without a token"):
        GrpcServer(load(ServerSettings, host="0.0.0.0"))
    GrpcServer(load(ServerSettings, host="0.0.0.0", token_file=path))


def block_of(mark: str) -> str:
    """A block of the docs, by its mark."""
    page = (Path(__file__).parents[3] / "docs/security.md").read_text()
    block = re.search(rf"<!-- test: {mark} -->\n```\w+\n(.*?)^```", page, re.M | re.S)
    assert block is not None
    return block[1]


def test_the_docs_command_makes_a_token_that_its_table_lets_in(tmp_path, capsys):
    assert main(shlex.split(block_of("token_command"))[1:]) == 0
    printed = capsys.readouterr().out
    secret = printed.splitlines()[1]
    path = tmp_path / "tokens.toml"
    path.write_text(printed[printed.index("[tokens.collector-7]") :])
    tokens = TokenFile(path)
    wanted = {SCOPES["env"], SCOPES["rollout"], SCOPES["queue:append"]}
    assert tokens.scopes_of(secret.encode()) == wanted
    assert tokens.scopes_of(b"another") is None
    assert secret not in path.read_text()
    assert main(["token", "laptop", "--scope", "envy"]) == 2


def test_the_docs_token_file_is_one(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(block_of("token_file"))
    wanted = {SCOPES["env"], SCOPES["rollout"], SCOPES["queue:append"]}
    assert TokenFile(path).scopes_of(b"test") == wanted


def test_all_services_are_looked_at():
    pool = descriptor_pool.Default()
    assert len(PROTOS) == len(descriptors()) == 8
    assert all(pool.FindServiceByName(described.full_name) for described in descriptors())
