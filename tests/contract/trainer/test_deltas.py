"""Publishes of what changed alone: exact, and the whole wherever that cannot be."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.weights import WeightsKind
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_ops.stack.processes.ports import choose_ports
from dialoop_services.config.job import JobConfig
from dialoop_services.inference.weights import kept as kept_module
from dialoop_services.inference.weights.kept import WeightsFolder
from dialoop_services.trainer.learner import learner_state
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.publish import publisher as publisher_module
from dialoop_services.trainer.publish.publisher import Publisher
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.inference_world import World, world
from tests.support.stack_jobs import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = [[1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("deltas") / "model", seed=0)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


class FakeReplay:
    async def advance_policy(self, run: str, version: PolicyVersion, **_: Any) -> int:
        return 0


class Trainer:
    """A learner that changes few elements of its weights and publishes to one replica."""

    def __init__(self, w: World, model_dir: Path, run_dir: Path, **settings: Any) -> None:
        chosen = TrainerSettings(
            model_dir=model_dir, run_dir=run_dir, **{"data_plane": "chunks", **settings}
        )
        self.learner, self.number = Learner(chosen), 0
        self.kinds: list[WeightsKind] = []
        self.before_load: Callable[[], Any] = lambda: None
        load = w.client.load_weights

        async def noted(manifest: Any, contents: Any = (), **options: Any) -> Any:
            self.kinds.append(manifest.kind)
            self.before_load()
            return await load(manifest, contents, **options)

        w.client.load_weights = noted  # type: ignore[method-assign]
        self.publisher = Publisher(chosen, self.learner, [w.client], cast("Any", FakeReplay()))

    def train(self) -> None:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        with torch.no_grad():
            for parameter in self.learner.state.policy.parameters():
                if parameter.requires_grad:
                    few = torch.rand(parameter.shape, generator=generator) < 0.01
                    parameter += 0.1 * few * torch.randn(parameter.shape, generator=generator)

    async def publish(self, lineage: str = "main") -> Any:
        self.train()
        self.kinds.clear()
        return await self.publisher.publish(PolicyVersion(lineage=lineage, number=self.number))


@asynccontextmanager
async def served(
    model_dir: Path, folder: Path, **settings: Any
) -> AsyncIterator[tuple[World, Trainer]]:
    async with world(model_dir, folder / "w", reads_root=False) as w:
        trainer = Trainer(w, model_dir, folder / "run", **settings)
        assert (await trainer.publish()).delta_bytes == 0  # the first one is whole
        yield w, trainer


async def serves(w: World, trainer: Trainer) -> None:
    """Require the trainer's weights in the engine bit for bit, under their name."""
    ours = trainer.learner.state.policy.causal_lm.state_dict()
    theirs = cast("Any", w.replica.engine)._model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    assert len(ours.keys() & theirs.keys()) > 10
    assert (await w.client.get_policy()).policy_version.number == trainer.number
    assert (await w.client.get_policy()).ready


DELTA, WHOLE = WeightsKind.DELTA, WeightsKind.WHOLE


async def test_a_replica_that_has_the_policy_before_gets_what_changed(model_dir, tmp_path):
    async with served(model_dir, tmp_path) as (w, trainer):
        await serves(w, trainer)
        for _ in range(3):
            published = await trainer.publish()
            assert trainer.kinds == [DELTA]
            assert 0 < published.delta_bytes < 0.1 * published.weights.num_bytes
            await serves(w, trainer)
            digest = hashlib.sha256(published.weights.path.read_bytes()).hexdigest()
            assert digest == published.weights.sha256  # policies/ has the whole of each
        policies = tmp_path / "run" / "policies"
        (delta,) = policies.glob("*/delta*")
        assert (delta.parent.name, delta.stat().st_size) == ("main-4", published.delta_bytes)
        assert len(list(tmp_path.glob("dialoop-policy-*"))) == 1


async def test_a_replica_that_began_anew_or_missed_one_gets_the_whole(model_dir, tmp_path):
    async with served(model_dir, tmp_path) as (w, trainer):
        async with world(model_dir, tmp_path / "other", reads_root=False) as anew:
            anew.client.load_weights, known = w.client.load_weights, anew.client.load_weights
            trainer.publisher._replicas = (anew.client,)
            anew.client.load_weights = known  # type: ignore[method-assign]
            await trainer.publish()
            await serves(anew, trainer)
        trainer.publisher._replicas = (w.client,)  # it has the first one, and missed the second
        await trainer.publish()
        assert trainer.kinds == [DELTA, WHOLE]
        await serves(w, trainer)
        await trainer.publish()
        assert trainer.kinds == [DELTA]
        await serves(w, trainer)


async def test_a_trainer_that_goes_back_to_older_weights_sends_the_whole_once(model_dir, tmp_path):
    """After a rollback the new process knows no proved version, and its number may be lower."""
    async with served(model_dir, tmp_path) as (w, trainer):
        await trainer.publish()
        await trainer.publish()
        back = Trainer(w, model_dir, tmp_path / "run")
        await back.publish(lineage="main.r1")
        assert back.kinds == [WHOLE]
        await serves(w, back)
        await back.publish(lineage="main.r1")
        assert back.kinds == [DELTA]
        await serves(w, back)


def tear(delta: Path) -> None:
    with delta.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"abc")


def cut(delta: Path) -> None:
    os.truncate(delta, delta.stat().st_size // 2)


@pytest.mark.parametrize("damage", [tear, cut])
async def test_a_torn_delta_changes_nothing_and_the_whole_follows(damage, model_dir, tmp_path):
    async with served(model_dir, tmp_path) as (w, trainer):

        def harm() -> None:
            if trainer.kinds == [DELTA]:
                damage(tmp_path / "run" / "policies" / "main-2" / "delta.safetensors")

        ready: list[bool] = []
        leave = w.replica._leave_rotation

        async def noted(reason: Any) -> None:
            ready.append(False)
            await leave(reason)

        w.replica._leave_rotation = noted  # type: ignore[method-assign]
        trainer.before_load = harm
        await trainer.publish()
        assert trainer.kinds == [DELTA, WHOLE]
        assert not ready  # it served its old policy until then
        await serves(w, trainer)


@pytest.mark.parametrize("fault", ["other bytes", "no room", "killed base"])
async def test_a_delta_that_leads_to_something_else_is_never_served(
    fault, model_dir, tmp_path, monkeypatch
):
    async with served(model_dir, tmp_path) as (w, trainer):
        (kept,) = tmp_path.glob("dialoop-policy-*/model.safetensors")
        before = (await w.client.logprobs(IDS)).logprobs[0]
        seen: list[Any] = []

        def fail(delta: Path, file: Path) -> str:
            with file.open("r+b") as opened:  # a part is written
                opened.seek(-100, 2)
                opened.write(bytes(100))
            raise OSError(28, "No space left on device")

        if fault == "other bytes":
            tear(kept)
        elif fault == "no room":
            monkeypatch.setattr(kept_module, "apply_delta", fail)
        else:
            kept.unlink()

        async def look() -> None:
            seen.append(np.array_equal((await w.client.logprobs(IDS)).logprobs[0], before))

        send = trainer.publisher._sender._send

        async def looked(replica: Any, manifest: Any, path: Path, deadline_s: float) -> None:
            try:
                await send(replica, manifest, path, deadline_s)
            finally:
                if manifest.kind is DELTA:
                    await look()

        monkeypatch.setattr(trainer.publisher._sender, "_send", looked)
        await trainer.publish()
        assert trainer.kinds == [DELTA, WHOLE]
        assert seen == [True]
        await serves(w, trainer)


async def test_without_room_for_a_delta_the_whole_goes(model_dir, tmp_path, monkeypatch):
    async with served(model_dir, tmp_path) as (w, trainer):

        def full(*_: Any) -> bool:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(learner_state, "write_delta", full)
        assert (await trainer.publish()).delta_bytes == 0
        assert trainer.kinds == [WHOLE]
        await serves(w, trainer)
        assert not list((tmp_path / "run").rglob("*.tmp"))


async def test_a_delta_of_another_policy_is_refused_before_its_bytes_come(model_dir, tmp_path):
    async with served(model_dir, tmp_path) as (w, trainer):
        published = await trainer.publish()
        manifest = trainer.publisher._manifest(
            PolicyVersion(lineage="main", number=9), published.weights
        )
        other = replace(manifest, kind=DELTA, base_digest="0" * 64)
        with pytest.raises(PreconditionFailed) as caught:
            await w.client.load_weights(other, [b"never read"])
        assert caught.value.reason == "DELTA_BASE_MISSING"
        await serves(w, trainer)


@pytest.mark.parametrize("deltas", ["always", "auto", "never"])
async def test_over_a_shared_folder_deltas_go_where_asked_for(deltas, model_dir, tmp_path):
    root = tmp_path / "run" / "policies"
    root.mkdir(parents=True)
    async with world(model_dir, root) as w:
        trainer = Trainer(w, model_dir, tmp_path / "run", data_plane="shared_memory", deltas=deltas)
        await trainer.publish()
        for _ in range(2):
            published = await trainer.publish()
            assert trainer.kinds == [DELTA if deltas == "always" else WHOLE]
            await serves(w, trainer)
            content = published.weights.path.read_bytes()  # the replica changes a copy
            assert hashlib.sha256(content).hexdigest() == published.weights.sha256


async def test_never_means_never_and_adapters_stay_as_they_are(model_dir, tmp_path):
    async with served(model_dir, tmp_path, deltas="never") as (_, trainer):
        assert (await trainer.publish()).delta_bytes == 0
        assert trainer.kinds == [WHOLE]
    (tmp_path / "lora").mkdir()
    async with served(model_dir, tmp_path / "lora", model={"lora_rank": 2}) as (_, trainer):
        assert (await trainer.publish()).delta_bytes == 0
        assert trainer.kinds == [WeightsKind.ADAPTER]


def test_devices_move_whole_tensors_only() -> None:
    with pytest.raises((InvalidConfig, ValueError), match="whole tensors only"):
        JobConfig.model_validate({"inference": {"deltas": "always", "data_plane": "nccl"}})


def test_the_file_of_a_killed_replica_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from dialoop_services.inference.weights.kept import WeightsFolder\n"
        "folder = WeightsFolder(); folder.path.write_bytes(b'weights')\n"
        "print(folder.path, flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        first = WeightsFolder()
        assert theirs.read_bytes() == b"weights"  # its owner lives
        other.send_signal(signal.SIGKILL)
        other.wait()
    WeightsFolder().delete()
    assert not theirs.parent.exists()
    assert first.path.parent.exists()


@pytest.mark.heavy(reason="two replicas in processes of their own, one after the other")
@pytest.mark.timeout(600)
async def test_a_replica_killed_between_a_delta_and_its_proof_gets_the_whole_when_it_is_back(
    model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(publisher_module, "_RETRY_S", 0.1)
    port = choose_ports({"replica": 0})["replica"]
    with ExitStack() as ends:

        def start() -> subprocess.Popen[bytes]:
            own = {"PORT": port, "MODEL_DIR": model_dir, "ENGINE": "transformers"}
            own |= {"MAX_MODEL_LEN": 200, "NUM_THREADS": 1, "AWAITS_POLICY": 1}
            variables = {f"DIALOOP_INFERENCE_{key}": str(value) for key, value in own.items()}
            process = subprocess.Popen(
                [sys.executable, "-m", "dialoop_services.inference"],
                cwd=ROOT,
                env=os.environ | variables | {"TMPDIR": str(tmp_path)},
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        process = start()
        async with Channel(f"127.0.0.1:{port}", retry=RetryPolicy(max_attempts=1)) as channel:
            await channel.wait_until_connected(timeout_s=240)
            w: Any = SimpleNamespace(client=InferenceClient(channel))
            trainer = Trainer(w, model_dir, tmp_path / "run", publish_deadline_s=240)
            await trainer.publish()
            probe, killed = w.client.logprobs, []

            async def killed_first(*arguments: Any, **named: Any) -> Any:
                if not killed:
                    (kept,) = tmp_path.glob("dialoop-policy-*/model.safetensors")
                    whole = tmp_path / "run" / "policies" / "main-2" / "model.safetensors"
                    assert kept.read_bytes() == whole.read_bytes()
                    killed.append(kept)
                    process.kill()
                    process.wait()
                    start()
                return await probe(*arguments, **named)

            w.client.logprobs = killed_first
            published = await trainer.publish()
            assert trainer.kinds[0] is DELTA
            assert trainer.kinds[-2:] == [DELTA, WHOLE]
            assert published.max_logprob_difference < 1e-4
            assert (await w.client.get_policy()).policy_version.number == 2
            assert not killed[0].exists()  # the next one deleted what the killed one left
            await trainer.publish()
            assert trainer.kinds == [DELTA]
