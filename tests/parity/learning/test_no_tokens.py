"""Updates without a token to train: their loss, metrics and gradient are 0, for every loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.facts import LOSSES
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.loss.losses import LossInputs
from dialoop_learning.loss.objective import combine_metrics, mean_metrics
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import (
    StepCounts,
    loss_inputs,
    whiten_rows,
    whiten_sequences,
)

AGGREGATIONS = ("token", "sequence", "prompt", "constant", "sum")
CORRECTIONS = ("tis", "icepop", "token_mask", "sequence_mask", "kl_mask")


def inputs_without_tokens(num_masked: int) -> LossInputs:
    """No trained token, or only masked ones, in an update that counts nothing."""
    values = torch.full((num_masked,), -1.0)
    return LossInputs(
        policy_logprobs=values.clone().requires_grad_(),
        sequence_index=torch.zeros(num_masked, dtype=torch.int64),
        loss_mask=torch.zeros(num_masked, dtype=torch.bool),
        num_tokens=0,
        num_sequences=0,
        num_prompts=0,
        prompt_num_tokens=values * 0,
        trajectory_num_tokens=values * 0,
        inference_logprobs=values,
        proximal_logprobs=values,
        ref_logprobs=values,
        advantages=values,
        entropy=values.clone().requires_grad_(),
        staleness=values * 0,
    )


def objectives() -> list[Any]:
    cases: list[tuple[str, str, dict[str, Any]]] = []
    for name, facts in LOSSES.items():
        cases += [(f"{name} by {how}", name, {"aggregation": how}) for how in AGGREGATIONS]
        cases.append((f"{name} with entropy", name, {"entropy_coeff": 0.1}))
        if not facts.imitates:
            cases.append((f"{name} with kl", name, {"kl_coeff": 0.1}))
        if facts.needs_advantages and not facts.imitates:
            cases += [
                (f"{name} with {kind}", name, {"correction": Correction(kind=kind)})
                for kind in CORRECTIONS
            ]
    return [pytest.param(name, extra, id=case) for case, name, extra in cases]


@pytest.mark.parametrize(("name", "extra"), objectives())
def test_a_loss_of_no_tokens_is_zero_with_a_gradient_of_zero(
    name: str, extra: dict[str, Any]
) -> None:
    for num_masked in (0, 3):
        inputs = inputs_without_tokens(num_masked)
        output = load_objective(name, **extra)(inputs)
        output.loss.backward()  # type: ignore[no-untyped-call]
        assert float(output.loss.detach()) == 0.0
        assert inputs.policy_logprobs.grad is not None
        assert inputs.policy_logprobs.grad.tolist() == [0.0] * num_masked
        metrics = combine_metrics([output.metrics])
        assert all(math.isfinite(value) for value in metrics.values()), metrics


def test_an_update_without_tokens_changes_no_mean_that_it_has_no_part_in() -> None:
    nothing = combine_metrics([{"ratio": 0.0, "ratio_squared": 0.0, "entropy": 0.0}])
    something = combine_metrics([{"ratio": 1.0, "ratio_squared": 1.0, "entropy": 2.0}])
    for updates, counts in (([nothing, something], [0, 7]), ([something, nothing], [7, 0])):
        means = mean_metrics(updates, counts)
        assert (means["ess"], means["entropy"]) == (1.0, 2.0)
    assert mean_metrics([nothing], [0])["entropy"] == 0.0


def test_rows_without_a_token_to_train_are_counted_and_whitened_without_nan() -> None:
    row = TokenRow(
        token_ids=torch.tensor([5, 6, 7]),
        response_mask=torch.zeros(3, dtype=torch.bool),
        advantages=torch.empty(0),
        inference_logprobs=torch.empty(0),
    )
    batch = pack_rows([row])
    batch = replace(batch, advantages=torch.zeros(3))
    counts = StepCounts.of([batch])
    assert (counts.num_tokens, counts.num_sequences, counts.prompt_num_tokens) == (1, 1, {})
    assert loss_inputs(batch, torch.empty(0)).mean(torch.empty(0)) == 0.0
    (whitened,) = whiten_rows([batch])
    assert whitened.advantages is not None
    assert whitened.advantages.tolist() == [0.0] * 3
    assert whiten_sequences([row])[0].advantages is not None
