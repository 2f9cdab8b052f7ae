"""The NCCL transfer between two processes, on gloo: vLLM's code and ours, on both sides.

What stays open without two GPUs is NCCL itself: its kernels, and its own order on CUDA's streams.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from dialoop.clients.weights import WeightsManifest, weights_requests
from dialoop.sequences import PolicyVersion
from dialoop_services.inference.requests import contents_of, manifest_of
from dialoop_services.inference.vllm_engine.environment import prepare
from dialoop_services.inference.weights.data_planes import DataPlanes
from dialoop_services.inference.weights.publications import Publications
from dialoop_services.trainer.learner.learner_state import ExportedWeights
from safetensors.torch import save_file

from tests.support.programs import nccl_twin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

prepare()
pytest.importorskip("vllm")
from dialoop_services.inference.vllm_engine.transfer import TransferReceiver  # noqa: E402
from dialoop_services.trainer.publish import vllm_transfer as sender  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:Tensor .* exceeds")]
BUFFER = 4096
SHAPES = {f"layers.{n}.{part}": shape for n in range(6) for part, shape in (
    ("weight", (40, 31)), ("norm", (7,)), ("half", (3, 5, 2)))}  # fmt: skip


def policy(number: int) -> dict[str, torch.Tensor]:
    """Weights of several formats, some of a tensor larger than a buffer."""
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.randn(shape, generator=generator).to(
            torch.bfloat16 if name.endswith("half") else torch.float32
        )
        for name, shape in SHAPES.items()
    }


class Replica:
    """A replica whose engine's worker is another process; the wire is there, a server is not."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        shapes = {name: tuple(shape) for name, shape in SHAPES.items()}
        self.receiver = TransferReceiver(
            cast("Any", self), backend="nccl", shapes=shapes, tied=False
        )

    async def call(self, name: str, *arguments: Any) -> Any:
        def ask() -> Any:
            self._pipe.send((name, arguments))
            answer = self._pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return await asyncio.to_thread(ask)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [await self.call(method, *args)]

    async def start_weight_update(self) -> None:
        """The twin's model has no layers to prepare."""

    async def finish_weight_update(self) -> None:
        """Nor to finish."""

    async def update_weights(self, request: Any) -> None:
        await self.call("update_weights", request.update_info)

    async def load_weights(self, manifest: Any, steps: Any, **_: Any) -> None:
        requests = weights_requests(manifest, steps)
        read: WeightsManifest = manifest_of(await anext(requests))
        plane = DataPlanes(Publications(None), transfer_backend=read.data_plane)
        async with plane.arriving(read, contents_of(requests)) as arrived:
            await self.receiver.meet(arrived.steps)
            await self.receiver.receive(arrived.steps)


@pytest.fixture
def replica() -> Iterator[Replica]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=nccl_twin.worker, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.recv() == "ready"
        yield Replica(ours)
    finally:
        ours.send(("end", ()))
        process.join(10)
        process.kill()


@pytest.fixture
def on_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import pynccl_wrapper

    nccl_twin.as_if_on_cuda(monkeypatch.setattr)
    meets_at = nccl_twin.id_of(str(tmp_path / "meeting"))
    library = lambda: SimpleNamespace(ncclGetUniqueId=lambda: meets_at)  # noqa: E731
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", nccl_twin.Stream)
    monkeypatch.setattr(sender, "_DEVICE", "cpu")
    monkeypatch.setattr(sender, "_BUFFER_BYTES", BUFFER)


@pytest.mark.usefixtures("on_gloo")
async def test_three_policies_arrive_whole_in_buffers_smaller_than_they_are(
    replica: Replica, tmp_path: Path
) -> None:
    plane = sender.VllmTransfer("nccl", num_workers=1)
    path = tmp_path / "w.safetensors"
    for number in (1, 2, 3):
        save_file(policy(number), path)
        assert path.stat().st_size > 4 * BUFFER
        version = PolicyVersion(lineage="main", number=number)
        weights = ExportedWeights(path=path, sha256="", num_bytes=0)
        manifest = WeightsManifest(policy_version=version)
        await plane.send(cast("Any", replica), manifest, weights, deadline_s=60)
        path.unlink()  # whatever was still to be read from it is lost
        arrived = await replica.call("tensors")
        assert arrived.keys() == SHAPES.keys()
        for name, tensor in policy(number).items():
            assert torch.equal(arrived[name], tensor), name
