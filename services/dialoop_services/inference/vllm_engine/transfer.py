"""vLLM's own weight transfer, replica's side: NCCL between devices, CUDA IPC on one device.

Nothing goes to vLLM as it came over the wire. What a step says is read field by field, and its
parameters must be the model's; no pickle is read, here or in vLLM. It needs CUDA, and docs/scale.md
says what of it was run.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from dialoop.clients.weights import SharedTensor, TransferPhase
from dialoop.errors import InternalError, InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from dialoop_services.inference.vllm_engine import internals
from dialoop_services.inference.weights.parameters import require_shapes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dialoop_learning.model.weight_files import Shapes
    from vllm.v1.engine.async_llm import AsyncLLM

    from dialoop_services.inference.weights.loadable import Step

log = logging.getLogger(__name__)

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_NCCL_FIELDS: Mapping[str, type] = {
    "nccl_unique_id_b64": str,
    "rank_offset": int,
    "world_size": int,
    "packed": bool,
    "packed_buffer_size_bytes": int,
    "packed_num_buffers": int,
}
"""What INIT says of NCCL. vLLM knows another way to meet too, in which it would read a pickle from
whatever address it is told."""
_HANDLE_BYTES, _MOST_HANDLE_BYTES = 64, 4096  # an allocation in segments has a handle for each
_COUNTER = re.compile(r"/torch_[0-9A-Za-z_]{1,200}")
_NUM_COUNTERS = 10_000  # in one of torch's files
_DEVICE = re.compile(r"[0-9A-Za-z-]{1,64}")


def transfer_arguments(backend: str) -> dict[str, Any]:
    """Return the arguments of AsyncEngineArgs; InvalidConfig (NEEDS_CUDA) without a device."""
    if not backend:
        return {}
    if not torch.cuda.is_available():
        raise InvalidConfig(
            f"Weight transfer by {backend} needs a CUDA device, and this machine has none.",
            reason=Reason.NEEDS_CUDA,
            remedy="Set DIALOOP_INFERENCE_DATA_PLANE to shared_memory or chunks: weights then come "
            "as a file or over gRPC.",
        )
    if backend == "nccl":
        _require_nccl()
    return {"weight_transfer_config": WeightTransferConfig(backend=backend)}


def _require_nccl() -> None:
    """Raise InvalidConfig (NCCL_UNUSABLE) where vLLM would send and receive nothing, silently."""
    try:
        NCCLLibrary()
    except Exception as error:  # OSError without a library, AttributeError with too old a one
        raise InvalidConfig(
            f"vLLM cannot use the NCCL that is installed ({error}).",
            reason=Reason.NCCL_UNUSABLE,
            remedy="Install the torch that this vLLM was built for, which brings its NCCL, or set "
            "DIALOOP_INFERENCE_DATA_PLANE to shared_memory or chunks.",
        ) from error


async def in_workers(llm: AsyncLLM, method: str, *arguments: Any) -> None:
    """Call a method of the worker extension that takes weights; InternalError where it fails."""
    errors = await llm.collective_rpc(method, args=arguments)
    if failed := [error for error in errors if error]:
        raise InternalError(f"vLLM could not take the weights: {failed[0]}")


class TransferReceiver:
    """Takes the steps of publishes: `meet` before the engine pauses, `receive` while it does."""

    def __init__(self, llm: AsyncLLM, *, backend: str, shapes: Shapes, tied: bool) -> None:
        self._llm = llm
        self._backend = backend
        self._shapes = shapes
        self._tied = tied
        self._is_connected = False

    async def meet(self, steps: AsyncIterator[Step]) -> None:
        """Take INIT, if this is the trainer's first publish to this engine, and then START."""
        step = await _next(steps)
        if step.phase is TransferPhase.INIT:
            info = _nccl_info(step) if self._backend == "nccl" else {"packed": False}
            await in_workers(self._llm, "dialoop_connect", info)
            self._is_connected = True
            step = await _next(steps)
        _require(step, TransferPhase.START)
        if not self._is_connected:
            raise PreconditionFailed(
                "This replica is not connected with the trainer: it has started anew, say.",
                reason=Reason.TRANSFER_NOT_CONNECTED,
                remedy="Begin with the step INIT.",
            )

    async def receive(self, steps: AsyncIterator[Step]) -> None:
        """Take all tensors, and finish."""
        await self._llm.start_weight_update()
        try:
            await self._take_all(steps)
        except BaseException:
            await self._end_update()  # else no other could begin
            raise
        await self._llm.finish_weight_update()

    async def _take_all(self, steps: AsyncIterator[Step]) -> None:
        taken: Shapes = {}
        step = await _next(steps)
        _require(step, TransferPhase.UPDATE)
        while step.phase is TransferPhase.UPDATE:
            taken |= await (self._open(step) if self._backend == "ipc" else self._broadcast(step))
            step = await _next(steps)
        _require(step, TransferPhase.FINISH)
        require_shapes(taken, self._shapes, tied=self._tied)

    async def _open(self, step: Step) -> Shapes:
        """Open the tensors that the trainer shares."""
        shapes = self._fitting([(each.name, each.dtype, each.shape) for each in step.tensors])
        for tensor in step.tensors:
            _require_handles(tensor)
        tensors = [_plain(tensor) for tensor in step.tensors]
        await in_workers(self._llm, "dialoop_open", tensors)
        return shapes

    async def _broadcast(self, step: Step) -> Shapes:
        """Receive the tensors that the step names, in its order."""
        info = _fields(step, {"names": list, "dtype_names": list, "shapes": list})
        try:
            rows = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
            shapes = self._fitting([(str(n), str(d), tuple(map(int, s))) for n, d, s in rows])
        except (TypeError, ValueError) as error:
            raise _out_of_order("The step UPDATE does not name parameters.") from error
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        return shapes

    def _fitting(self, parameters: list[tuple[str, str, tuple[int, ...]]]) -> Shapes:
        """Return the shapes of parameters by name, each one of the model's."""
        if unknown := {dtype for _, dtype, _ in parameters} - _DTYPES:
            raise _out_of_order(f"There is no number format {min(unknown)!r:.40}.")
        shapes = {name: shape for name, _, shape in parameters}
        require_shapes(shapes, self._shapes, tied=False, is_whole=False)
        return shapes

    async def _end_update(self) -> None:
        try:
            await self._llm.finish_weight_update()
        except Exception as error:  # it has ended the update itself, where it failed in it
            log.info("vLLM had ended the update.", extra={"error": str(error)})


class TransferWorker:
    """The worker's part of a transfer, as a base class of vLLM's worker extension.

    Its methods return an error's text, empty for none, as those of WeightsExtension do.
    """

    init_weight_transfer_engine: Any
    update_weights: Any

    def dialoop_connect(self, info: dict[str, Any]) -> str:
        """Prepare vLLM's transfer; over NCCL this meets the trainer."""
        try:
            self.init_weight_transfer_engine(info)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        is_off = internals.is_nccl_off(self)
        return "its NCCL is off, so it would receive nothing." if is_off else ""

    def dialoop_open(self, tensors: list[dict[str, Any]]) -> str:
        """Load tensors that the trainer shares over CUDA IPC."""
        try:
            self.update_weights(_update_of(tensors))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def _update_of(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return shared tensors as vLLM takes them: each as arguments of torch's rebuild_cuda_tensor.

    They are made here, in the worker: vLLM's own socket would carry them as a pickle.
    """
    handles = []
    for each in tensors:
        shape, dtype = torch.Size(each["shape"]), getattr(torch, each["dtype"])
        event = each["event_handle"]
        arguments = (
            torch.Tensor,
            shape,
            torch.empty(shape, device="meta").stride(),
            0,  # where in its storage it begins
            torch.storage.TypedStorage,
            dtype,
            0,  # vLLM puts its own number of the device here
            each["memory_handle"],
            shape.numel() * dtype.itemsize,
            each["memory_offset"],
            False,  # it needs no gradient
            each["counter_name"].encode(),
            each["counter_offset"],
            event or bytes(_HANDLE_BYTES),
            bool(event),
        )
        handles.append({each["device"]: arguments})
    return {
        "names": [each["name"] for each in tensors],
        "dtype_names": [each["dtype"] for each in tensors],
        "shapes": [list(each["shape"]) for each in tensors],
        "ipc_handles": handles,
    }


async def _next(steps: AsyncIterator[Step]) -> Step:
    step = await anext(steps, None)
    if step is None:
        raise _out_of_order("The stream ended before FINISH.")
    return step


def _require(step: Step, phase: TransferPhase) -> None:
    if step.phase is not phase:
        raise _out_of_order(f"Expected step {phase.name}, found {step.phase.name}.")


def _nccl_info(step: Step) -> dict[str, Any]:
    info = _fields(step, _NCCL_FIELDS)
    if min(info["world_size"], info["packed_buffer_size_bytes"], info["packed_num_buffers"]) < 1:
        raise _out_of_order("The step INIT has a size below 1.")
    return info


def _fields(step: Step, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the info of a step, which has these fields and no others."""
    info = step.info if isinstance(step.info, dict) else {}
    if info.keys() != kinds.keys() or any(type(info[name]) is not kinds[name] for name in kinds):
        raise _out_of_order(f"The info of step {step.phase.name} is not {', '.join(kinds)}.")
    return info


def _require_handles(tensor: SharedTensor) -> None:
    """Refuse what could be no handle of CUDA, or no counter of torch."""
    is_fine = (
        _HANDLE_BYTES <= len(tensor.memory_handle) <= _MOST_HANDLE_BYTES
        and len(tensor.event_handle) in (0, _HANDLE_BYTES)
        and tensor.memory_offset >= 0
        and 0 <= tensor.counter_offset < _NUM_COUNTERS
        and _COUNTER.fullmatch(tensor.counter_name)
        and _DEVICE.fullmatch(tensor.device)
    )
    if not is_fine:
        raise _out_of_order(f"The handles of {tensor.name} are none of CUDA's.")


def _plain(tensor: SharedTensor) -> dict[str, Any]:
    """Return the tensor as vLLM's socket carries it to a worker without a pickle."""
    return {name: getattr(tensor, name) for name in tensor.__slots__}


def _out_of_order(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason=Reason.MANIFEST_MISMATCH,
        remedy="Send INIT once, then START, UPDATE and FINISH at each publish.",
    )
