"""vLLM's own weight transfer, replica's side: NCCL between devices, CUDA IPC on one device.

It needs CUDA. The calls are tested against the installed vLLM; the transfer itself was not run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from dialoop.clients.weights import TransferPhase
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.v1.engine.async_llm import AsyncLLM

    from dialoop_services.inference.weights.loadable import Step

_INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


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
    if backend == "ipc" and os.environ.get(_INSECURE) != "1":
        raise InvalidConfig(
            "vLLM reads CUDA IPC handles as pickles, which may run a caller's code.",
            reason=Reason.INSECURE_SERIALIZATION,
            remedy=f"Set {_INSECURE}=1 where only the trainer can reach this port, or use nccl.",
        )
    return {"weight_transfer_config": WeightTransferConfig(backend=backend)}


class TransferReceiver:
    """Takes the steps of one publish: `meet` before the engine pauses, `receive` while it does."""

    def __init__(self, llm: AsyncLLM, steps: AsyncIterator[Step]) -> None:
        self._llm = llm
        self._steps = steps

    async def meet(self) -> None:
        """Take INIT, if this is the first publish, and then START."""
        step = await self._next()
        if step.phase is TransferPhase.INIT:
            await self._llm.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info=_object(step))
            )
            step = await self._next()
        _require(step, TransferPhase.START)

    async def receive(self) -> None:
        """Take all tensors, and finish."""
        await self._llm.start_weight_update()
        step = await self._next()
        _require(step, TransferPhase.UPDATE)
        while step.phase is TransferPhase.UPDATE:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=step.info))
            step = await self._next()
        _require(step, TransferPhase.FINISH)
        await self._llm.finish_weight_update()

    async def _next(self) -> Step:
        step = await anext(self._steps, None)
        if step is None:
            raise _out_of_order("The stream ended before FINISH.")
        return step


def _require(step: Step, phase: TransferPhase) -> None:
    if step.phase is not phase:
        raise _out_of_order(f"Expected step {phase.name}, found {step.phase.name}.")


def _object(step: Step) -> dict[str, Any]:
    if not isinstance(step.info, dict):
        raise _out_of_order(f"The info of step {step.phase.name} is not a JSON object.")
    return step.info


def _out_of_order(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason=Reason.MANIFEST_MISMATCH,
        remedy="Send INIT once, then START, UPDATE and FINISH at each publish.",
    )
