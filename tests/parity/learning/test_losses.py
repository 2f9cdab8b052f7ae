"""Each loss has a golden number computed by hand, and its gradient where that is the point."""

import inspect
import math
from typing import Any

import pytest
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop_learning.loss import losses
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.facts import LOSSES, facts_of
from dialoop_learning.loss.loss_loading import load_loss, load_objective
from dialoop_learning.loss.losses import (
    LossInputs,
    LossOutput,
    cispo,
    decoupled_ppo,
    distill,
    dppo_mask,
    grpo,
    gspo,
    minor_sft,
    reinforce,
    sft,
)

from tests.support.samples.loss_samples import inputs_of, log


def _problem(**fields: Any) -> LossInputs:
    """Ratios 2, 1.1, 0.5 and 0.5 with advantages 1, 1, -1 and 1."""
    return inputs_of(
        log(0.8, 0.55, 0.2, 0.2),
        log(0.4, 0.5, 0.4, 0.4),
        advantages=[1.0, 1.0, -1.0, 1.0],
        **fields,
    )


def _clipped_tokens(output: LossOutput) -> list[bool]:
    assert output.clipped is not None
    return [bool(value) for value in output.clipped]


def _gradient(inputs: LossInputs, output: LossOutput) -> list[float]:
    output.loss.backward()
    assert inputs.policy_logprobs.grad is not None
    return [float(value) for value in inputs.policy_logprobs.grad]


def test_grpo_golden_number() -> None:
    # -min: clip(2) = 1.2; 1.1; min(-0.5, -0.8) = -0.8; min(0.5, 0.8) = 0.5
    # loss = -(1.2 + 1.1 - 0.8 + 0.5) / 4 = -0.5
    output = grpo(_problem())
    assert output.loss.item() == pytest.approx(-0.5)
    assert _clipped_tokens(output) == [True, False, True, False]


def test_grpo_does_not_move_clipped_tokens() -> None:
    inputs = _problem()  # d(-r A)/d logp = -r A
    gradient = _gradient(inputs, grpo(inputs))
    assert gradient == pytest.approx([0, -1.1 / 4, 0, -0.5 / 4])


def test_grpo_clips_low_and_high_separately() -> None:
    # clip(2) = 1.5; min(-0.5, -0.9) = -0.9: -(1.5 + 1.1 - 0.9 + 0.5) / 4 = -0.55
    assert grpo(_problem(), clip_low=0.1, clip_high=0.5).loss.item() == pytest.approx(-0.55)


def test_grpo_dual_clip_bounds_what_a_bad_token_can_weigh() -> None:
    # ratio 8, A -1: min(-8, -1.2) = -8, bounded at 3 * -1: loss 3, and no gradient
    inputs = inputs_of(log(0.8), log(0.1), advantages=[-1.0])
    assert grpo(inputs).loss.item() == pytest.approx(8.0)
    output = grpo(inputs, dual_clip=3.0)
    assert output.loss.item() == pytest.approx(3.0)
    assert _clipped_tokens(output) == [True]
    assert _gradient(inputs, output) == [0.0]


def test_grpo_on_policy_gradient_is_minus_the_advantage() -> None:
    inputs = inputs_of([-1.0, -2.0], [-1.0, -2.0], advantages=[0.5, -1.0])
    assert _gradient(inputs, grpo(inputs)) == pytest.approx([-0.25, 0.5])


def test_cispo_golden_number_and_its_clipped_tokens_still_learn() -> None:
    # weights min(2, 1.5), 1.1, 0.5, 0.5: -(1.5 log .8 + 1.1 log .55 - .5 log .2 + .5 log .2) / 4
    inputs = _problem()
    output = cispo(inputs, clip_high=0.5)
    expected = -(1.5 * math.log(0.8) + 1.1 * math.log(0.55)) / 4
    assert output.loss.item() == pytest.approx(expected)
    assert _clipped_tokens(output) == [True, False, False, False]
    assert _gradient(inputs, output) == pytest.approx([-1.5 / 4, -1.1 / 4, 0.5 / 4, -0.5 / 4])


def test_gspo_golden_number() -> None:
    # sequence 0: sqrt(2 * 1.1) = 1.483, A 1, clipped at 1.2; sequence 1: 0.5, A -1, clipped at 0.8
    inputs = inputs_of(
        log(0.8, 0.55, 0.2),
        log(0.4, 0.5, 0.4),
        advantages=[1.0, 1.0, -1.0],
        sequence_index=[0, 0, 1],
        num_sequences=2,
        aggregation="sequence",
    )
    output = gspo(inputs, clip_low=0.2, clip_high=0.2)
    assert output.loss.item() == pytest.approx((-1.2 + 0.8) / 2)
    assert gspo(inputs, clip_low=0.9, clip_high=0.9).loss.item() == pytest.approx(
        (-math.sqrt(2.2) + 0.5) / 2
    )


def test_gspo_gradient_shares_the_sequence_ratio() -> None:
    # d(-s A)/d logp_t = -s A / |y|, for each of the two tokens
    inputs = inputs_of(log(0.8, 0.55), log(0.4, 0.5), advantages=[1.0, 1.0], aggregation="sequence")
    gradient = _gradient(inputs, gspo(inputs, clip_low=0.9, clip_high=0.9))
    assert gradient == pytest.approx([-math.sqrt(2.2) / 2] * 2)


def test_reinforce_golden_number() -> None:
    # ratio times advantage: 2, 1.1, -0.5 and 0.5
    assert reinforce(_problem()).loss.item() == pytest.approx(-3.1 / 4)


def test_dppo_mask_golden_number() -> None:
    # rises +0.4 and +0.05 with A 1: the first masked; falls -0.3 with A -1: masked, with A 1: kept
    inputs = inputs_of(
        log(0.8, 0.55, 0.2, 0.2), log(0.4, 0.5, 0.5, 0.5), advantages=[1.0, 1.0, -1.0, 1.0]
    )
    penalty = math.log(2) ** 2 + math.log(1.1) ** 2 + 2 * math.log(0.4) ** 2
    output = dppo_mask(inputs)
    assert output.loss.item() == pytest.approx((-(1.1 + 0.4) + 1e-3 * penalty) / 4)
    assert _clipped_tokens(output) == [True, False, True, False]


def test_dppo_mask_still_pulls_masked_tokens_back() -> None:
    inputs = inputs_of(log(0.8), log(0.4), advantages=[1.0])
    assert _gradient(inputs, dppo_mask(inputs)) == pytest.approx([2e-3 * math.log(2)])


def test_decoupled_ppo_golden_number() -> None:
    # w = min(.5/.1, 4) = 4 and .4/.5 = .8; r = .8/.5 = 1.6 -> 1.2, and .2/.4 = .5 with A -1 -> .8
    # -(1.2 * 4 - 0.8 * 0.8) / 2 = -2.08
    inputs = inputs_of(
        log(0.8, 0.2), log(0.1, 0.5), proximal_logprobs=log(0.5, 0.4), advantages=[1.0, -1.0]
    )
    assert decoupled_ppo(inputs, max_weight=4.0).loss.item() == pytest.approx(-2.08)


def test_losses_clip_around_the_proximal_policy_where_it_is_known() -> None:
    # r = .8/.5 = 1.6, clipped at 1.2, whatever the sampler's 0.1
    inputs = inputs_of(log(0.8), log(0.1), proximal_logprobs=log(0.5), advantages=[1.0])
    assert grpo(inputs).loss.item() == pytest.approx(-1.2)


def test_distill_golden_number_and_its_fixed_point() -> None:
    # gains log(.4/.8) and log(.4/.2) at ratio 1: -(-log 2 + log 2) / 2 = 0; gradient -gain / 2
    inputs = inputs_of(log(0.8, 0.2), log(0.8, 0.2), ref_logprobs=log(0.4, 0.4))
    output = distill(inputs)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-7)
    assert _gradient(inputs, output) == pytest.approx([math.log(2) / 2, -math.log(2) / 2])
    same = inputs_of(log(0.4), log(0.4), ref_logprobs=log(0.4))
    assert _gradient(same, distill(same)) == [0.0]


def test_sft_golden_number() -> None:
    assert sft(inputs_of([-1.0, -2.0, -6.0])).loss.item() == pytest.approx(3.0)


def test_self_distillation_by_hand() -> None:
    """-r (log teacher - log policy), with r 2 and 0.5, whatever the advantages."""
    inputs = inputs_of(
        log(0.5, 0.2), log(0.25, 0.4), ref_logprobs=log(1.0, 0.1), advantages=[9.0, -9.0]
    )
    output = losses.self_distillation(inputs)
    gains = (math.log(2), math.log(0.5))
    assert output.loss.item() == pytest.approx(-(2 * gains[0] + 0.5 * gains[1]) / 2, abs=1e-6)
    assert output.metrics["teacher_log_ratio"].item() == pytest.approx(0.0, abs=1e-6)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.policy_logprobs.grad is not None
    expected = [-2 * gains[0] / 2, -0.5 * gains[1] / 2]  # the teacher and the gain have none
    assert inputs.policy_logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_minor_sft_golden_number() -> None:
    # mean gain of the sequence: (1 + 3) / 2 = 2; -log sigmoid(0.5 * 2) = log(1 + e^-1) = 0.313262
    inputs = inputs_of([-1.0, -2.0], ref_logprobs=[-2.0, -5.0], aggregation="sequence")
    assert minor_sft(inputs, beta=0.5).loss.item() == pytest.approx(0.313262, abs=1e-6)


@pytest.mark.parametrize("loss", [grpo, cispo, gspo, reinforce, dppo_mask])
def test_masked_tokens_count_nowhere_even_when_infinite(loss: Any) -> None:
    inputs = inputs_of(
        [-1.0, -math.inf], [-1.0, -1.0], advantages=[1.0, 1.0], loss_mask=[True, False]
    )
    output = loss(inputs)
    gradient = _gradient(inputs, output)
    assert gradient == pytest.approx([-0.5, 0.0])
    assert math.isfinite(output.loss.item())


def test_log_ratio_is_clamped_to_twenty_nats() -> None:
    inputs = inputs_of([-100.0, -0.1], [-0.1, -100.0], advantages=[-1.0, -1.0])
    assert inputs.log_ratio().tolist() == [-20.0, 20.0]


@pytest.mark.parametrize(
    ("loss", "fields", "missing"),
    [
        (grpo, {}, "inference_logprobs"),
        (grpo, {"inference": [-1.0]}, "advantages"),
        (cispo, {"inference": [-1.0]}, "advantages"),
        (gspo, {"advantages": [1.0]}, "inference_logprobs"),
        (reinforce, {"advantages": [1.0]}, "inference_logprobs"),
        (dppo_mask, {"advantages": [1.0]}, "inference_logprobs"),
        (decoupled_ppo, {"inference": [-1.0], "advantages": [1.0]}, "proximal_logprobs"),
        (distill, {"inference": [-1.0]}, "ref_logprobs"),
        (minor_sft, {}, "ref_logprobs"),
    ],
)
def test_missing_input_is_named(loss: Any, fields: dict[str, Any], missing: str) -> None:
    with pytest.raises(InvalidInput, match=missing) as caught:
        loss(inputs_of([-1.0], **fields))
    assert caught.value.reason == "LOSS_INPUT_MISSING"


def test_input_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        grpo(inputs_of([-1.0, -2.0], [-1.0], advantages=[1.0, 1.0]))
    assert caught.value.reason == "RAGGED"


def mine(inputs: LossInputs, *, scale: float = 1.0) -> LossOutput:
    return LossOutput(
        inputs.mean(-scale * inputs.policy_logprobs * inputs.require("advantages")), {}
    )


def test_loss_of_a_user_is_loaded_by_its_import_path() -> None:
    loss = load_loss(f"{__name__}:mine", {"scale": 2.0})
    assert loss(inputs_of([-1.0], advantages=[3.0])).loss.item() == pytest.approx(6.0)


@pytest.mark.parametrize("name", list(LOSSES))
def test_built_in_losses_need_no_path(name: str) -> None:
    fields = {"advantages": [1.0], "proximal_logprobs": [-1.0], "ref_logprobs": [-1.0]}
    assert math.isfinite(load_objective(name)(inputs_of([-1.0], [-1.0], **fields)).loss.item())


def test_the_table_of_losses_and_the_formulas_are_one_list() -> None:
    named = {facts.formula or name for name, facts in LOSSES.items()}
    formulas = {
        name
        for name, value in vars(losses).items()
        if inspect.isfunction(value)
        and value.__module__ == losses.__name__
        and not name.startswith("_")
    }
    assert named == formulas


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_reads_what_the_table_says_it_needs(name: str) -> None:
    facts, objective = facts_of(name), load_objective(name)
    needs = {
        "advantages": facts.needs_advantages and not facts.imitates,
        "ref_logprobs": facts.needs_reference or facts.needs_feedback,
        "proximal_logprobs": facts.needs_proximal,
    }
    fields: dict[str, Any] = {column: [-1.0] for column, needed in needs.items() if needed}
    assert math.isfinite(objective(inputs_of([-1.0], [-1.0], **fields)).loss.item())
    for column in fields:
        fewer = {other: values for other, values in fields.items() if other != column}
        with pytest.raises(InvalidInput, match=column):
            objective(inputs_of([-1.0], [-1.0], **fewer))


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


@pytest.mark.parametrize("name", ["distill", "self_distillation", "sft", "minor_sft"])
def test_a_correction_is_refused_for_a_loss_that_would_not_feel_it(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"loss {name} reads none") as caught:
        load_objective(name, correction=Correction(kind="tis"))
    assert caught.value.reason == "CORRECTION_WITHOUT_ADVANTAGES"
