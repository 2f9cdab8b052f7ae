"""One rank that saves a model of random numbers: python saving_worker.py DIRECTORY, under torchrun.

The first rank writes out each rank's peak of memory above what it had before, and the bytes of its
part.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from dialoop_learning.model.policy import PolicyModel
from dialoop_learning.model.tiny import tiny_config
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.parallel.parallel_state import begin_saving, end_saving
from dialoop_learning.parallel.ranks import join_ranks, shard
from transformers import Qwen2ForCausalLM

NUMBERS = 3  # weights, and two of AdamW


def peak_bytes() -> int:
    """The largest resident set since it was asked to be counted anew."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def main() -> None:
    """Save once, as this rank."""
    config = tiny_config()
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 1024, 3072, 16
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with join_ranks(rank=rank, size=size) as ranks:
        torch.manual_seed(0)
        policy = shard(PolicyModel(Qwen2ForCausalLM(config)), ranks)
        optimizer = GuardedOptimizer(policy.causal_lm.named_parameters(), OptimizerSettings())
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(0.0)
        own = NUMBERS * 4 * sum(p.to_local().numel() for p in policy.parameters())  # type: ignore[attr-defined]
        apart = ranks.apart()
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
        before = psutil.Process().memory_info().rss
        end_saving(begin_saving(Path(sys.argv[1]), policy, {"train": optimizer}, apart))
        found = ranks.gather([peak_bytes() - before, own])
        if ranks.is_first:
            sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
