"""vLLM's own weight transfer: our calls against the installed vLLM; running it needs CUDA."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dialoop.clients.inference import WeightsManifest
from dialoop.clients.weights import TransferPhase, WeightsManifest, weights_requests
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.sequences import PolicyVersion
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.requests import contents_of, manifest_of
from dialoop_services.inference.weights.data_planes import PlaneName, Transfer
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dialoop.clients.weights import TransferStep

vllm = pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.heavy(reason="imports vLLM"),
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
]

VERSION = PolicyVersion(lineage="main", number=1)
TENSORS = {"model.norm.weight": torch.ones(8), "model.embed.weight": torch.zeros(4, 8)}


class SignedLLM:
    """Takes only what AsyncLLM's own signatures take, and notes it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        method = getattr(AsyncLLM, name)
        assert inspect.iscoroutinefunction(method)

        async def call(*args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(method).bind(self, *args, **kwargs)
            self.calls.append((name, next(iter(list(bound.arguments.values())[1:]), None)))

        return call


async def receive(send: Any) -> SignedLLM:
    """What vLLM is called with when the trainer's side does `send(client)`, by way of the wire."""
    from dialoop_services.inference.vllm_engine.transfer import TransferReceiver
    from dialoop_services.trainer.publish.vllm_transfer import StepClient

    llm = SignedLLM()

    async def upload(steps: AsyncIterator[TransferStep]) -> None:
        announcement = WeightsManifest(policy_version=VERSION, data_plane="nccl")
        requests = weights_requests(announcement, steps)
        manifest = manifest_of(await anext(requests))
        plane = Transfer(PlaneName(manifest.data_plane))
        async with plane.arriving(manifest, contents_of(requests)) as arrived:
            receiver = TransferReceiver(llm, arrived.steps)
            await receiver.meet()
            await receiver.receive()

    client = StepClient(asyncio.get_running_loop())
    client.begin(upload, deadline_s=10)
    await asyncio.to_thread(send, client)
    return llm


def updates() -> dict[str, Any]:
    return {
        "names": list(TENSORS),
        "dtype_names": ["float32"] * 2,
        "shapes": [list(t.shape) for t in TENSORS.values()],
    }


async def test_an_nccl_publish_reaches_vllm_as_its_own_requests() -> None:
    from vllm.distributed.weight_transfer.nccl_common import worker_init_payload
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferEngine,
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    meeting = NCCLWeightTransferInitInfo(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, packed=True
    )

    def send(client: Any) -> None:
        client.init_weight_transfer_engine(worker_init_payload(meeting))
        client.start_weight_update()
        client.update_weights(asdict(NCCLWeightTransferUpdateInfo(**updates())))
        client.finish_weight_update()

    llm = await receive(send)
    assert [name for name, _ in llm.calls] == [
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    engine = SimpleNamespace(
        init_info_cls=NCCLWeightTransferEngine.init_info_cls,
        update_info_cls=NCCLWeightTransferEngine.update_info_cls,
    )
    init, update = llm.calls[0][1].init_info, llm.calls[2][1].update_info
    assert NCCLWeightTransferEngine.parse_init_info(engine, init) == meeting
    parsed = NCCLWeightTransferEngine.parse_update_info(engine, update)
    assert parsed == NCCLWeightTransferUpdateInfo(**updates())


async def test_an_ipc_publish_reaches_vllm_with_its_handles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferEngine,
        IPCWeightTransferUpdateInfo,
    )

    handles = [{"GPU-1": ("opaque", index)} for index in range(2)]

    def send(client: Any) -> None:
        client.init_weight_transfer_engine({"packed": False})
        client.start_weight_update()
        client.update_weights(asdict(IPCWeightTransferUpdateInfo(**updates(), ipc_handles=handles)))
        client.finish_weight_update()

    llm = await receive(send)
    engine = SimpleNamespace(update_info_cls=IPCWeightTransferEngine.update_info_cls)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    parsed = IPCWeightTransferEngine.parse_update_info(engine, llm.calls[2][1].update_info)
    assert parsed.ipc_handles == handles


async def test_steps_out_of_order_are_refused() -> None:
    def send(client: Any) -> None:
        client.update_weights(updates())
        client.finish_weight_update()

    with pytest.raises(InvalidInput) as caught:
        await receive(send)
    assert caught.value.reason == "MANIFEST_MISMATCH"


async def test_the_trainers_side_is_what_vllms_trainer_engines_ask_for(tmp_path: Path) -> None:
    from dialoop_services.trainer.publish.vllm_transfer import (
        StepClient,
        _FileSource,
        trainer_init_info,
    )
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import (
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    client = StepClient(asyncio.get_running_loop())
    assert isinstance(client, VLLMWeightSyncClient)
    save_file(TENSORS, tmp_path / "w.safetensors")
    source = _FileSource(tmp_path / "w.safetensors")
    assert {m.name: m.shape for m in source.metadata()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    assert [m.name for m in source.metadata()] == sorted(TENSORS)
    assert WeightSource.__abstractmethods__ <= set(dir(source))
    for backend in ("nccl", "ipc"):
        info = trainer_init_info(backend, num_workers=2)
        assert (info.backend, info.is_sender) == (backend, True)
        assert info.rank == 0
        arguments = inspect.signature(WeightTransferTrainerFactory.trainer_init)
        arguments.bind(info, client=client, source=source)
        assert backend in WeightTransferTrainerFactory._registry
        assert backend in WeightTransferEngineFactory._registry
        assert WeightTransferConfig(backend=backend).backend == backend
    assert trainer_init_info("nccl", num_workers=2).world_size == 3
    names = {field.name for field in fields(vllm.AsyncEngineArgs)}
    assert "weight_transfer_config" in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_without_a_cuda_device_the_replica_says_that_it_needs_one(backend: str) -> None:
    from dialoop_services.inference.vllm_engine.transfer import transfer_arguments

    with pytest.raises(InvalidConfig) as caught:
        transfer_arguments(backend)
    assert caught.value.reason == "NEEDS_CUDA"
    assert "needs a CUDA device" in caught.value.message
    assert transfer_arguments("") == {}


class Replica:
    """What the trainer's side calls; the wire is there, a server is not."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def transfer_weights(self, manifest: Any, steps: Any, **_: Any) -> None:
        requests = weights_requests(manifest, steps)
        read: WeightsManifest = manifest_of(await anext(requests))
        plane = Transfer(PlaneName(read.data_plane))
        async with plane.arriving(read, contents_of(requests)) as arrived:
            await self._engine.transfer_weights(arrived.steps, VERSION)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "num_devices"), [("ipc", 1), ("nccl", 2)])
async def test_policies_go_from_device_to_device(
    backend: str, num_devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"not run: needs CUDA devices: {num_devices} for {backend}, found fewer")
    from dialoop_services.inference.vllm_engine.engine import VllmEngine
    from dialoop_services.trainer.learner.weights_file import ExportedWeights
    from dialoop_services.trainer.publish.vllm_transfer import VllmTransfer

    from tests.parity.inference.test_engines import forward_logprobs, save_model, save_weights

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model = save_model(tmp_path / "model", seed=0, tied=True)
    path = save_weights(tmp_path / "w.safetensors", seed=1, tied=True)
    weights = ExportedWeights(path=path, sha256="", num_bytes=0)
    engine = await VllmEngine.start(model, EngineOptions(weight_transfer=backend))
    plane = VllmTransfer(backend, num_workers=1)
    announcement = WeightsManifest(policy_version=VERSION)
    await plane.send(Replica(engine), announcement, weights, deadline_s=120)
    scored = await engine.logprobs(list(range(5, 40)))
    expected = forward_logprobs(list(range(5, 40)), seed=1, tied=True)
    assert abs(scored.logprobs - expected).max() < 1e-3
    assert scored.policy_version == VERSION
    await engine.close()


def test_phases_are_those_of_the_wire() -> None:
    from dialoop.v1 import inference_service_pb2 as pb

    for phase in TransferPhase:
        assert pb.TransferStep.Phase.Value(f"PHASE_{phase.name}") == int(phase)
