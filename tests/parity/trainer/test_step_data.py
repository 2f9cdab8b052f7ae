"""What a train step makes of its sequences before and while it cuts them into updates."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dialoop.errors import InvalidInput, InvalidSequence
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import PackedBatch, TokenRow
from dialoop_learning.training import truncate
from dialoop_services.trainer.data.batches import TrainedSequence
from dialoop_services.trainer.learner import learner as learner_module
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings

VERSION = PolicyVersion(lineage="main", number=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def trained_batches(monkeypatch: pytest.MonkeyPatch) -> list[PackedBatch]:
    """The packed rows that updates get, in their order."""
    seen: list[PackedBatch] = []
    real = learner_module.forward_backward

    def watch(policy: Any, rows: Rows[PackedBatch], *args: Any, **named: Any) -> Any:
        seen.extend(rows)
        return real(policy, rows, *args, **named)

    monkeypatch.setattr(learner_module, "forward_backward", watch)
    return seen


def sequence(first: int, advantage: float, size: int = 3) -> Sequence:
    """Of a prompt of one token, which names it."""
    pieces: list[tuple[list[int], dict[str, Any]]] = [
        ([first], {"source": Source.PROMPT}),
        (list(range(20, 20 + size)), {"source": Source.MODEL, "policy_version": VERSION}),
    ]
    return replace(sequence_of(pieces, logprobs=[-5.5] * size), advantage=advantage)


def advantages_by_name(rows: list[PackedBatch]) -> dict[int, float]:
    advantages = {}
    for row in rows:
        starts = row.cu_seqlens[:-1].tolist()
        assert row.advantages is not None
        advantages |= {int(row.packed_tokens[s]): float(row.advantages[s + 1]) for s in starts}
    return advantages


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_whitened_advantages_are_those_of_the_train_step_however_it_is_cut(
    model_dir: Path, trained_batches: list[PackedBatch], num_minibatches: int
) -> None:
    settings = TrainerSettings(
        model_dir=model_dir, loss="reinforce_pp", num_minibatches=num_minibatches
    )
    advantages = dict(zip(range(5, 9), (-2.0, -1.0, 1.0, 2.0), strict=True))
    rows = [TrainedSequence(sequence=sequence(n, a), group_index=n) for n, a in advantages.items()]
    learner = Learner(settings)
    learner.train_step(learner.rows_to_train(rows, current=VERSION))
    std = float(torch.tensor(list(advantages.values())).std(correction=0))
    expected = {name: advantage / std for name, advantage in advantages.items()}
    assert advantages_by_name(trained_batches) == pytest.approx(expected, rel=1e-6)


def sampled_at(learner: Learner, temperature: float, first: int) -> TrainedSequence:
    """As an engine with the learner's own weights would have sampled it at this temperature."""
    row = sequence(first, advantage=1.0)
    (logprobs,) = learner.logprobs([row.token_ids.tolist()], temperature=temperature)
    row = replace(row, inference_logprobs=logprobs.astype(np.float32))
    return TrainedSequence(sequence=row, group_index=first, temperature=temperature)


@pytest.mark.parametrize("proximal", [False, True])
def test_each_sequence_is_trained_at_the_temperature_it_was_sampled_with(
    model_dir: Path, proximal: bool
) -> None:
    settings = TrainerSettings.model_validate(
        {"model_dir": model_dir, "num_minibatches": 1, "objective": {"proximal": proximal}}
    )
    learner = Learner(settings)
    rows = [sampled_at(learner, t, 5 + i) for i, t in enumerate((0.5, 1.0, 1.7))]
    report = learner.train_step(learner.rows_to_train(rows, current=VERSION))
    assert report.fresh_mismatch_kl == pytest.approx(0.0, abs=1e-9)
    assert report.metrics["ess"] == pytest.approx(1.0)


def test_what_was_sampled_greedily_is_refused_by_name(model_dir: Path) -> None:
    learner = Learner(TrainerSettings(model_dir=model_dir))
    greedy = TrainedSequence(sequence=sequence(5, 1.0), group_index=0, temperature=0.0)
    with pytest.raises(InvalidSequence) as caught:
        learner.rows_to_train([greedy], current=VERSION)
    assert caught.value.reason == "GREEDY_SAMPLING"


def test_a_sequence_without_the_engines_logprobs_is_refused_by_name(model_dir: Path) -> None:
    learner = Learner(TrainerSettings(model_dir=model_dir, loss="grpo"))
    unscored = replace(sequence(5, 1.0), inference_logprobs=np.zeros(0, dtype=np.float32))
    with pytest.raises(InvalidInput, match="needs inference_logprobs") as caught:
        learner.rows_to_train([TrainedSequence(sequence=unscored, group_index=0)], current=VERSION)
    assert caught.value.reason == "LOSS_INPUT_MISSING"


def rewarded_rows(advantages: tuple[float, ...]) -> list[TrainedSequence]:
    return [
        TrainedSequence(sequence=sequence(5 + i, a), group_index=0)
        for i, a in enumerate(advantages)
    ]


def test_a_sequence_of_advantage_0_counts_and_has_its_kl_term(
    model_dir: Path, trained_batches: list[PackedBatch]
) -> None:
    objective = {"kl_coeff": 1.0, "kl_to": "inference"}
    settings = TrainerSettings.model_validate(
        {"model_dir": model_dir, "loss": "grpo", "num_minibatches": 1, "objective": objective}
    )
    learner = Learner(settings)
    report = learner.train_step(
        learner.rows_to_train(rewarded_rows((1.0, 0.0, -1.0, 0.0)), current=VERSION)
    )
    assert report.num_trained_tokens == 12
    assert advantages_by_name(trained_batches) == {5: 1.0, 6: 0.0, 7: -1.0, 8: 0.0}


@pytest.mark.parametrize("loss", ["sft", "minor_sft"])
def test_a_loss_that_imitates_leaves_out_what_the_scorer_did_not_choose(
    model_dir: Path, trained_batches: list[PackedBatch], loss: str
) -> None:
    learner = Learner(TrainerSettings(model_dir=model_dir, loss=loss, num_minibatches=1))
    sequences = [
        replace(
            entry, sequence=replace(entry.sequence, ref_logprobs=entry.sequence.inference_logprobs)
        )
        for entry in rewarded_rows((0.0, 1.0, 0.0, 1.0))
    ]
    report = learner.train_step(learner.rows_to_train(sequences, current=VERSION))
    assert report.num_trained_tokens == 6
    assert advantages_by_name(trained_batches) == {6: 1.0, 8: 1.0}
    assert learner.rows_to_train(sequences[:1], current=VERSION) == []


@pytest.mark.parametrize(
    ("aggregation", "factor"), [("token", 1.0), ("sum", 9.0), ("constant", 0.9)]
)
def test_sft_aggregates_as_the_config_says(
    model_dir: Path, aggregation: str, factor: float
) -> None:
    """Of 2 demonstrations, 3 and 6 tokens to learn: constant is 9 / (2 * 5) of token."""
    objective = {"aggregation": aggregation, "constant": 5.0}
    shown = [sequence(5, 0.0, size=3), sequence(6, 0.0, size=6)]
    settings = {"model_dir": model_dir, "mode": "sft"}
    losses = []
    for more in ({}, {"objective": objective}):
        learner = Learner(TrainerSettings.model_validate(settings | more))
        losses.append(learner.sft_step(learner.rows_to_imitate(shown)).loss)
    plain, weighted = losses
    assert weighted == pytest.approx(factor * plain, rel=1e-5)


@pytest.mark.parametrize(
    ("oversize", "lengths"), [("drop", [4]), ("truncate", [16, 4]), ("error", None)]
)
def test_a_sequence_longer_than_a_row_is_treated_as_the_config_says(
    model_dir: Path, oversize: str, lengths: list[int] | None
) -> None:
    """Of prompts of one token with 24 and 3 sampled ones, and a prompt that fills the row."""
    settings = {"model_dir": model_dir, "max_row_tokens": 16, "oversize": oversize}
    learner = Learner(TrainerSettings.model_validate(settings))
    full = sequence_of(
        [
            (list(range(5, 25)), {"source": Source.PROMPT}),
            ([7], {"source": Source.MODEL, "policy_version": VERSION}),
        ],
        logprobs=[-5.5],
    )
    rows = [sequence(5, 1.0, size=24), sequence(6, -1.0), replace(full, advantage=1.0)]
    sequences = [TrainedSequence(sequence=row, group_index=0) for row in rows]
    if lengths is None:
        with pytest.raises(InvalidInput, match="Sequence 0 has 25 tokens") as caught:
            learner.rows_to_train(sequences, current=VERSION)
        assert "max_row_tokens" in caught.value.remedy
        return
    kept = learner.rows_to_train(sequences, current=VERSION)
    assert [len(row.token_ids) for row in kept] == lengths
    assert learner.train_step(
        learner.rows_to_train(sequences, current=VERSION)
    ).num_trained_tokens == sum(lengths) - len(kept)
    with pytest.raises(InvalidInput, match=r"None of [0-9]+ sequences can be trained") as caught:
        learner.rows_to_train(sequences[2:], current=VERSION)
    assert caught.value.reason == "SEQUENCE_TOO_LONG"


def test_what_is_truncated_keeps_what_is_known_of_its_first_tokens() -> None:
    row = TokenRow.from_sequence(sequence(5, 1.0, size=24), current=VERSION)
    cut = truncate(row, 16)
    assert cut.inference_logprobs is not None
    assert cut.staleness is not None
    assert cut.advantages is not None
    assert {len(cut.inference_logprobs), len(cut.staleness), len(cut.advantages)} == {15}
    assert cut.token_ids.tolist() == row.token_ids[:16].tolist()


def test_sft_is_held_to_the_starting_model_where_that_is_asked_for(model_dir: Path) -> None:
    """Before the first step they are one; log 2 is minor_sft's loss where nothing has moved."""
    shown = [sequence(5, 0.0, size=3), sequence(6, 0.0, size=6)]
    settings = {"model_dir": model_dir, "mode": "sft", "learning_rate": 1e-2}
    held = Learner(TrainerSettings.model_validate(settings | {"objective": {"kl_coeff": 0.5}}))
    terms = [held.sft_step(held.rows_to_imitate(shown)).metrics["kl_to_ref"] for _ in range(3)]
    assert terms[0] == pytest.approx(0.0, abs=1e-6)
    assert terms[2] > 1e-3
    minor = Learner(TrainerSettings.model_validate(settings | {"loss": "minor_sft"}))
    losses = [minor.sft_step(minor.rows_to_imitate(shown)).loss for _ in range(3)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[2] < losses[0]


def test_the_debug_tables_logprobs_are_the_policys_at_each_rows_temperature(
    model_dir: Path,
) -> None:
    learner = Learner(TrainerSettings(model_dir=model_dir))
    played = [sampled_at(learner, t, 5 + i) for i, t in enumerate((0.5, 1.7))]
    rows = learner.rows_to_train(played, current=VERSION)
    for row, logprobs in zip(played, learner.logprobs_of_rows(rows), strict=True):
        assert logprobs.tolist() == pytest.approx(row.sequence.inference_logprobs, abs=1e-5)
