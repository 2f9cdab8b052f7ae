"""One rank of a learner: python parallel_learner_worker.py MODEL_DIR OUT, with RANK and so on."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from dialoop.errors import DialoopError
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.data.batches import TrainedSequence
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.ranks import (
    RankSettings,
    join_trainer_ranks,
    learners_of,
    make_learner,
)
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.settings import TrainerSettings

VERSION = PolicyVersion(lineage="main", number=3)


def settings_of(model_dir: Path) -> TrainerSettings:
    """Of a learner that asks for proximal log-probs, and takes two updates a step."""
    objective = {"correction": "tis", "proximal": True}
    return TrainerSettings.model_validate(
        {
            "model_dir": model_dir,
            "loss": "grpo",
            "max_row_tokens": 64,
            "objective": objective,
            "sharded_checkpoints": False,  # a file of them is damaged
        }
    )


def sequences(seed: int, *, longest: int = 9) -> list[TrainedSequence]:
    """Eight of a prompt of 5 tokens and an answer of up to `longest`."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(8):
        sampled = generator.integers(10, 250, size=longest - index % 3).tolist()
        pieces: list[tuple[list[int], dict[str, Any]]] = [
            (generator.integers(10, 250, size=5).tolist(), {"source": Source.PROMPT}),
            (sampled, {"source": Source.MODEL, "policy_version": VERSION}),
        ]
        row = sequence_of(pieces, logprobs=generator.uniform(-6, -5, size=len(sampled)))
        row = replace(row, advantage=1.0 if index % 2 else -1.0)
        rows.append(TrainedSequence(sequence=row, group_index=index // 2))
    return rows


def without_advantages(rows: list[TrainedSequence]) -> list[TrainedSequence]:
    """The same as nobody has scored them."""
    return [replace(row, sequence=replace(row.sequence, advantage=None)) for row in rows]


def take_steps(learner: Learner, out: Path) -> list[Any]:
    """Steps of each kind, with three that are refused; what was answered, as JSON."""
    results: list[Any] = []
    shown = [row.sequence for row in sequences(7)]
    results.append(learner.warm_start_step(learner.rows_to_imitate(shown)).loss)
    for rows in (
        sequences(1),
        sequences(2, longest=100),
        without_advantages(sequences(2)),
        sequences(3),
    ):
        try:
            report = learner.train_step(learner.rows_to_train(rows, current=VERSION))
        except DialoopError as error:
            results.append(error.reason)
        else:
            results.append([report.loss, report.grad_norm, report.num_trained_tokens])
    try:
        learner.restore(out / "nothing")
    except DialoopError as error:
        results.append(error.reason)
    results.append(restored_step(learner, out))
    results.append(learner.sft_step(learner.rows_to_imitate(shown)).loss)
    results.append(learner.heldout_loss(learner.rows_to_imitate(shown)))
    results.append([float(row.sum()) for row in learner.logprobs([[5, 6, 7], [8, 9]])])
    results.append(learner.num_parameters)
    results.append(learner.export(out / "model.safetensors").num_bytes)
    return results


def restored_step(learner: Learner, out: Path) -> int:
    """Save the learner twice, damage the newer checkpoint, and continue from what is left."""
    run_dir = out / "run"
    for step in (1, 2):
        state = JobState(policy_version=VERSION, num_train_steps=step)
        newest = Checkpoints(run_dir).save(learner, state)
    weights = newest / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    restored = Checkpoints(run_dir).restore(learner)
    assert restored is not None
    return restored.num_train_steps


def main() -> None:
    """This rank, to its end."""
    settings, out = settings_of(Path(sys.argv[1])), Path(sys.argv[2])
    with join_trainer_ranks(load(RankSettings), settings) as ranks:
        learners = learners_of(ranks)
        if not ranks.is_first:
            learners.serve()
            return
        with closing(learners):
            learner = make_learner(settings, learners)
            (out / "results.json").write_text(json.dumps(take_steps(learner, out)), "utf-8")


if __name__ == "__main__":
    main()
