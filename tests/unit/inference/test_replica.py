"""A replica catches up by itself with a policy it missed or could not take."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from dialoop.clients.weights import WeightsManifest
from dialoop.episode import UpdateMode
from dialoop.errors import InternalError
from dialoop.sequences import PolicyVersion
from dialoop_services.inference.engine import Engine, LoadTimes
from dialoop_services.inference.replica.replica import Replica

from tests.support.waiting import until


class FakeEngine:
    """Fails its next `num_failures` loads."""

    is_alive = True

    def __init__(self) -> None:
        self.policy_version = PolicyVersion(lineage="base", number=0)
        self.num_failures = 0
        self.num_loads = 0
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load_weights(
        self, path: Path, version: PolicyVersion, *, mode: UpdateMode = UpdateMode.RECOMPUTE
    ) -> LoadTimes:
        self.num_loads += 1
        await self.may_load.wait()
        if self.num_failures:
            self.num_failures -= 1
            raise InternalError("out of memory")
        self.policy_version = version
        return LoadTimes(pause_s=0.0, load_s=0.0)


def version(number: int, lineage: str = "main") -> PolicyVersion:
    return PolicyVersion(lineage=lineage, number=number)


def publish(root: Path, policy: PolicyVersion) -> WeightsManifest:
    """Write a policy and name it in latest.json, as a trainer does."""
    path = root / f"{policy}.safetensors"
    path.write_bytes(str(policy).encode())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    named = {"lineage": policy.lineage, "number": policy.number, "path": path.name}
    draft = root / "draft"
    draft.write_text(json.dumps({**named, "sha256": digest, "num_bytes": size}), "utf-8")
    draft.replace(root / "latest.json")
    return WeightsManifest(policy_version=policy, sha256=digest, num_bytes=size, path=path.name)


@asynccontextmanager
async def following(root: Path) -> AsyncIterator[tuple[Replica, FakeEngine, list[bool]]]:
    engine, reports = FakeEngine(), list[bool]()

    async def report(serving: bool) -> None:
        reports.append(serving)

    replica = Replica(cast("Engine", engine), weights_root=root, report=report)
    await replica.load_latest()
    task = asyncio.create_task(replica.follow_latest(look_every_s=0.01))
    try:
        yield replica, engine, reports
    finally:
        task.cancel()
        await asyncio.wait([task])


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def test_a_publish_that_never_arrived_is_loaded_from_what_the_trainer_left(
    tmp_path: Path,
) -> None:
    publish(tmp_path, version(1))
    async with following(tmp_path) as (replica, engine, reports):
        assert engine.policy_version == version(1)
        publish(tmp_path, version(2))
        await until(lambda: engine.policy_version == version(2))
        publish(tmp_path, version(1, "main.1"))
        await until(lambda: engine.policy_version == version(1, "main.1"))
        assert reports == [True, True, True]
        assert not replica.fault


async def test_a_failed_load_is_tried_again_until_it_succeeds(tmp_path: Path) -> None:
    publish(tmp_path, version(1))
    async with following(tmp_path) as (replica, engine, reports):
        engine.num_failures = 3
        publish(tmp_path, version(2))
        await until(lambda: replica.fault == "WEIGHTS_BAD")
        await until(lambda: not replica.fault)
        assert engine.policy_version == version(2)
        assert reports == [True, False, False, False, True]


async def test_what_was_pushed_is_not_loaded_a_second_time(tmp_path: Path) -> None:
    async with following(tmp_path) as (replica, engine, _):
        await replica.load(publish(tmp_path, version(1)), nothing())
        await asyncio.sleep(0.1)
        assert engine.num_loads == 1


@pytest.mark.parametrize("look", ["follow_latest", "load_latest"])
async def test_a_policy_that_arrives_while_it_is_looked_up_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, look: str
) -> None:
    async with following(tmp_path) as (replica, engine, reports):
        engine.may_load.clear()
        pushed = asyncio.create_task(replica.load(publish(tmp_path, version(1)), nothing()))
        await until(lambda: engine.num_loads == 1)
        if look == "load_latest":
            looked = asyncio.create_task(replica.load_latest())
        await asyncio.sleep(0.1)  # latest.json is read, and that load waits for the push
        engine.may_load.set()
        await pushed
        if look == "load_latest":
            await looked
        await asyncio.sleep(0.1)
        assert (engine.num_loads, engine.policy_version, replica.fault) == (1, version(1), "")
        assert False not in reports
    assert not [r.message for r in caplog.records if "does not load" in r.message]


async def test_a_policy_that_somebody_pushed_stays_until_the_trainer_publishes_again(
    tmp_path: Path,
) -> None:
    publish(tmp_path, version(1))
    async with following(tmp_path) as (replica, engine, _):
        (tmp_path / "theirs.safetensors").write_bytes(b"x")
        theirs = WeightsManifest(
            policy_version=version(7, "theirs"),
            sha256=hashlib.sha256(b"x").hexdigest(),
            num_bytes=1,
            path="theirs.safetensors",
        )
        await replica.load(theirs, nothing())
        await asyncio.sleep(0.1)
        assert engine.policy_version == version(7, "theirs")
        publish(tmp_path, version(2))
        await until(lambda: engine.policy_version == version(2))
