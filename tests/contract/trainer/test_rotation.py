"""Replicas that join, fail and are replaced while a real learner publishes to them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.registry import RegistryClient, ServiceMember
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import DeadlineExceeded
from dialoop.sequences import PolicyVersion
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server
from dialoop_services.learning.model.tiny import make_tiny_model
from dialoop_services.replay.memory_store.store import MemoryStore
from dialoop_services.replay.registry_servicer import RegistryServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime import GrpcServer, ServerSettings
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.publish import publisher as publisher_module
from dialoop_services.trainer.publish.publisher import Publisher
from dialoop_services.trainer.publish.rotation import Rotation
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.inference_world import World, make_endless_model, world
from tests.support.waiting import until

RUN = "rotation"
IDS = [[1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("rotation") / "model", seed=0)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(publisher_module, "_RETRY_S", 0.02)


class FakeReplay:
    async def advance_policy(self, run: str, version: PolicyVersion, **_: Any) -> int:
        return 0


def connect(address: str, *, retry: RetryPolicy | None = None, epoch: int = 0) -> Channel:
    return Channel(address, retry=RetryPolicy(max_attempts=1), epoch=epoch)


class Fleet:
    """A trainer that follows a registry, and replicas that a test puts into it."""

    def __init__(self, publisher: Publisher, registry: RegistryClient, learner: Learner) -> None:
        self.publisher, self.registry, self.learner = publisher, registry, learner

    async def join(self, name: str, w: World) -> ServiceMember:
        """Announce a replica, as its process does."""
        member = ServiceMember(role="inference", name=name, address=w.server.address)
        joined = await self.registry.announce(RUN, member, lease_s=600)
        w.server.incarnation.epoch = joined.epoch
        return joined

    async def names_admitted(self) -> set[str]:
        members = await self.registry.list_members(RUN, "inference")
        return {member.name for member in members if member.is_admitted}

    async def until_admitted(self, *names: str) -> None:
        while await self.names_admitted() != set(names):
            await asyncio.sleep(0.01)

    async def publish(self, number: int) -> int:
        """Change the weights and publish them; return how many replicas have them."""
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.learner.state.policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        version = PolicyVersion(lineage="main", number=number)
        return (await self.publisher.publish(version)).num_replicas

    async def serves_like_the_learner(self, w: World) -> bool:
        scored = await w.client.logprobs(IDS)
        return bool(np.abs(scored.logprobs[0] - self.learner.logprobs(IDS)[0]).max() < 1e-5)


@asynccontextmanager
async def trainer(model_dir: Path, folder: Path, **settings: Any) -> AsyncIterator[Fleet]:
    servicer = RegistryServicer(MemoryStore(QueueLimits()))
    server = GrpcServer(ServerSettings(drain_s=1))
    server.add(add_RegistryServiceServicer_to_server, servicer, "dialoop.v1.RegistryService")
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(server)
        exits.callback(servicer.stop_waiting)
        channel = await exits.enter_async_context(Channel(server.address))
        chosen = TrainerSettings(
            model_dir=model_dir,
            run_dir=folder / "run",
            run=RUN,
            replay_address=server.address,
            discovery="registry",
            data_plane="chunks",
            **settings,
        )
        learner = Learner(chosen)
        rotation = Rotation(chosen, connect)
        exits.push_async_callback(rotation.close)
        digest = Tokenizer.from_directory(model_dir).digest
        publisher = Publisher(
            chosen,
            learner,
            (),
            cast("Any", FakeReplay()),
            rotation=rotation,
            tokenizer_digest=digest,
        )
        tasks = [
            asyncio.create_task(publisher.keep_up()),
            asyncio.create_task(rotation.follow(publisher.take_replicas)),
        ]
        try:
            yield Fleet(publisher, RegistryClient(channel), learner)
            for task in tasks:
                assert not task.done()
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


@pytest.mark.timeout(120)
async def test_a_replica_that_joins_gets_the_newest_policy_before_it_serves(
    model_dir: Path, tmp_path: Path
) -> None:
    async with (
        trainer(model_dir, tmp_path) as fleet,
        world(model_dir, tmp_path / "a", reads_root=False) as first,
        world(model_dir, tmp_path / "b", reads_root=False) as second,
    ):
        await fleet.join("first", first)
        assert await fleet.publish(1) == 1  # a publish waits for the first replica
        await fleet.until_admitted("first")
        await fleet.join("second", second)
        await fleet.until_admitted("first", "second")
        assert await fleet.serves_like_the_learner(second)
        number = 2
        while await fleet.publish(number) < 2:  # until the trainer has heard of what it admitted
            number += 1
        assert await fleet.serves_like_the_learner(first)


@pytest.mark.timeout(120)
async def test_a_replica_whose_answers_differ_is_not_admitted_until_they_hold(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        trainer(model_dir, tmp_path) as fleet,
        world(model_dir, tmp_path / "a", reads_root=False) as sound,
        world(model_dir, tmp_path / "b", reads_root=False) as wrong,
    ):
        await fleet.join("sound", sound)
        assert await fleet.publish(1) == 1
        engine, num_probes = wrong.replica.engine, 0
        right = type(engine).logprobs

        async def off_by_a_tenth(token_ids: Any) -> Any:
            nonlocal num_probes
            num_probes += 1
            scored = await right(engine, token_ids)
            return replace(scored, logprobs=scored.logprobs - 0.1)

        monkeypatch.setattr(engine, "logprobs", off_by_a_tenth)
        await fleet.join("wrong", wrong)
        await until(lambda: num_probes >= 3)
        assert await fleet.names_admitted() == {"sound"}
        assert await fleet.publish(2) == 1  # and no publish waits for it
        monkeypatch.undo()
        await fleet.until_admitted("sound", "wrong")


def other_tokenizer(model_dir: Path, directory: Path) -> Path:
    """The same weights with a tokenizer that joins one pair of letters less."""
    shutil.copytree(model_dir, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"].pop()
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_tokenizer, "another tokenizer than the job's model"),
        (lambda _, directory: make_endless_model(directory, max_model_len=512), "parameter"),
    ],
    ids=["tokenizer", "model"],
)
async def test_a_replica_of_another_model_is_never_admitted_and_ends_nothing(
    model_dir: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], Path],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = make(model_dir, tmp_path / "other")
    async with (
        trainer(model_dir, tmp_path, publish_deadline_s=20.0) as fleet,
        world(model_dir, tmp_path / "a", reads_root=False) as sound,
        world(other, tmp_path / "b", reads_root=False) as wrong,
    ):
        await fleet.join("wrong", wrong)
        publishing = asyncio.create_task(fleet.publish(1))  # it is the only one yet
        await until(lambda: "The replica wrong gets no requests" in caplog.text)
        await fleet.join("sound", sound)
        assert await publishing == 1
        await fleet.until_admitted("sound")
        assert await fleet.publish(2) == 1
        assert caplog.text.count("The replica wrong gets no requests") == 1
        assert words in caplog.text
        assert await fleet.names_admitted() == {"sound"}


@pytest.mark.timeout(120)
async def test_no_publish_waits_for_a_replica_that_was_replaced_or_left(
    model_dir: Path, tmp_path: Path
) -> None:
    async with (
        trainer(model_dir, tmp_path, publish_deadline_s=5.0) as fleet,
        world(model_dir, tmp_path / "a", reads_root=False) as orphan,
        world(model_dir, tmp_path / "b", reads_root=False) as later,
    ):
        await fleet.join("gpu-0", orphan)
        assert await fleet.publish(1) == 1
        await fleet.until_admitted("gpu-0")
        replacement = await fleet.join("gpu-0", later)
        await fleet.until_admitted("gpu-0")  # admitted anew, since it is another epoch
        assert await fleet.publish(2) == 1
        assert await fleet.serves_like_the_learner(later)
        assert not await fleet.serves_like_the_learner(orphan)
        await fleet.registry.withdraw(RUN, replacement)
        number = 3
        with pytest.raises(DeadlineExceeded):  # noqa: PT012 - once it has heard that nobody is left
            while True:
                await fleet.publish(number)
                number += 1
