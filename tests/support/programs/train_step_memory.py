"""Take train steps of one sequence each and print the process's memory before each and at its peak.

python -m tests.support.programs.train_step_memory DIRECTORY '[{"num_tokens": 1000}, ...]'

A process of its own, so that nothing else counts. Linux forgets the peak of a process that is asked
to (clear_refs), so one process measures several steps. Other fields of a step are settings of the
trainer, and lora_rank. With {"device": "cuda"} the peak is what torch allocated on the device.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.packing.rows import TokenRow
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings

_FORGET_PEAK = "5"


def status_bytes(name: str) -> int:
    """Return a field of Linux's /proc/self/status: VmRSS is the memory now, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def forget() -> int:
    """Give freed memory back, forget the peak, and return the memory that is left."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_FORGET_PEAK, encoding="utf-8")
    return status_bytes("VmRSS")


def measure(directory: Path, num_tokens: int, lora_rank: int = 0, **values: Any) -> dict[str, Any]:
    """Return the memory of one process before it has a model, with it, and at the step's peak."""
    empty = forget()
    settings = TrainerSettings(
        model_dir=directory,
        run_dir=directory.parent,
        mode="sft",
        max_row_tokens=num_tokens,
        model={"lora_rank": lora_rank},
        **values,
    )
    learner = Learner(settings)
    loaded = forget()
    on_device = values.get("device") == "cuda"
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(learner.vocab_size, (num_tokens,), generator=generator).tolist()
    row = TokenRow.from_demonstration(ids, [False] + [True] * (num_tokens - 1))
    few = TokenRow.from_demonstration(ids[:16], [False] + [True] * 15)
    learner.sft_step([few])  # the optimiser has no state before its first step
    forget()
    began = time.process_time()
    learner.sft_step([row])
    cpu_s = time.process_time() - began
    peak = torch.cuda.max_memory_allocated() if on_device else status_bytes("VmHWM")
    return {"empty": empty, "loaded": loaded, "peak": peak, "cpu_s": round(cpu_s, 1)}


if __name__ == "__main__":
    for step in json.loads(sys.argv[2]):
        figures = measure(Path(sys.argv[1]), **step)
        sys.stdout.write(json.dumps(step | figures) + "\n")
        sys.stdout.flush()
