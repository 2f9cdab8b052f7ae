"""vLLM's own weight transfer, trainer's side: NCCL between devices, CUDA IPC on one device.

vLLM's trainer engine calls four methods of a client. Dialoop's client turns them into the steps of
one LoadWeights stream, which the replica takes in order. Both sides need CUDA. The calls are tested
against the installed vLLM; the transfer itself has not been run.
"""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

import torch
from dialoop.clients.weights import TransferPhase, TransferStep
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dialoop.clients.inference import InferenceClient, WeightsManifest
    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.learner.weights_file import ExportedWeights

Backend = Literal["nccl", "ipc"]


class StepClient:
    """A VLLMWeightSyncClient of vLLM that turns the calls of its trainer engine into steps.

    vLLM calls it from a thread of its own. The upload reads `steps` on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: asyncio.Queue[TransferStep] = asyncio.Queue()
        self._answer: Future[Any] = Future()
        self._deadline_s = 0.0

    def begin(self, upload: Any, *, deadline_s: float) -> Future[Any]:
        """Start one publish; the coroutine `upload(steps)` returns at the replica's answer."""
        self._steps, self._deadline_s = asyncio.Queue(), deadline_s
        self._answer = asyncio.run_coroutine_threadsafe(upload(self.steps()), self._loop)
        return self._answer

    async def steps(self) -> AsyncIterator[TransferStep]:
        """Yield the steps of a publish, until FINISH."""
        queue = self._steps
        while True:
            step = await queue.get()
            yield step
            if step.phase is TransferPhase.FINISH:
                return

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Send where to connect; vLLM calls it once, when it builds the engine."""
        self._put(TransferPhase.INIT, init_info)

    def start_weight_update(self) -> None:
        """Send that new weights follow."""
        self._put(TransferPhase.START, {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Send which parameters follow, and for IPC their addresses."""
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._put(TransferPhase.UPDATE, _json_safe_update_payload(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Wait for the replica's answer, after which the trainer may use its buffers again."""
        self._put(TransferPhase.FINISH, {})
        self._answer.result(self._deadline_s)

    def _put(self, phase: TransferPhase, info: Any) -> None:
        if self._answer.done():
            self._answer.result()  # raises the error with which the replica refused
        step = TransferStep(phase=phase, info_json=json.dumps(info))
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)


class VllmTransfer:
    """The data planes nccl and ipc. For each replica there is one vLLM trainer engine here."""

    is_fetched = False

    def __init__(self, backend: Backend, *, num_workers: int) -> None:
        require_cuda(backend)
        self.name: str = backend
        self._backend, self._num_workers = backend, num_workers
        self._engines: dict[int, tuple[StepClient, Any, _FileSource]] = {}

    def copies(self, version: PolicyVersion, name: str) -> tuple[Path, ...]:
        """Return nothing: tensors go directly from device to device."""
        return ()

    async def offer(self, manifest: WeightsManifest, weights: ExportedWeights) -> None:
        """Do nothing: tensors go directly from device to device."""

    async def send(
        self,
        replica: InferenceClient,
        manifest: WeightsManifest,
        weights: ExportedWeights,
        *,
        deadline_s: float,
    ) -> None:
        """Connect to the replica's workers, the first time, and send every tensor of the file."""
        await asyncio.to_thread(
            self._send, replica, manifest, weights, asyncio.get_running_loop(), deadline_s
        )

    def _send(
        self,
        replica: InferenceClient,
        manifest: WeightsManifest,
        weights: ExportedWeights,
        loop: asyncio.AbstractEventLoop,
        deadline_s: float,
    ) -> None:
        from dataclasses import replace

        announced = replace(manifest, data_plane=self._backend, sha256="", num_bytes=0)

        async def upload(steps: AsyncIterator[TransferStep]) -> None:
            await replica.transfer_weights(announced, steps, deadline_s=deadline_s)

        client, engine, source = self._engines.pop(id(replica), (None, None, None))
        if client is None or source is None:
            client, source = StepClient(loop), _FileSource(weights.path)
        client.begin(upload, deadline_s=deadline_s)
        source.path = weights.path
        if engine is None:
            engine = trainer_engine(
                self._backend, client=client, source=source, num_workers=self._num_workers
            )
        engine.send_weights()
        # After a failed transfer there is no engine, so the next one connects to the replica anew.
        self._engines[id(replica)] = (client, engine, source)


class _FileSource:
    """A vLLM WeightSource over a safetensors file: its tensors, on the device."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor, in the order of iteration."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._cpu()]

    def __iter__(self) -> Any:
        """Yield (name, tensor) pairs, with the tensors on the CUDA device."""
        for name, tensor in self._cpu():
            yield name, tensor.to("cuda")

    def _cpu(self) -> Any:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def trainer_init_info(backend: Backend, *, num_workers: int) -> Any:
    """Return the arguments of vLLM's trainer engine: for NCCL an address, for IPC none."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address, port = _free_address()
    return NCCLTrainerInitInfo(
        rank=0, master_address=address, master_port=port, world_size=1 + num_workers
    )


def trainer_engine(
    backend: Backend, *, client: StepClient, source: _FileSource, num_workers: int
) -> Any:
    """Return vLLM's trainer engine, connected to the replica's workers."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    info = trainer_init_info(backend, num_workers=num_workers)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def require_cuda(backend: str) -> None:
    """Raise InvalidConfig (NEEDS_CUDA) on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        raise InvalidConfig(
            f"The data plane {backend} needs a CUDA device, and this machine has none.",
            reason=Reason.NEEDS_CUDA,
            remedy="Set data_plane to shared_memory (one host) or chunks (several).",
        )


def _free_address() -> tuple[str, int]:
    """Return this host's address, and a port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = int(listener.getsockname()[1])
    return socket.gethostbyname(socket.gethostname()), port
