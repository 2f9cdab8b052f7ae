"""A service without dialoop-extras says what is missing, and ignores nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dialoop import extras
from dialoop.agents import load_agent
from dialoop.clients.channel import Channel
from dialoop.environments import arithmetic, load_environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import InvalidConfig, Unsupported
from dialoop_extras.services.runs_client import RunsClient
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings

from tests.support.rest_world import http_of


@pytest.fixture(autouse=True)
def no_extras(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        extras.offered.cache_clear()
        extras.offered_paths.cache_clear()

    monkeypatch.setattr(extras, "entry_points", lambda **_: ())
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    "settings",
    [{"openenv": True}, {"text_environments": "my.module:setup"}],
    ids=["openenv", "texts"],
)
async def test_what_extras_serve_is_refused_at_the_start(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="dialoop-extras") as caught:
        async with serving(EnvironmentSettings(**settings), Catalogue([arithmetic()])):
            pass
    assert caught.value.reason == "PACKAGE_MISSING"


@pytest.mark.parametrize("load", [load_environment, load_agent])
def test_a_name_that_extras_know_is_told_with_the_package(load) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load("verifiers")
    assert "pip install dialoop-extras" in caught.value.remedy


async def test_a_run_is_refused_with_the_package() -> None:
    settings = EnvironmentSettings(drain_s=1)
    async with (
        serving(settings, Catalogue([arithmetic()])) as server,
        Channel(server.address) as channel,
    ):
        with pytest.raises(Unsupported, match=r"RunService\.RunText") as caught:
            await RunsClient(channel).run_text("calculator", ["1+2"])
    assert caught.value.reason == "NOT_SERVED"
    assert "dialoop-extras" in caught.value.remedy


async def test_a_query_that_nobody_reads_is_refused() -> None:
    settings = EnvironmentSettings(drain_s=1, rest_port=0)
    async with serving(settings, Catalogue([arithmetic()])) as server, http_of(server) as http:
        body = {"session_id": "s", "environment": "arithmetic"}
        answer = await http.post("/v1/sessions?pad_output=true", json=body)
        assert (answer.status_code, answer.json()["reason"]) == (400, "UNKNOWN_FIELD")
        assert "dialoop-extras" in answer.json()["remedy"]
        assert (await http.post("/v1/sessions", json=body)).status_code == 200


def test_two_packages_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "offered", lambda name: ({"a": "x:y"}, {"a": "z:y"}))
    with pytest.raises(InvalidConfig, match="Two installed packages offer 'a'"):
        extras.offered_paths("environments")
