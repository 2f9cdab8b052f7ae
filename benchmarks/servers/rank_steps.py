"""One rank of a learner that takes train steps: rank_steps.py MODEL_DIR OUT CORE,CORE STEPS SAVES.

The first rank writes what it measured to OUT. Each of several ranks computes on one core.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from dialoop_learning.packing.rows import TokenRow
from dialoop_learning.parallel import group_commands
from dialoop_services.runtime.durable import sync_tree
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


def measure_saves(learner: Learner, folder: Path, num_saves: int) -> list[dict[str, float]]:
    """Return seconds of a step alone and beside a save, and of what a save holds up and takes.

    whole_s: of a save that a step waits for, to the disk. held_s, behind_s: of one that is written
    beside the next step, the copy and the rest.
    """
    few, saves = rows_of(0)[:GROUP_SIZE], []
    with ThreadPoolExecutor(1) as other:
        for number in range(num_saves):
            began = time.perf_counter()
            learner.train_step(few)
            stepped = time.perf_counter()
            save(learner, folder / f"{number} whole")()
            saved = time.perf_counter()
            rest = save(learner, folder / f"{number} beside")
            held = time.perf_counter()
            ended = other.submit(lambda rest=rest: (rest(), time.perf_counter())[1])
            learner.train_step(few)
            beside = time.perf_counter()
            saves.append(
                {
                    "step_s": stepped - began,
                    "whole_s": saved - stepped,
                    "held_s": held - saved,
                    "beside_s": beside - held,
                    "behind_s": ended.result() - held,
                }
            )
            shutil.rmtree(folder)
    return saves


def save(learner: Learner, directory: Path) -> Callable[[], None]:
    """Begin to save as a trainer does, and return what ends it on the disk."""
    directory.mkdir(parents=True)
    wait = learner.snapshot(directory)

    def end() -> None:
        wait()
        sync_tree(directory)

    return end


def main() -> None:
    """Take the steps as the rank that the environment names."""
    model_dir, out, cores, num_steps, num_saves = sys.argv[1:]
    rank, num_threads = load(RankSettings), 1
    if rank.world_size > 1 or not int(num_saves):
        os.sched_setaffinity(0, {int(cores.split(",")[rank.local_rank])})
    else:
        num_threads = len(os.sched_getaffinity(0))
    fields = {"num_minibatches": 2, "max_row_tokens": 2048, "num_threads": num_threads}
    settings = TrainerSettings.model_validate({"model_dir": model_dir, **fields})
    with join_trainer_ranks(rank, settings) as ranks:
        learners = learners_of(ranks)
        if not ranks.is_first:
            learners.serve()
            return
        with closing(learners):
            learner, folder = make_learner(settings, learners), Path(out).with_suffix(".saves")
            figures = measure(learner, int(num_steps)) if int(num_steps) else {}
            figures["saves"] = measure_saves(learner, folder, int(num_saves))
            Path(out).write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
