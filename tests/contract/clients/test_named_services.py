"""Services that the environment's variables name, as those of containers on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest
from dialoop import running_stacks
from dialoop.clients.blocking.connection import BlockingDialoop
from dialoop.clients.connection import Dialoop
from dialoop.errors import Unauthenticated
from dialoop.running_stacks import PORTS, SERVICES_VARIABLE
from dialoop_ops.cli.env import list_environments
from dialoop_ops.cli.status import status, watch
from dialoop_ops.stack.layout import FIXED_PORTS, rest_name

from tests.support.rest_world import service


def test_the_ports_are_those_of_containers() -> None:
    assert dict(PORTS) == {name: FIXED_PORTS[name] for name in PORTS}
    assert {name: port + 1000 for name, port in PORTS.items()} == {
        name: FIXED_PORTS[rest_name(name)] for name in PORTS
    }


async def test_the_sdk_and_the_commands_take_token_and_addresses_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with service("environment", token="of-the-environment") as server:
        monkeypatch.setenv(SERVICES_VARIABLE, "127.0.0.1")
        ports = dict(PORTS) | {"environment": int(server.address.rpartition(":")[2]), "trainer": 1}
        monkeypatch.setattr(running_stacks, "PORTS", ports)
        async with Dialoop() as dialoop:
            with pytest.raises(Unauthenticated):
                await dialoop.environment.list_environments()
        monkeypatch.setenv("DIALOOP_TOKEN", "of-the-environment")
        for made in (Dialoop(), Dialoop.of_run(tmp_path / "runs" / "any")):
            async with made as dialoop:
                names = {each.name for each in await dialoop.environment.list_environments()}
                assert "arithmetic" in names

        def ask() -> set[str]:
            with BlockingDialoop() as blocking:
                return {each.name for each in blocking.environment.list_environments()}

        assert await asyncio.to_thread(ask) == names
        words = {"root": tmp_path, "run": "any", "address": "", "json": True}
        listed = argparse.Namespace(**words)
        assert await asyncio.to_thread(list_environments, listed) == 0
        assert "arithmetic" in capsys.readouterr().out
        # The others do not answer, which is what it says.
        assert await asyncio.to_thread(status, argparse.Namespace(**words)) == 1
        looked = json.loads(capsys.readouterr().out)
        health = {each["name"]: each["health"] for each in looked["services"]}
        assert health.keys() == PORTS.keys()
        assert (health["environment"], health["trainer"]) == ("serving", "does not answer")
        plain = argparse.Namespace(**words | {"json": False})
        assert await asyncio.to_thread(status, plain) == 1
        assert capsys.readouterr().out.startswith("services at 127.0.0.1\n")


def test_a_watched_stack_that_a_variable_names_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SERVICES_VARIABLE, "127.0.0.1")
    monkeypatch.setattr(running_stacks, "PORTS", dict.fromkeys(PORTS, 1))
    sleep, waits = asyncio.sleep, []

    async def pause(seconds: float) -> None:
        if seconds == 1.0:
            waits.append(seconds)
            if len(waits) == 2:
                raise KeyboardInterrupt
        await sleep(0 if seconds == 1.0 else seconds)

    monkeypatch.setattr("dialoop_ops.cli.status.asyncio.sleep", pause)
    words = argparse.Namespace(root=tmp_path, run="", json=True)
    assert watch(words) == 0
    assert capsys.readouterr().out.count("\n") == 2
