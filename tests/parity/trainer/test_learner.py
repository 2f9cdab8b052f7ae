"""The learner: a resumed run equals an uninterrupted one; exports load; log-probs agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop_learning.loss.facts import LOSSES
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow
from dialoop_services.config.tables import ObjectiveSettings
from dialoop_services.trainer.data.batches import TrainedSequence
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.settings import TrainerSettings

OPTIMIZERS = "tests.support.programs.own_optimizers"
VERSION = PolicyVersion(lineage="main", number=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


def learner(model_dir: Path, seed: int = 0, **settings: Any) -> Learner:
    settings = {"loss": "grpo", "warm_start": {"num_steps": 4}} | settings
    return Learner(TrainerSettings(model_dir=model_dir, seed=seed, **settings))


def sequences(count: int, seed: int) -> list[TrainedSequence]:
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        prompt = generator.integers(10, 250, size=5).tolist()
        sampled = generator.integers(10, 250, size=4 + index % 3).tolist()
        pieces = [
            (prompt, {"source": Source.PROMPT}),
            (sampled, {"source": Source.MODEL, "policy_version": VERSION}),
        ]
        row = sequence_of(pieces, logprobs=generator.uniform(-6, -5, size=len(sampled)))
        row = replace(row, advantage=1.0 if index % 2 else -1.0)
        rows.append(TrainedSequence(sequence=row, group_index=index // 2))
    return rows


@pytest.mark.parametrize(("row_tokens", "num_forwarded"), [(16, 64), (20, 40), (28, 28)])
def test_tokens_that_were_saved_and_those_that_were_computed_twice_are_counted(
    model_dir: Path, row_tokens: int, num_forwarded: int
) -> None:
    # Four answers of 4 tokens to one prompt of 12: 28 distinct prefixes. Rows hold 1, 2, all four.
    rows = [
        TokenRow(
            token_ids=torch.tensor([*range(10, 22), 30 + n, 1, 2, 3]),
            response_mask=torch.arange(16) >= 12,
            inference_logprobs=torch.full((4,), -5.5),
            advantages=torch.full((4,), n - 1.5),
        )
        for n in range(4)
    ]
    trained = learner(model_dir, max_row_tokens=row_tokens, max_model_len=16, num_minibatches=1)
    report = trained.train_step(rows)
    assert report.num_forwarded_tokens == num_forwarded
    assert report.num_saved_tokens == 64 - num_forwarded
    assert report.forwarded_per_distinct == num_forwarded / 28


@pytest.mark.parametrize("optimizer", ["adamw", f"{OPTIMIZERS}:Smooth", f"{OPTIMIZERS}:momentum"])
def test_a_resumed_learner_takes_the_same_steps_as_one_that_never_stopped(
    model_dir: Path, tmp_path: Path, optimizer: str
) -> None:
    steady = learner(model_dir, optimizer=optimizer)
    steady.train_step(steady.rows_to_train(sequences(8, 1), current=VERSION))
    Checkpoints(tmp_path).save(steady, JobState(policy_version=VERSION, num_train_steps=1))
    resumed = learner(model_dir, seed=99, optimizer=optimizer)
    progress = Checkpoints(tmp_path).restore(resumed)
    assert progress is not None
    assert progress.policy_version == VERSION
    after = [
        m.train_step(m.rows_to_train(sequences(8, 2), current=VERSION)) for m in (steady, resumed)
    ]
    assert after[0] == after[1]
    probe = [[5, 6, 7, 8, 9]]
    assert np.array_equal(steady.logprobs(probe)[0], resumed.logprobs(probe)[0])


def test_a_checkpoint_of_another_optimizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    saved = learner(model_dir, optimizer=f"{OPTIMIZERS}:Smooth")
    Checkpoints(tmp_path).save(saved, JobState(policy_version=VERSION, num_train_steps=1))
    with pytest.raises(InvalidConfig, match=r"by tests.*:Smooth") as caught:
        Checkpoints(tmp_path).restore(learner(model_dir))
    assert caught.value.reason == "OPTIMIZER_MISMATCH"


def test_a_train_step_moves_the_weights_and_reports_finite_numbers(model_dir: Path) -> None:
    trained = learner(model_dir)
    probe = [[5, 6, 7, 8, 9]]
    before = trained.logprobs(probe)[0]
    report = trained.train_step(trained.rows_to_train(sequences(8, 3), current=VERSION))
    assert report.num_updates == 2
    assert np.isfinite([report.loss, report.grad_norm, report.metrics["ess"]]).all()
    assert not np.array_equal(before, trained.logprobs(probe)[0])


def test_exported_weights_are_the_policy(model_dir: Path, tmp_path: Path) -> None:
    trained, other = learner(model_dir), learner(model_dir)
    trained.warm_start_step(trained.rows_to_imitate([s.sequence for s in sequences(8, 4)]))
    weights = trained.export(tmp_path / "model.safetensors")
    assert weights.num_bytes == weights.path.stat().st_size
    other.state.read_weights(weights.path)
    probe = [[5, 6, 7, 8, 9], [1, 2]]
    for mine, theirs in zip(trained.logprobs(probe), other.logprobs(probe), strict=True):
        assert np.array_equal(mine, theirs)


def test_progress_survives_its_json() -> None:
    progress = JobState(policy_version=VERSION, num_train_steps=7, consumed_group_ids={"a": 3})
    progress.staleness_histogram.update([0, 1, 1])
    progress.forks.update(["history_rewritten"])
    assert JobState.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_an_objective_with_epochs_and_a_correction_trains_around_the_proximal_policy(
    model_dir: Path,
) -> None:
    objective = ObjectiveSettings(correction="tis", num_epochs=2, entropy_coeff=0.01)
    trained = Learner(TrainerSettings(model_dir=model_dir, loss="grpo", objective=objective))
    report = trained.train_step(trained.rows_to_train(sequences(8, 4), current=VERSION))
    assert report.num_updates == 4
    assert report.metrics["correction_weight"] > 0
    assert report.metrics["entropy"] > 0
    assert list(report.metrics["by_staleness"]) == [0]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_entropy_is_measured_by_staleness_unless_it_is_not_wanted(
    model_dir: Path, is_wanted: bool
) -> None:
    objective = ObjectiveSettings(entropy_metric=is_wanted)
    trained = Learner(TrainerSettings(model_dir=model_dir, objective=objective))
    report = trained.train_step(trained.rows_to_train(sequences(4, 5), current=VERSION))
    assert ("entropy" in report.metrics) is is_wanted
    assert all(("entropy" in m) is is_wanted for m in report.metrics["by_staleness"].values())


OF_ADVANTAGES = [
    name
    for name, facts in LOSSES.items()
    if not (facts.imitates or facts.needs_reference or facts.needs_feedback)
]


@pytest.mark.parametrize("name", OF_ADVANTAGES)
def test_every_loss_takes_a_train_step(model_dir: Path, name: str) -> None:
    trained = Learner(TrainerSettings(model_dir=model_dir, loss=name))
    report = trained.train_step(trained.rows_to_train(sequences(4, 5), current=VERSION))
    assert report.num_refused == 0
    assert np.isfinite(report.loss)
