"""vLLM's own weight transfer: our parts against the installed vLLM's; running it needs CUDA."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dialoop.clients.weights import TransferPhase, WeightsManifest, weights_requests
from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.requests import contents_of, manifest_of
from dialoop_services.inference.weights.data_planes import DataPlanes
from dialoop_services.inference.weights.publications import Publications
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

vllm = pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.heavy(reason="imports vLLM"),
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
]

VERSION = PolicyVersion(lineage="main", number=1)
TENSORS = {"model.norm.weight": torch.ones(8), "model.embed.weight": torch.zeros(4, 8)}


def test_the_replicas_calls_are_those_of_vllms_engine_and_worker() -> None:
    from dialoop_services.inference.vllm_engine import transfer
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferInitInfo,
        IPCWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_worker import Worker

    for name, arguments in (
        ("start_weight_update", ()),
        ("update_weights", ("request",)),
        ("finish_weight_update", ()),
    ):
        method = getattr(AsyncLLM, name)
        assert inspect.iscoroutinefunction(method)
        inspect.signature(method).bind(None, *arguments)
    for name in ("init_weight_transfer_engine", "update_weights"):
        inspect.signature(getattr(Worker, name)).bind(None, {})
    assert {field.name for field in fields(NCCLWeightTransferInitInfo)} >= set(
        transfer._NCCL_FIELDS
    )
    assert IPCWeightTransferInitInfo(packed=False).packed is False
    update = transfer._update_of([])
    assert {field.name for field in fields(IPCWeightTransferUpdateInfo)} >= set(update)
    assert "weight_transfer_config" in {field.name for field in fields(vllm.AsyncEngineArgs)}


async def test_the_trainers_side_is_what_vllms_trainer_engines_ask_for(tmp_path: Path) -> None:
    from dialoop_services.trainer.publish.vllm_transfer import StepClient, _FileSource
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import (
        VLLMWeightSyncClient,
        WeightSource,
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    client = StepClient(asyncio.get_running_loop())
    assert isinstance(client, VLLMWeightSyncClient)
    save_file(TENSORS, tmp_path / "w.safetensors")
    source = _FileSource(tmp_path / "w.safetensors")
    assert {m.name: m.shape for m in source.metadata()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    assert [m.name for m in source.metadata()] == sorted(TENSORS)
    assert WeightSource.__abstractmethods__ <= set(dir(source))
    info = IPCTrainerInitInfo(rank=0)
    assert (info.backend, info.is_sender, info.packed) == ("ipc", True, False)
    arguments = inspect.signature(WeightTransferTrainerFactory.trainer_init)
    arguments.bind(info, client=client, source=source)
    engine = NCCLTrainerWeightTransferEngine(client=client, source=source)
    assert (engine.is_sender, engine.packed, engine.model_update_group) == (True, True, None)
    for backend in ("nccl", "ipc"):
        assert WeightTransferConfig(backend=backend).backend == backend


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

    async def load_weights(self, manifest: Any, steps: Any, **_: Any) -> None:
        requests = weights_requests(manifest, steps)
        read: WeightsManifest = manifest_of(await anext(requests))
        plane = DataPlanes(Publications(None), transfer_backend=read.data_plane)
        async with plane.arriving(read, contents_of(requests)) as arrived:
            await self._engine.transfer_weights(arrived.steps, VERSION)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "num_devices"), [("ipc", 1), ("nccl", 2)])
async def test_policies_go_from_device_to_device(
    backend: str, num_devices: int, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"not run: needs CUDA devices: {num_devices} for {backend}, found fewer")
    from dialoop_services.inference.vllm_engine.engine import VllmEngine
    from dialoop_services.trainer.learner.learner_state import ExportedWeights
    from dialoop_services.trainer.publish.vllm_transfer import VllmTransfer

    from tests.parity.inference.test_engines import forward_logprobs, save_model, save_weights

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
