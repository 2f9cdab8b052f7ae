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
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import DeadlineExceeded
from dialoop.sequences import PolicyVersion
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.hosting import GrpcServer
from dialoop_services.replay.registry_servicer import RegistryServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime import ServerSettings
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.publish import publisher as publisher_module
from dialoop_services.trainer.publish.publisher import Publisher
from dialoop_services.trainer.publish.rotation import Rotation
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.connections import connection_to, copy, serving_connections
from tests.support.inference_world import World, make_endless_model, world
from tests.support.queue_model.store import ModelStore
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


def connect(
    address: str, to: str | ServiceInstance, *, retry: RetryPolicy | None = None
) -> Channel:
    epoch = 0 if isinstance(to, str) else to.epoch
    return Channel(address, retry=RetryPolicy(max_attempts=1), epoch=epoch)


class Fleet:
    """A trainer that follows a registry, and replicas that a test puts into it."""

    def __init__(self, publisher: Publisher, registry: RegistryClient, learner: Learner) -> None:
        self.publisher, self.registry, self.learner = publisher, registry, learner

    async def join(self, name: str, w: World, *, address: str = "") -> ServiceInstance:
        """Announce a replica, as its process does."""
        address = address or w.server.address
        instance = ServiceInstance(role="inference", name=name, address=address)
        joined = await self.registry.announce(RUN, instance, lease_s=600)
        w.server.incarnation.epoch = joined.epoch
        return joined

    async def names_admitted(self) -> set[str]:
        instances = await self.registry.list_instances(RUN, "inference")
        return {instance.name for instance in instances if instance.is_admitted}

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
    servicer = RegistryServicer(ModelStore(QueueLimits()))
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


class Road:
    """Passes bytes on to a port; once armed it stops, or is cut, in the middle of a transfer.

    It then keeps the connection and passes nothing on until it is opened again.
    """

    def __init__(self, port: int, *, cuts: bool) -> None:
        self._port, self._cuts = port, cuts
        self._left = 0  # bytes that pass before it stops; 0: it does not
        self.open = asyncio.Event()
        self.open.set()
        self.num_stops = 0

    def arm(self, after_bytes: int) -> None:
        self._left = after_bytes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connection_to(self._port) as (upstream, to_upstream):
            answers = asyncio.create_task(copy(upstream, writer))
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    if self._is_reached(len(data)):
                        self.num_stops += 1
                        self.open.clear()
                        if self._cuts:
                            break
                    await self.open.wait()
                    to_upstream.write(data)
                    await to_upstream.drain()
            answers.cancel()

    def _is_reached(self, size: int) -> bool:
        before, self._left = self._left, max(0, self._left - size)
        return before > 0 and self._left == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cuts", [False, True], ids=["stopped", "cut"])
async def test_a_replica_that_stops_in_the_middle_of_a_transfer_leaves_and_catches_up(
    model_dir: Path, tmp_path: Path, *, cuts: bool
) -> None:
    size = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    async with (
        trainer(model_dir, tmp_path, publish_deadline_s=2.0) as fleet,
        world(model_dir, tmp_path / "a", reads_root=False) as sound,
        world(model_dir, tmp_path / "b", reads_root=False) as half,
    ):
        road = Road(int(half.server.address.rpartition(":")[2]), cuts=cuts)
        async with serving_connections(road.serve) as address:
            await fleet.join("sound", sound)
            await fleet.join("half", half, address=address)
            assert await fleet.publish(1) >= 1
            await fleet.until_admitted("sound", "half")
            before = (await half.client.logprobs(IDS)).logprobs[0]
            road.arm(size // 2)
            number = 2
            while not road.num_stops:  # until the trainer has heard that it was admitted
                assert await fleet.publish(number) >= 1
                number += 1
            assert road.num_stops == 1
            if not cuts:
                await fleet.until_admitted("sound")
                assert await fleet.publish(number) == 1
                served = await half.client.get_policy()
                assert served.policy_version.number < number - 1
                # It loads the whole policy or nothing, as after a cut (test_data_planes.py).
                assert served.ready
                assert np.array_equal((await half.client.logprobs(IDS)).logprobs[0], before)
            road.open.set()
            await fleet.until_admitted("sound", "half")
            assert await fleet.serves_like_the_learner(half)
            assert await fleet.serves_like_the_learner(sound)
