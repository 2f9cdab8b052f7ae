"""The start of vLLM: sets the variables that it reads, then imports it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

from dialoop_services.runtime.cores import threads_of

if TYPE_CHECKING:
    from dialoop_services.inference.engine import Engine, EngineOptions

LOGGING = Path(__file__).with_name("logging.json")
"""The logging config of all vLLM processes: vLLM's own, with the filter below."""

# Parts of warnings that vLLM logs at every start and end on a CPU.
_KNOWN = (
    "Triton",
    "Enforce eager set",
    "Inductor compilation was disabled",
    "SSM cache type",
    "not found in LD_PRELOAD",
    "force killing",
    "global random seed is set",
    "after the thread binding",
)


class Vllm:
    """What `engine = "vllm"` names."""

    @classmethod
    async def start(cls, model_dir: Path, options: EngineOptions) -> Engine:
        """Start a VllmEngine; InvalidConfig (VLLM_MISSING) when vLLM cannot be imported."""
        prepare(options.num_threads)
        try:
            from dialoop_services.inference.vllm_engine.engine import VllmEngine
        except Exception as error:  # a torch of another build raises RuntimeError or OSError
            raise InvalidConfig(
                f"vLLM does not import ({type(error).__name__}: {error}).",
                reason=Reason.VLLM_MISSING,
                remedy="Run `make setup`, or set DIALOOP_INFERENCE_ENGINE=transformers.",
            ) from error
        return await VllmEngine.start(model_dir, options)


def prepare(num_threads: int | None = None) -> None:
    """Set the variables that vLLM reads; those that are set already stay.

    It then asks nothing of the network, needs no compiler on a CPU, forks nothing on a GPU, and
    warns less. On a CPU it computes with `num_threads`; absent: one for each core but one.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if torch.cuda.is_available():
        # A core that is a fork of this process could not use CUDA where anything here has.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    else:
        # All layers run eagerly; the rest would need a C++ compiler at the first token.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # vLLM's engine core then runs the model itself. Else a worker process does, and on a CPU
        # each of the two burns a core while it waits for the other (benchmarks/cpu_executors.py).
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            if num_threads is not None:
                os.environ["OMP_NUM_THREADS"] = str(threads_of(num_threads))
            # As many as vLLM gives a worker: one core stays for scheduling and for the others.
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads_of(0) - 1)))
    if "VLLM_LOGGING_LEVEL" not in os.environ:  # a level that the user sets gets all messages
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(LOGGING))


class DropKnownWarnings(logging.Filter):
    """Drops the warnings that vLLM always logs on a CPU."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is no such warning."""
        text = record.getMessage()
        return record.levelno > logging.WARNING or not any(part in text for part in _KNOWN)
