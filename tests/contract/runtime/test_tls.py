"""TLS and mutual TLS of both doors, with certificates that openssl makes."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from dataclasses import dataclass

import httpx
import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.tls import Tls
from dialoop.errors import InvalidConfig, Unavailable
from dialoop_ops.stack.processes.readiness import answers, is_serving
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load
from dialoop_services.runtime.probe import status_of

from tests.support.rest_world import service
from tests.support.samples.certificates import Pair, make_authority, make_certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@dataclass(frozen=True)
class World:
    authority: Pair
    server: Pair
    client: Pair
    stranger: Pair
    """Signed by another authority."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = make_authority(folder), make_authority(folder, "other")
    return World(
        authority=authority,
        server=make_certificate(folder, authority, "server"),
        client=make_certificate(folder, authority, "client"),
        stranger=make_certificate(folder, other, "stranger"),
    )


def trust(monkeypatch: pytest.MonkeyPatch, authority: Pair, own: Pair | None = None) -> None:
    """Set what clients of this process read."""
    variables = {"DIALOOP_TLS_CA": authority.certificate}
    if own is not None:
        variables |= {"DIALOOP_TLS_CERTIFICATE": own.certificate, "DIALOOP_TLS_KEY": own.key}
    for name, path in variables.items():
        monkeypatch.setenv(name, str(path))


async def names_at(address: str) -> list[str]:
    """The environments that a new client is told of."""
    async with Channel(address, retry=RetryPolicy(max_attempts=1)) as channel:
        await channel.wait_until_connected(timeout_s=3.0)
        return [each.name for each in await EnvironmentClient(channel).list_environments()]


async def test_both_doors_speak_tls_and_nothing_else(world, monkeypatch):
    files = {"tls_certificate": world.server.certificate, "tls_key": world.server.key}
    async with service("environment", **files) as server:
        with pytest.raises(Unavailable):
            await names_at(server.address)
        with pytest.raises(httpx.HTTPError):
            await httpx.AsyncClient().get(f"http://{server.rest_address}/healthz", timeout=3)
        trust(monkeypatch, world.authority)
        assert "arithmetic" in await names_at(server.address)
        assert await is_serving(server.address)
        assert await answers(server.address, 5.0)
        monkeypatch.setenv("DIALOOP_TLS_CERTIFICATE", str(world.server.certificate))
        monkeypatch.setenv("DIALOOP_TLS_KEY", str(world.server.key))
        assert await asyncio.to_thread(status_of, server.rest_address) == "SERVING"
        context = ssl.create_default_context(cafile=str(world.authority.certificate))
        async with httpx.AsyncClient(verify=context) as http:
            listed = await http.get(f"https://{server.rest_address}/v1/environments")
        assert listed.status_code == 200


async def test_a_server_of_another_authority_is_not_trusted(world, monkeypatch):
    files = {"tls_certificate": world.stranger.certificate, "tls_key": world.stranger.key}
    async with service("environment", **files) as server:
        trust(monkeypatch, world.authority)
        with pytest.raises(Unavailable):
            await names_at(server.address)


async def test_mutual_tls_lets_in_only_those_with_a_certificate(world, monkeypatch):
    files = {
        "tls_certificate": world.server.certificate,
        "tls_key": world.server.key,
        "tls_ca": world.authority.certificate,
        "tls_mutual": True,
    }
    async with service("environment", **files) as server:
        trust(monkeypatch, world.authority)
        with pytest.raises(Unavailable):
            await names_at(server.address)
        trust(monkeypatch, world.authority, world.stranger)
        with pytest.raises(Unavailable):
            await names_at(server.address)
        trust(monkeypatch, world.authority, world.client)
        assert "arithmetic" in await names_at(server.address)
        for own, is_allowed in ((None, False), (world.client, True)):
            context = ssl.create_default_context(cafile=str(world.authority.certificate))
            if own is not None:
                context.load_cert_chain(own.certificate, own.key)
            async with httpx.AsyncClient(verify=context) as http:
                url = f"https://{server.rest_address}/v1/environments"
                if is_allowed:
                    assert (await http.get(url)).status_code == 200
                else:
                    with pytest.raises(httpx.HTTPError):
                        await http.get(url, timeout=3)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tls_certificate": "server.certificate"}, "one of them is missing"),
        ({"tls_certificate": "server.certificate", "tls_key": "client.key"}, "no certificate and"),
        ({"tls_certificate": "server.key", "tls_key": "server.key"}, "no certificate and"),
        ({"tls_certificate": "missing", "tls_key": "server.key"}, "cannot be read"),
        ({"tls_certificate": "text", "tls_key": "server.key"}, "no PEM file"),
        ({"tls_mutual": True}, "Mutual TLS needs"),
    ],
)
def test_files_that_cannot_be_used_are_named_at_the_start(world, tmp_path, files, why):
    def path_of(name: object) -> object:
        if name == "missing":
            return tmp_path / "missing.pem"
        if name == "text":
            (tmp_path / "text.pem").write_text("no certificate")
            return tmp_path / "text.pem"
        owner, _, part = str(name).partition(".")
        return getattr(getattr(world, owner), part) if part else name

    with pytest.raises(InvalidConfig, match=why) as caught:
        GrpcServer(load(ServerSettings, **{key: path_of(name) for key, name in files.items()}))
    assert caught.value.reason == "TLS_FILE"


def test_a_client_names_files_that_it_cannot_use(tmp_path):
    tls = Tls.from_environment({"DIALOOP_TLS_CA": str(tmp_path / "none.pem")})
    with pytest.raises(InvalidConfig, match=r"none\.pem cannot be read"):
        tls.channel_credentials()


def test_beyond_loopback_without_tls_there_is_a_warning(caplog):
    GrpcServer(load(ServerSettings, host="0.0.0.0", token="t"))
    assert "without TLS" in caplog.text
    caplog.clear()
    GrpcServer(load(ServerSettings, host="127.0.0.1", token="t"))
    assert not caplog.records
