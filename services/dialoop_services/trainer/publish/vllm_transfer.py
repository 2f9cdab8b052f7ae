"""vLLM's own weight transfer, trainer's side: NCCL between devices, CUDA IPC on one device.

vLLM's trainer engine calls four methods of a client. Dialoop's client turns them into the steps of
one LoadWeights stream, which the replica takes in order. Both sides need CUDA; docs/scale.md says
what of it was run.

Each transfer has a thread of its own: vLLM makes a CUDA stream of its own the thread's current one,
and a broadcast whose other side has gone does not end.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from dialoop.clients.weights import SharedTensor, TransferPhase, TransferStep
from dialoop.errors import DialoopError, InvalidConfig, Unavailable
from dialoop.reasons import Reason

from dialoop_services.trainer.publish.data_planes import WeightsSender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from dialoop.clients.inference import InferenceClient, WeightsManifest

    from dialoop_services.trainer.learner.learner_state import ExportedWeights

Backend = Literal["nccl", "ipc"]
_DEVICE = "cuda"
_SHARED_AT_ONCE = 512
"""Tensors in one message: some hundred bytes each."""
_BUFFER_BYTES = 1 << 30
"""What vLLM broadcasts at once; two of them lie on each device. A tensor may be larger."""


class StepClient:
    """A VLLMWeightSyncClient of vLLM that turns the calls of its trainer engine into steps.

    vLLM calls it from threads of its own. The upload reads `steps` on the event loop.
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
        """Send how to connect; it is called once, before the first publish."""
        self._put(TransferPhase.INIT, init_info)

    def start_weight_update(self) -> None:
        """Send that new weights follow."""
        self._put(TransferPhase.START)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Send which parameters follow, and for IPC their handles, field by field."""
        if update_info.get("ipc_handles") is None:
            self._put(TransferPhase.UPDATE, update_info)
            return
        columns = (update_info[name] for name in ("names", "dtype_names", "shapes", "ipc_handles"))
        tensors = [_as_shared(*row) for row in zip(*columns, strict=True)]
        for start in range(0, len(tensors), _SHARED_AT_ONCE):
            some = tuple(tensors[start : start + _SHARED_AT_ONCE])
            self._put(TransferPhase.UPDATE, tensors=some)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Wait for the replica's answer, after which the trainer may use its buffers again."""
        self._put(TransferPhase.FINISH)
        self._answer.result(self._deadline_s)

    def _put(
        self, phase: TransferPhase, info: Any = None, tensors: tuple[SharedTensor, ...] = ()
    ) -> None:
        if self._answer.done():
            self._answer.result()  # raises the error with which the replica refused
        text = "" if info is None else json.dumps(info)
        step = TransferStep(phase=phase, info_json=text, tensors=tensors)
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)


def _as_shared(
    name: str, dtype: str, shape: list[int], handles: dict[str, tuple[Any, ...]]
) -> SharedTensor:
    """Return a tensor that vLLM shares, from the arguments of torch's `rebuild_cuda_tensor`.

    vLLM shares contiguous tensors that fill their storage; of others this would be the wrong part.
    """
    ((device, arguments),) = handles.items()
    (_, size, stride, start, _, kind, _, memory, num_bytes, offset, *_) = arguments
    *_, counter, place, event, waits = arguments
    is_whole = not start and num_bytes == size.numel() * kind.itemsize
    if not is_whole or stride != torch.empty(size, device="meta").stride():
        raise ValueError(f"{name} is a part of another tensor, and cannot be shared so")
    return SharedTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        device=device,
        memory_handle=memory,
        memory_offset=offset,
        counter_name=counter.decode(),
        counter_offset=place,
        event_handle=event if waits else b"",
    )


class VllmTransfer(WeightsSender):
    """The data planes nccl and ipc. For each replica there is one vLLM trainer engine here."""

    def __init__(self, backend: Backend, *, num_workers: int) -> None:
        require_cuda(backend)
        if backend == "nccl":
            require_nccl()
        self.name: str = backend
        self._backend, self._num_workers = backend, num_workers
        self._links: dict[InferenceClient, _Link] = {}

    async def send(
        self,
        replica: InferenceClient,
        manifest: WeightsManifest,
        weights: ExportedWeights,
        *,
        deadline_s: float,
    ) -> None:
        """Connect to the replica's workers, the first time, and send every tensor of the file."""
        announced = replace(manifest, data_plane=self._backend, sha256="", num_bytes=0)

        async def upload(steps: AsyncIterator[TransferStep]) -> None:
            await replica.load_weights(announced, steps, deadline_s=deadline_s)

        # After a failed transfer there is no link, so the next one connects to the replica anew.
        link = self._links.pop(replica, None) or _Link(self._backend, self._num_workers)
        answer = asyncio.wrap_future(link.client.begin(upload, deadline_s=deadline_s))
        sending = asyncio.wrap_future(_in_thread(lambda: link.send(weights.path)))
        try:
            # A replica that refuses leaves the thread in a broadcast that nobody receives.
            await _first_failure(sending, answer)
        except BaseException:
            answer.cancel()
            sending.cancel()
            link.close()
            raise
        self._links[replica] = link


class _Link:
    """A vLLM trainer engine and its client: what is kept of one replica between publishes."""

    def __init__(self, backend: Backend, num_workers: int) -> None:
        self._backend, self._num_workers = backend, num_workers
        self.client = StepClient(asyncio.get_running_loop())
        self._engine: Any = None

    def send(self, path: Path) -> None:
        """Send every tensor of a file; connect first, if this is the first one."""
        source = _FileSource(path)
        if self._engine is None:
            self._engine = trainer_engine(
                self._backend, client=self.client, source=source, num_workers=self._num_workers
            )
        self._engine.source = source
        self._engine.send_weights()

    def close(self) -> None:
        """Give the connection up, which ends a broadcast that waits in it."""
        if self._engine is not None:
            _in_thread(self._engine.shutdown)


class _FileSource:
    """A vLLM WeightSource over a safetensors file: its tensors, on the device."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor, in the order of iteration."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._cpu()]

    def __iter__(self) -> Any:
        """Yield (name, tensor) pairs, with the tensors on the CUDA device."""
        for name, tensor in self._cpu():
            yield name, tensor.to(_DEVICE)

    def _cpu(self) -> Iterator[tuple[str, Any]]:
        from safetensors import safe_open

        with safe_open(self._path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def trainer_engine(
    backend: Backend, *, client: StepClient, source: _FileSource, num_workers: int
) -> Any:
    """Return vLLM's trainer engine, connected to the replica's workers."""
    if backend == "nccl":
        return _nccl_engine(client=client, source=source, num_workers=num_workers)
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0), client=client, source=source
    )


def _nccl_engine(*, client: StepClient, source: _FileSource, num_workers: int) -> Any:
    """Return vLLM's engine for NCCL, whose workers meet the trainer by an id of NCCL's own.

    vLLM's other way is a store at an address, out of which each side would read a pickle; and there
    a side whose NCCL does not load sends or receives nothing, and says so to nobody.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer import nccl_common
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    engine = NCCLTrainerWeightTransferEngine(
        client=client, source=source, packed_buffer_size_bytes=_BUFFER_BYTES
    )
    unique_id, world_size = bytes(NCCLLibrary().ncclGetUniqueId().internal), 1 + num_workers
    meeting = nccl_common.NCCLWeightTransferInitInfo(
        nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
        rank_offset=1,
        world_size=world_size,
        packed=engine.packed,
        packed_buffer_size_bytes=engine.packed_buffer_size_bytes,
        packed_num_buffers=engine.packed_num_buffers,
    )
    client.init_weight_transfer_engine(nccl_common.worker_init_payload(meeting))
    group = nccl_common.uid_init_process_group(
        unique_id, 0, world_size, torch.accelerator.current_device_index()
    )
    if group.disabled:  # by VLLM_DISABLE_PYNCCL: it would send nothing
        raise _nccl_unusable("VLLM_DISABLE_PYNCCL is set")
    engine.model_update_group = group
    return engine


def require_cuda(backend: str) -> None:
    """Raise InvalidConfig (NEEDS_CUDA) on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        raise InvalidConfig(
            f"The data plane {backend} needs a CUDA device, and this machine has none.",
            reason=Reason.NEEDS_CUDA,
            remedy="Set data_plane to shared_memory (one host) or chunks (several).",
        )


def require_nccl() -> None:
    """Raise InvalidConfig (NCCL_UNUSABLE) where vLLM cannot load NCCL."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except Exception as error:  # OSError without a library, AttributeError with too old a one
        raise _nccl_unusable(str(error)) from error


def _nccl_unusable(why: str) -> InvalidConfig:
    return InvalidConfig(
        f"vLLM cannot use the NCCL that is installed ({why}).",
        reason=Reason.NCCL_UNUSABLE,
        remedy="Install the torch that this vLLM was built for, which brings its NCCL, or set "
        "data_plane to shared_memory (one host) or chunks (several).",
    )


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a thread of its own, which does not keep the process from ending."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return done


async def _first_failure(*waited_for: asyncio.Future[Any]) -> None:
    """Wait until all are done; raise the first error as soon as there is one."""
    done, _ = await asyncio.wait(waited_for, return_when=asyncio.FIRST_EXCEPTION)
    errors = [error for future in done if (error := future.exception())]
    if not errors:
        return
    for error in errors:
        if isinstance(error, DialoopError):  # what the replica says is why the thread failed
            raise error
    raise Unavailable(
        f"vLLM's transfer failed ({type(errors[0]).__name__}: {errors[0]}).",
        reason=Reason.TRANSFER_FAILED,
        remedy="See the lines of vLLM above; the next publish connects to the replica anew.",
    ) from errors[0]
