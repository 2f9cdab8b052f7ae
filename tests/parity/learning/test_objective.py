"""Aggregation, KL terms, entropy, corrections and metrics: what goes with any loss."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.facts import LOSSES
from dialoop_learning.loss.loss_loading import load_objective, require_form
from dialoop_learning.loss.losses import LossInputs, LossOutput, dppo_mask, grpo, reinforce, sft
from dialoop_learning.loss.objective import Objective, combine_metrics, k1, k2, k3, mean_metrics
from dialoop_services.trainer.learner.learner import objective_of
from dialoop_services.trainer.settings import TrainerSettings
from pydantic import ValidationError

from tests.support.samples.loss_samples import inputs_of, log


def _two_prompts(**fields: Any) -> LossInputs:
    """Sequences (-1, -2) and (-6) of one prompt, (-3) of another."""
    return inputs_of(
        [-1.0, -2.0, -6.0, -3.0],
        sequence_index=[0, 0, 1, 2],
        num_sequences=3,
        num_prompts=2,
        prompt_num_tokens=[3.0, 3.0, 3.0, 1.0],
        **fields,
    )


@pytest.mark.parametrize(
    ("aggregation", "constant", "expected"),
    [
        ("token", 1.0, 12 / 4),
        ("sequence", 1.0, (1.5 + 6 + 3) / 3),
        ("prompt", 1.0, (9 / 3 + 3) / 2),
        ("constant", 8.0, (3 + 6 + 3) / 8 / 3),
        ("sum", 1.0, 12.0),
    ],
)
def test_aggregations_are_those_computed_by_hand(
    aggregation: Any, constant: float, expected: float
) -> None:
    objective = Objective(loss=sft, aggregation=aggregation, constant=constant)
    assert objective(_two_prompts()).loss.item() == pytest.approx(expected)


def test_masked_tokens_leave_the_sequence_mean() -> None:
    inputs = _two_prompts(loss_mask=[True, False, True, True])
    assert Objective(loss=sft, aggregation="sequence")(inputs).loss.item() == pytest.approx(10 / 3)


def test_kl_estimators_golden_numbers() -> None:
    # policy 0.5, other 0.25: d = -log 2
    policy, other = torch.tensor(log(0.5)), torch.tensor(log(0.25))
    assert float(k1(policy, other)) == pytest.approx(math.log(2))
    assert float(k2(policy, other)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(k3(policy, other)) == pytest.approx(0.5 + math.log(2) - 1)


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    estimates = k3(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, 0.0]))
    assert estimates.tolist() == pytest.approx([0.0, 0.367879, 0.718282], abs=1e-5)


def test_kl_to_the_reference_is_added_to_any_loss() -> None:
    inputs = inputs_of(log(0.5), log(0.5), advantages=[1.0], ref_logprobs=log(0.25))
    output = Objective(loss=grpo, kl_coeff=0.1)(inputs)
    assert output.loss.item() == pytest.approx(-1 + 0.0193147, abs=1e-6)
    assert float(output.metrics["kl_to_ref"]) == pytest.approx(0.193147, abs=1e-6)


def test_kl_to_the_sampler_is_a_choice() -> None:
    inputs = inputs_of(log(0.5), log(0.25), advantages=[0.0])
    objective = Objective(loss=reinforce, kl_coeff=1.0, kl_estimator="k2", kl_to="inference")
    assert objective(inputs).loss.item() == pytest.approx(math.log(2) ** 2 / 2)


def test_entropy_bonus_lowers_the_loss() -> None:
    inputs = inputs_of([-1.0, -1.0], [-1.0, -1.0], advantages=[1.0, 1.0], entropy=[1.0, 3.0])
    assert Objective(loss=grpo, entropy_coeff=0.1)(inputs).loss.item() == pytest.approx(-1.2)


def test_the_terms_of_the_loss_are_told_and_add_up() -> None:
    # grpo -1, k3 to the reference 0.193147, entropy (1 + 3) / 2
    inputs = inputs_of(
        log(0.5, 0.5),
        log(0.5, 0.5),
        advantages=[1.0, 1.0],
        ref_logprobs=log(0.25, 0.25),
        entropy=[1.0, 3.0],
    )
    output = Objective(loss=grpo, kl_coeff=0.5, entropy_coeff=0.1)(inputs)
    terms = {name: float(value) for name, value in output.metrics.items() if "loss_" in name}
    assert terms == pytest.approx(
        {"loss_objective": -1.0, "loss_kl": 0.0965736, "loss_entropy": -0.2}, abs=1e-6
    )
    assert output.loss.item() == pytest.approx(sum(terms.values()))
    plain = Objective(loss=grpo)(inputs).metrics
    assert [name for name in plain if "loss_" in name] == ["loss_objective"]
    two = combine_metrics([output.metrics, output.metrics])  # the rows of one update add up
    assert two["loss_kl"] == pytest.approx(2 * terms["loss_kl"])


def test_minor_sft_holds_to_the_reference_and_takes_no_kl_beside_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    objective = load_objective("minor_sft", kl_coeff=0.1)
    assert objective.kl_coeff == 0.0
    assert "kl_coeff counts as 0" in caplog.text
    caplog.clear()
    assert load_objective("minor_sft", kl_coeff=0.0) == load_objective("minor_sft")
    assert load_objective("sft", kl_coeff=0.1).kl_coeff == 0.1
    assert not caplog.text


def _mismatched_inputs() -> LossInputs:
    """proximal / inference 4, 1, 0.25 in one sequence, and 1.5 in another; A = 1, ratio 1."""
    proximal = log(0.8, 0.5, 0.1, 0.6)
    return inputs_of(
        proximal,
        log(0.2, 0.5, 0.4, 0.4),
        proximal_logprobs=proximal,
        advantages=[1.0] * 4,
        sequence_index=[0, 0, 0, 1],
        num_sequences=2,
    )


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("tis", [2.0, 1.0, 0.25, 1.5]),
        ("icepop", [0.0, 1.0, 0.0, 1.5]),
        ("token_mask", [0.0, 1.0, 0.0, 1.0]),
        # the first sequence's mean log-ratio is (log 4 + 0 - log 4) / 3 = 0
        ("sequence_mask", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_correction_weights_are_those_computed_by_hand(kind: Any, weights: list[float]) -> None:
    correction = Correction(kind=kind, low=0.5, high=2.0)
    assert correction.weights(_mismatched_inputs()).tolist() == pytest.approx(weights)
    # r = policy / proximal = 1, so the loss is minus the mean weight: the denominator keeps all.
    output = Objective(loss=grpo, correction=correction)(_mismatched_inputs())
    assert output.loss.item() == pytest.approx(-sum(weights) / 4)
    assert float(output.metrics["correction_masked"]) == pytest.approx(weights.count(0.0) / 4)


def test_sequence_mask_drops_whole_sequences() -> None:
    weights = Correction(kind="sequence_mask", low=0.9, high=1.1).weights(_mismatched_inputs())
    assert weights.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_kl_mask_looks_at_the_present_policy_and_needs_no_proximal() -> None:
    # log-ratios log 2 and 0: squares over two 0.24 and 0
    correction = Correction(kind="kl_mask", high=0.1)
    assert correction.weights(inputs_of(log(0.8, 0.5), log(0.4, 0.5))).tolist() == [0.0, 1.0]
    assert not correction.needs_proximal


def test_kl_mask_may_look_at_the_reference_instead() -> None:
    correction = Correction(kind="kl_mask", high=0.1, against="ref")
    far = inputs_of(log(0.8, 0.5), log(0.8, 0.5), ref_logprobs=log(0.4, 0.5))
    assert correction.weights(far).tolist() == [0.0, 1.0]
    assert Correction(kind="kl_mask", high=0.1).weights(far).tolist() == [1.0, 1.0]
    with pytest.raises(InvalidInput, match="ref_logprobs"):
        correction.weights(inputs_of(log(0.8, 0.5), log(0.8, 0.5)))
    settings = TrainerSettings(
        objective={"correction": "kl_mask", "correction_high": 0.1, "correction_to": "ref"}
    )
    assert objective_of(settings).correction == correction


def test_only_kl_mask_may_be_against_the_reference() -> None:
    with pytest.raises(InvalidConfig, match="tis compares with the sampler only"):
        Correction(kind="tis", against="ref")


def test_corrections_have_no_gradient() -> None:
    assert not Correction(kind="tis").weights(_mismatched_inputs()).requires_grad


def test_ratio_metrics_are_those_computed_by_hand() -> None:
    # ratios 2 and 0.5: k3 = (2 - log 2 - 1 + 0.5 + log 2 - 1) / 2 = 0.25; ess = 1.25^2 / 2.125
    inputs = inputs_of(log(0.8, 0.2), log(0.4, 0.4), advantages=[0.0, 0.0], entropy=[1.0, 3.0])
    metrics = combine_metrics([Objective(loss=grpo)(inputs).metrics])
    assert metrics["approx_kl"] == pytest.approx(0.25)
    assert metrics["ess"] == pytest.approx(1.5625 / 2.125)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert metrics["clip_fraction"] == 0.0


def test_metrics_are_told_apart_by_staleness() -> None:
    inputs = inputs_of(
        log(0.4, 0.8, 0.4),
        log(0.4, 0.4, 0.4),
        advantages=[1.0, 1.0, 1.0],
        staleness=[0.0, 2.0, 2.0],
    )
    ages = combine_metrics([Objective(loss=grpo)(inputs).metrics])["by_staleness"]
    assert list(ages) == [0, 2]
    assert ages[0] == pytest.approx(
        {"num_tokens": 1, "mismatch_kl": 0, "ratio": 1, "clip_fraction": 0, "ess": 1}
    )
    # ratios 2 and 1: mean 1.5, k3 (2 - log 2 - 1) / 2, ess 2.25 / 2.5
    expected = {
        "num_tokens": 2,
        "mismatch_kl": (1 - math.log(2)) / 2,
        "ratio": 1.5,
        "clip_fraction": 0.5,
        "ess": 0.9,
    }
    assert ages[2] == pytest.approx(expected)


def test_a_step_of_unequal_updates_has_the_means_of_its_tokens() -> None:
    # Two epochs over one token of ratio 2 in the first update, and two of ratio 1 in the second.
    def update(policy: list[float], inference: list[float], advantage: float) -> dict[str, Any]:
        fields = {"advantages": [advantage] * len(policy), "staleness": [0.0] * len(policy)}
        inputs = inputs_of(policy, inference, entropy=[float(len(policy))] * len(policy), **fields)
        return combine_metrics([Objective(loss=grpo)(inputs).metrics])

    first = update(log(0.8), log(0.4), 1.0)
    second = update(log(0.4, 0.4), log(0.4, 0.4), 0.5)
    means = mean_metrics([first, second] * 2, [1, 2] * 2, num_epochs=2)
    assert means["ratio"] == pytest.approx(4 / 3)
    assert means["ratio_squared"] == pytest.approx(6 / 3)
    assert means["ess"] == pytest.approx((4 / 3) ** 2 / 2)
    assert means["entropy"] == pytest.approx((1 + 2 + 2) / 3)
    assert means["clip_fraction"] == pytest.approx(1 / 3)
    assert means["loss_objective"] == pytest.approx((-1.2 - 0.5) / 2)  # a mean of updates, as loss
    age = means["by_staleness"][0]
    assert age["num_tokens"] == 3
    assert age["ess"] == pytest.approx((4 / 3) ** 2 / 2)
    assert age["entropy"] == pytest.approx(5 / 3)
    # Of 10 choices 5 differ, of 30 none; the tokens do not matter.
    replayed = [
        {"num_recorded_choices": 10.0, "routing_differs": 0.5},
        {"num_recorded_choices": 30.0, "routing_differs": 0.0},
    ]
    assert mean_metrics(replayed, [7, 1]) == {"num_recorded_choices": 20, "routing_differs": 0.125}


@pytest.mark.parametrize("loss", [grpo, dppo_mask, sft, reinforce])
def test_rows_add_up_to_one_big_row(loss: Any) -> None:
    policy, inference = log(0.8, 0.5, 0.2), log(0.4, 0.5, 0.4)
    objective = Objective(loss=loss)
    whole = objective(inputs_of(policy, inference, advantages=[1.0, -1.0, -1.0]))
    first = objective(inputs_of(policy[:1], inference[:1], advantages=[1.0], num_tokens=3))
    rest = objective(inputs_of(policy[1:], inference[1:], advantages=[-1.0, -1.0], num_tokens=3))
    assert (first.loss + rest.loss).item() == pytest.approx(whole.loss.item())
    assert combine_metrics([first.metrics, rest.metrics]) == pytest.approx(
        combine_metrics([whole.metrics])
    )


def test_a_kl_to_the_reference_and_one_to_the_sampler_go_together() -> None:
    # policy 0.5, reference 0.25, sampler 0.8: k1 is log 2 and log 0.625
    inputs = inputs_of(log(0.5), log(0.8), ref_logprobs=log(0.25), advantages=[0.0])
    both = load_objective("grpo", kl_coeff=0.1, kl_inference_coeff=0.3, kl_estimator="k1")
    output = both(inputs)
    assert output.loss.item() == pytest.approx(0.1 * math.log(2) + 0.3 * math.log(0.625))
    metrics = {name: float(value) for name, value in output.metrics.items()}
    assert metrics["kl_to_ref"] == pytest.approx(math.log(2))
    assert metrics["kl_to_inference"] == pytest.approx(math.log(0.625))
    parts = ("loss_objective", "loss_kl", "loss_kl_to_inference")
    assert sum(metrics[name] for name in parts) == pytest.approx(output.loss.item())


def test_the_settings_set_the_kl_to_the_sampler_and_refuse_it_twice() -> None:
    fields = {"model_dir": "m", "objective": {"kl_coeff": 0.1, "kl_inference_coeff": 0.3}}
    assert objective_of(TrainerSettings.model_validate(fields)).kl_inference_coeff == 0.3
    fields["objective"] = {"kl_inference_coeff": 0.3, "kl_to": "inference"}
    with pytest.raises(ValidationError, match="are the same KL"):
        TrainerSettings.model_validate(fields)


def test_the_mismatch_of_fresh_tokens_is_told_by_their_depth() -> None:
    # Two packed sequences: depths restart, and stale tokens are left out.
    depth = [100, 130, 300, 100, 260]
    inputs = inputs_of(
        log(0.5, 0.5, 0.5, 0.5, 0.5),
        sequence_index=[0, 0, 0, 1, 1],
        num_sequences=2,
        inference_logprobs=log(0.5, 0.25, 0.5, 0.5, 0.125),
        staleness=[0.0, 0.0, 1.0, 0.0, 0.0],
        depth=depth,
    )
    metrics = combine_metrics([Objective(loss=sft)(inputs).metrics] * 2)
    by_depth = metrics["by_depth"]
    assert {key: row["num_tokens"] for key, row in by_depth.items()} == {0: 4, 128: 2, 256: 2}
    # k3 with r = 2 and r = 4
    assert by_depth[0]["mismatch_kl"] == 0
    assert by_depth[128]["mismatch_kl"] == pytest.approx(2 - 1 - math.log(2), rel=1e-5)
    assert by_depth[256]["mismatch_kl"] == pytest.approx(4 - 1 - math.log(4), rel=1e-5)


def vector_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.policy_logprobs, {})


def constant_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(torch.zeros(()), {})


def bare_loss(inputs: LossInputs) -> Any:
    return inputs.policy_logprobs.sum()


def raising_loss(inputs: LossInputs) -> LossOutput:
    raise KeyError("reward")


class FailsOnce:
    """Fails at its first call, as a function that reads something over the network may."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.num_calls += 1
        if self.num_calls == 1:
            raise OSError("away")
        return LossOutput(-inputs.policy_logprobs.sum(), {})


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (vector_loss, "returned a tensor [4] as the loss"),
        (constant_loss, "depends on no weight"),
        (bare_loss, "returned a Tensor and no LossOutput"),
        (raising_loss, "raised KeyError at test_objective.py, line"),
    ],
)
def test_a_users_loss_of_another_form_is_named_by_file_and_line(loss: Any, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Objective(loss=partial(loss))(_two_prompts())
    assert caught.value.reason == "LOSS_FAILED"
    line = loss.__code__.co_firstlineno
    assert f"The loss function at test_objective.py, line {line} " in str(caught.value)
    assert says in str(caught.value)


def test_a_users_loss_that_fails_once_is_called_again() -> None:
    loss = FailsOnce()
    assert Objective(loss=loss)(_two_prompts()).loss == 12.0
    assert loss.num_calls == 2


def _vector(inputs: LossInputs) -> LossOutput:
    return LossOutput(-inputs.policy_logprobs, {})


def _not_finite(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.mean(inputs.policy_logprobs) * float("nan"), {})


def _plain(inputs: LossInputs) -> torch.Tensor:
    return inputs.mean(inputs.policy_logprobs)


def _detached(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.mean(inputs.policy_logprobs).detach(), {})


def _of_nothing(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.mean(inputs.policy_logprobs), {"terms": inputs.policy_logprobs})


def _raises(inputs: LossInputs) -> LossOutput:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_vector", r"line \d+ returned a tensor \[6\] as the loss"),
        ("_not_finite", "returned nan"),
        ("_plain", "returned a Tensor and no LossOutput"),
        ("_detached", "depends on no weight of the policy"),
        ("_of_nothing", "a metric terms that is not one number"),
        ("_raises", "raised KeyError at test_objective.py, line"),
    ],
)
def test_a_loss_of_the_wrong_shape_is_found_by_one_call(name: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as caught:
        require_form(f"{__name__}:{name}", {})
    assert caught.value.reason == "LOSS_FAILED"


@pytest.mark.parametrize("name", LOSSES)
def test_every_built_in_loss_has_the_right_shape(name: str) -> None:
    require_form(name, {})
