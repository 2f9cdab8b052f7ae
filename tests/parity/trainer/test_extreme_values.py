"""What the queue lets in can be trained: its extremes lead to finite steps, whatever the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop_learning.loss.facts import LOSSES
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.config.tables import ObjectiveSettings
from dialoop_services.replay.validation import Stage, check_group
from dialoop_services.trainer.data.batches import TrainedSequence
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.samples.replay_samples import make_group, make_task, set_values

VERSION = PolicyVersion(lineage="main", number=3)
# Log-probs of the engine and of the reference, and advantages, at the ends of what append takes.
LOWEST, HIGHEST, LARGEST = -1e4, 9e-4, 1e9
EXTREMES = (
    (LOWEST, -5.0, 1.0),
    (LOWEST, LOWEST, LARGEST),
    (LOWEST, HIGHEST, -LARGEST),
    (HIGHEST, -5.0, LARGEST),
    (-5.0, LOWEST, -1.0),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


def sequences(engine: float, reference: float, advantage: float) -> list[TrainedSequence]:
    generator = np.random.default_rng(0)
    rows = []
    for index in range(4):
        ids = generator.integers(10, 250, size=9).tolist()
        pieces = [
            (ids[:5], {"source": Source.PROMPT}),
            (ids[5:], {"source": Source.MODEL, "policy_version": VERSION}),
        ]
        row = sequence_of(pieces, logprobs=np.full(4, engine, np.float32))
        row = replace(row, ref_logprobs=np.full(4, reference, np.float32))
        row = replace(row, advantage=advantage if index % 2 else -advantage)
        rows.append(TrainedSequence(sequence=row, group_index=index // 2))
    return rows


def test_the_queue_takes_these_extremes_and_nothing_beyond():
    for engine, reference, advantage in (*EXTREMES, (2 * LOWEST, 0, 0), (0, 0, 2 * LARGEST)):
        group = make_group(make_task("a"))
        for trajectory in group.trajectories:
            row = trajectory.sequences[0]
            set_values(row, "inference_logprobs", (engine, -1.0))
            set_values(row, "ref_logprobs", (reference, -1.0))
            row.advantage = advantage
        refusal = check_group(group, stage=Stage.SCORED, vocab_size=0)
        is_within = (engine, reference, advantage) in EXTREMES
        assert (refusal is None) is is_within, refusal


def losses_of_groups() -> Iterator[Any]:
    """All that read what the queue holds; the default run takes one."""
    others = pytest.mark.heavy(reason="ten losses")
    for name, facts in LOSSES.items():
        if not (facts.imitates or facts.needs_feedback):  # the others need more than numbers
            yield name if name == "grpo" else pytest.param(name, marks=others)


@pytest.mark.parametrize("name", list(losses_of_groups()))
def test_every_loss_takes_a_finite_step_of_them(model_dir: Path, name: str) -> None:
    kl = {} if LOSSES[name].needs_reference else {"kl_coeff": 0.1}
    correction = {"correction": "tis"} if LOSSES[name].needs_advantages else {}
    for objective in (ObjectiveSettings(), ObjectiveSettings(**kl, **correction)):
        settings = TrainerSettings(model_dir=model_dir, loss=name, objective=objective)
        learner = Learner(settings)
        for extreme in EXTREMES:
            rows = learner.rows_to_train(sequences(*extreme), current=VERSION)
            report = learner.train_step(rows)
            assert report.num_refused == 0, extreme
            assert np.isfinite([report.loss, report.grad_norm]).all(), extreme
