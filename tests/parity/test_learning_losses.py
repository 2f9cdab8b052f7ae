import math
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidConfig, InvalidInput

from services.learning.loss_loading import load_loss
from services.learning.losses import (
    LossInputs,
    LossOutput,
    combine_metrics,
    dppo_mask,
    grpo,
    k3,
    sft,
)


def _inputs(policy: list[float], inference: list[float] | None = None, **fields: Any) -> LossInputs:
    logprobs = torch.tensor(policy, requires_grad=True)
    count = len(policy)
    defaults: dict[str, Any] = {
        "sequence_index": torch.zeros(count, dtype=torch.int64),
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "num_tokens": count,
        "num_sequences": 1,
        "inference_logprobs": None if inference is None else torch.tensor(inference),
    }
    given = {
        k: torch.tensor(v) if isinstance(v, list) else v for k, v in (defaults | fields).items()
    }
    return LossInputs(policy_logprobs=logprobs, **given)


def _probabilities(*values: float) -> list[float]:
    return [math.log(value) for value in values]


def _grpo_problem(**fields: Any) -> LossInputs:
    """Ratios 2, 1.1, 0.5 and 0.5 with advantages 1, 1, -1 and 1."""
    return _inputs(
        _probabilities(0.8, 0.55, 0.2, 0.2),
        _probabilities(0.4, 0.5, 0.4, 0.4),
        advantages=[1.0, 1.0, -1.0, 1.0],
        **fields,
    )


def test_grpo_golden_number() -> None:
    # -min: clip(2) = 1.2; 1.1; min(-0.5, -0.8) = -0.8; min(0.5, 0.8) = 0.5
    # loss = -(1.2 + 1.1 - 0.8 + 0.5) / 4 = -0.5
    output = grpo(_grpo_problem())
    assert output.loss.item() == pytest.approx(-0.5)
    assert float(output.metrics["clip_fraction"]) == pytest.approx(0.5)


def test_grpo_does_not_move_clipped_tokens() -> None:
    inputs = _grpo_problem()
    grpo(inputs).loss.backward()  # d(-r A)/d logp = -r A
    assert inputs.policy_logprobs.grad is not None
    assert inputs.policy_logprobs.grad.tolist() == pytest.approx([0, -1.1 / 4, 0, -0.5 / 4])


def test_grpo_clips_low_and_high_separately() -> None:
    # clip(2) = 1.5; min(-0.5, -0.9) = -0.9: -(1.5 + 1.1 - 0.9 + 0.5) / 4 = -0.55
    assert grpo(_grpo_problem(), clip_low=0.1, clip_high=0.5).loss.item() == pytest.approx(-0.55)


def test_grpo_on_policy_gradient_is_minus_the_advantage() -> None:
    inputs = _inputs([-1.0, -2.0], [-1.0, -2.0], advantages=[0.5, -1.0])
    grpo(inputs).loss.backward()
    assert inputs.policy_logprobs.grad is not None
    assert inputs.policy_logprobs.grad.tolist() == pytest.approx([-0.25, 0.5])


def test_grpo_adds_the_kl_to_the_reference() -> None:
    # policy 0.5, reference 0.25: d = -log 2, k3 = 0.5 + 0.693147 - 1 = 0.193147
    inputs = _inputs(
        _probabilities(0.5),
        _probabilities(0.5),
        advantages=[1.0],
        ref_logprobs=_probabilities(0.25),
    )
    output = grpo(inputs, kl_coeff=0.1)
    assert output.loss.item() == pytest.approx(-1 + 0.0193147, abs=1e-6)
    assert float(output.metrics["kl_to_ref"]) == pytest.approx(0.193147, abs=1e-6)


def test_dppo_mask_golden_number() -> None:
    # rises +0.4 and +0.05 with A 1: the first masked; falls -0.3 with A -1: masked, with A 1: kept
    inputs = _inputs(
        _probabilities(0.8, 0.55, 0.2, 0.2),
        _probabilities(0.4, 0.5, 0.5, 0.5),
        advantages=[1.0, 1.0, -1.0, 1.0],
    )
    penalty = math.log(2) ** 2 + math.log(1.1) ** 2 + 2 * math.log(0.4) ** 2
    output = dppo_mask(inputs)
    assert output.loss.item() == pytest.approx((-(1.1 + 0.4) + 1e-3 * penalty) / 4)
    assert float(output.metrics["clip_fraction"]) == pytest.approx(0.5)


def test_dppo_mask_still_pulls_masked_tokens_back() -> None:
    inputs = _inputs(_probabilities(0.8), _probabilities(0.4), advantages=[1.0])
    dppo_mask(inputs).loss.backward()
    assert inputs.policy_logprobs.grad is not None
    assert float(inputs.policy_logprobs.grad) == pytest.approx(2e-3 * math.log(2))


def test_sft_golden_number() -> None:
    assert sft(_inputs([-1.0, -2.0, -6.0])).loss.item() == pytest.approx(3.0)


def test_sft_by_sequence_weighs_sequences_equally() -> None:
    # sequences (-1, -2) and (-6): (1.5 + 6) / 2 = 3.75
    inputs = _inputs([-1.0, -2.0, -6.0], sequence_index=[0, 0, 1], num_sequences=2)
    assert sft(inputs, by_sequence=True).loss.item() == pytest.approx(3.75)


def test_sft_by_sequence_ignores_masked_tokens() -> None:
    inputs = _inputs(
        [-1.0, -2.0, -6.0],
        sequence_index=[0, 0, 1],
        num_sequences=2,
        loss_mask=[True, False, True],
    )
    assert sft(inputs, by_sequence=True).loss.item() == pytest.approx(3.5)


@pytest.mark.parametrize("loss", [grpo, dppo_mask])
def test_masked_tokens_count_nowhere_even_when_infinite(loss: Any) -> None:
    inputs = _inputs(
        [-1.0, -math.inf], [-1.0, -1.0], advantages=[1.0, 1.0], loss_mask=[True, False]
    )
    output = loss(inputs)
    output.loss.backward()
    assert inputs.policy_logprobs.grad is not None
    assert inputs.policy_logprobs.grad.tolist() == pytest.approx([-0.5, 0.0])
    assert output.loss.item() == pytest.approx(-0.5)
    assert all(math.isfinite(float(value)) for value in output.metrics.values())


def test_log_ratio_is_clamped_to_twenty_nats() -> None:
    inputs = _inputs([-100.0, -0.1], [-0.1, -100.0], advantages=[-1.0, -1.0])
    assert inputs.log_ratio().tolist() == [-20.0, 20.0]


def test_ratio_metrics_are_those_computed_by_hand() -> None:
    # ratios 2 and 0.5: k3 = (2 - log 2 - 1 + 0.5 + log 2 - 1) / 2 = 0.25; ess = 1.25^2 / 2.125
    inputs = _inputs(
        _probabilities(0.8, 0.2),
        _probabilities(0.4, 0.4),
        advantages=[0.0, 0.0],
        entropy=[1.0, 3.0],
    )
    metrics = combine_metrics([grpo(inputs).metrics])
    assert metrics["approx_kl"] == pytest.approx(0.25)
    assert metrics["ess"] == pytest.approx(1.5625 / 2.125)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert metrics["clip_fraction"] == 0.0


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    found = k3(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, 0.0]))
    assert found.tolist() == pytest.approx([0.0, 0.367879, 0.718282], abs=1e-5)


@pytest.mark.parametrize("loss", [grpo, dppo_mask, sft])
def test_rows_add_up_to_one_big_row(loss: Any) -> None:
    policy, inference = _probabilities(0.8, 0.5, 0.2), _probabilities(0.4, 0.5, 0.4)
    whole = loss(_inputs(policy, inference, advantages=[1.0, -1.0, -1.0]))
    first = loss(_inputs(policy[:1], inference[:1], advantages=[1.0], num_tokens=3))
    rest = loss(_inputs(policy[1:], inference[1:], advantages=[-1.0, -1.0], num_tokens=3))
    assert (first.loss + rest.loss).item() == pytest.approx(whole.loss.item())
    assert combine_metrics([first.metrics, rest.metrics]) == pytest.approx(
        combine_metrics([whole.metrics])
    )


@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        (grpo, {}),
        (dppo_mask, {"advantages": [1.0]}),
        (lambda i: grpo(i, kl_coeff=0.1), {"advantages": [1.0], "inference": [-1.0]}),
    ],
)
def test_missing_input_is_named(loss: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        loss(_inputs([-1.0], **fields))
    assert caught.value.reason == "LOSS_INPUT_MISSING"


def test_input_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        grpo(_inputs([-1.0, -2.0], [-1.0], advantages=[1.0, 1.0]))
    assert caught.value.reason == "RAGGED"


def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> LossOutput:
    return LossOutput(
        inputs.mean(-scale * inputs.policy_logprobs * inputs.require("advantages")), {}
    )


def test_loss_of_a_user_is_loaded_by_its_import_path() -> None:
    loss = load_loss(f"{__name__}:reinforce", {"scale": 2.0})
    assert loss(_inputs([-1.0], advantages=[3.0])).loss.item() == pytest.approx(6.0)


@pytest.mark.parametrize("name", ["grpo", "dppo_mask", "sft"])
def test_built_in_losses_need_no_path(name: str) -> None:
    inputs = _inputs([-1.0], [-1.0], advantages=[1.0])
    assert math.isfinite(load_loss(name)(inputs).loss.item())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("nope", {}, "UNKNOWN_LOSS"),
        ("no_such_package.losses:mine", {}, "UNKNOWN_LOSS"),
        ("math:pi", {}, "UNKNOWN_LOSS"),
        ("grpo", {"clip": 0.1}, "UNKNOWN_LOSS_OPTION"),
    ],
)
def test_wrong_loss_setting_is_named(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_loss(name, options)
    assert caught.value.reason == reason
