"""One rank of a learner that takes train steps: python rank_steps.py MODEL_DIR OUT CORE,CORE STEPS.

The first rank writes what it measured to OUT. Each rank computes on one core.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.packing.rows import TokenRow
from dialoop_learning.parallel import group_commands
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.ranks import (
    RankSettings,
    join_trainer_ranks,
    learners_of,
    make_learner,
)
from dialoop_services.trainer.settings import TrainerSettings

VOCABULARY, PROMPT, LONGEST, NUM_GROUPS, GROUP_SIZE = 8192, 64, 512, 4, 4


def rows_of(step: int) -> list[TokenRow]:
    """Return groups of answers of ragged lengths, each to one prompt."""
    draw = random.Random(step)
    rows = []
    for group in range(NUM_GROUPS):
        prompt = [draw.randrange(VOCABULARY) for _ in range(PROMPT)]
        for member in range(GROUP_SIZE):
            count = draw.randint(LONGEST // 4, LONGEST)
            answer = [draw.randrange(VOCABULARY) for _ in range(count)]
            rows.append(
                TokenRow(
                    token_ids=torch.tensor(prompt + answer),
                    response_mask=torch.tensor([False] * PROMPT + [True] * count),
                    inference_logprobs=torch.full((count,), -9.0),
                    advantages=torch.full((count,), draw.gauss(0, 1)),
                    staleness=torch.zeros(count),
                    group_index=group,
                    trajectory_index=member,
                )
            )
    return rows


class Sent:
    """Counts the bytes of calls that this rank sends to others, their rows among them."""

    def __init__(self) -> None:
        self.num_bytes, self._encode = 0, group_commands.encode
        group_commands.encode = self._count

    def _count(self, arguments: object, rank: int = 0) -> bytes:
        data = self._encode(arguments, rank)
        self.num_bytes += len(data)
        return data


def measure(learner: Learner, num_steps: int) -> dict[str, Any]:
    """Return seconds, seconds on the CPU and bytes of each step but the first."""
    learner.train_step(learner_rows := rows_of(0))
    sent, steps = Sent(), []
    for step in range(1, num_steps + 1):
        rows = rows_of(step)
        started, on_cpu, before = time.perf_counter(), time.process_time(), sent.num_bytes
        report = learner.train_step(rows)
        steps.append(
            {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time() - on_cpu,
                "num_trained_tokens": report.num_trained_tokens,
                "num_forwarded_tokens": report.num_forwarded_tokens,
                "sent_bytes": sent.num_bytes - before,
                "load": os.getloadavg()[0],
            }
        )
    return {"steps": steps, "num_rows": len(learner_rows)}


def main() -> None:
    """Take the steps as the rank that the environment names."""
    model_dir, out, cores, num_steps = sys.argv[1:]
    rank = load(RankSettings)
    os.sched_setaffinity(0, {int(cores.split(",")[rank.local_rank])})
    settings = TrainerSettings.model_validate(
        {"model_dir": model_dir, "num_minibatches": 2, "max_row_tokens": 2048, "num_threads": 1}
    )
    with join_trainer_ranks(rank, settings) as ranks:
        learners = learners_of(ranks)
        if not ranks.is_first:
            learners.serve()
            return
        with closing(learners):
            figures = measure(make_learner(settings, learners), int(num_steps))
            Path(out).write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
