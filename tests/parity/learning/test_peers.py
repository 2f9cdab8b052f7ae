"""Our losses and those of TRL and torchrl on the same tensors, in float64.

The numbers are of the peers' own code (tests/goldens/make_loss_goldens.py); infra/test_compat.sh
peers computes them anew. Where definitions differ a test shows the difference, and that it is all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.loss_loading import load_objective as load
from dialoop_learning.loss.losses import LossInputs, LossOutput
from dialoop_learning.loss.objective import Objective, k3

from tests.goldens.losses_samples import MAX_COMPLETION_LENGTH
from tests.support.samples.peer_losses import (
    assert_same,
    loss_and_gradient,
    of_sequences,
    peer_goldens,
    peer_inputs,
    theirs,
)

if TYPE_CHECKING:
    from dialoop_learning.loss.losses import Loss

TRL = peer_goldens("trl")
TORCHRL = peer_goldens("torchrl")

GSPO = {"clip_low": 0.1, "clip_high": 0.15}
TIS = Correction(kind="tis", high=1.3)
ICEPOP = Correction(kind="icepop", low=0.7, high=1.5)

EQUAL_TO_TRL: dict[str, Loss] = {
    "grpo": load("grpo", aggregation="sequence"),
    "grpo_asymmetric": load("grpo", {"clip_low": 0.1, "clip_high": 0.28}, aggregation="sequence"),
    "bnpo": load("grpo"),
    "dapo": load("dapo"),
    "dr_grpo": load("dr_grpo", constant=MAX_COMPLETION_LENGTH),
    "cispo": load("cispo", {"clip_high": 0.4}),
    "gspo": load("gspo", GSPO),
    "gspo_by_token": load("gspo", GSPO, aggregation="token"),
    "luspo": load("gspo", GSPO, aggregation="constant", constant=1.0),
    "dual_clip": load("grpo", {"dual_clip": 1.4}, aggregation="sequence"),
    "unclipped": load("rloo"),
    "grpo_kl": load("grpo", aggregation="sequence", kl_coeff=0.1),
    "dapo_kl": load("grpo", kl_coeff=0.1),
    "cispo_kl": load("cispo", {"clip_high": 0.4}, kl_coeff=0.1),
    "gspo_kl": load("gspo", GSPO, kl_coeff=0.1),
    "entropy": load("grpo", entropy_coeff=0.05),
    "token_truncate": load("grpo", correction=TIS),
    "token_truncate_kl": load("grpo", aggregation="sequence", correction=TIS, kl_coeff=0.1),
    "token_mask": load("grpo", correction=ICEPOP),
    "token_mask_dual_clip": load(
        "grpo", {"dual_clip": 1.4}, aggregation="sequence", correction=ICEPOP
    ),
    "token_mask_cispo": load("cispo", {"clip_high": 0.4}, correction=ICEPOP),
    "dapo_micro_batches": load("grpo"),
    "nll": load("sft"),
    "nll_micro_batches": load("sft"),
}

CLIP, CLIP_DAPO = {"clip_low": 0.25, "clip_high": 0.25}, {"clip_low": 0.25, "clip_high": 0.5}

EQUAL_TO_TORCHRL: dict[str, Loss] = {
    "grpo": load("grpo", CLIP),
    "grpo_by_sequence": load("grpo", CLIP, aggregation="sequence"),
    "dapo": load("dapo", CLIP_DAPO),
    "entropy": load("grpo", CLIP, entropy_coeff=0.0625),
    "sft": load("sft", aggregation="sequence"),
    "sft_of_sums": load("sft", aggregation="constant", constant=1.0),
    "sft_sum": load("sft", aggregation="sum"),
    "minor_sft": load("minor_sft", {"beta": 0.5}),
}


@pytest.mark.parametrize("name", list(EQUAL_TO_TRL))
def test_loss_and_gradient_equal_trls(name: str) -> None:
    ours = loss_and_gradient(EQUAL_TO_TRL[name], peer_inputs(TRL, name))
    assert_same(ours, theirs(TRL, name))


@pytest.mark.parametrize("name", list(EQUAL_TO_TORCHRL))
def test_loss_and_gradient_equal_torchrls(name: str) -> None:
    ours = loss_and_gradient(EQUAL_TO_TORCHRL[name], peer_inputs(TORCHRL, name))
    assert_same(ours, theirs(TORCHRL, name))


def test_goldens_have_every_kind_of_clipped_token() -> None:
    inputs = peer_inputs(TRL, "grpo")
    ratio, advantages = inputs.log_ratio().exp(), inputs.require("advantages")
    for factor in (1.0, -1.0):
        of_sign = ratio[inputs.loss_mask & (advantages * factor > 0)]
        assert bool((of_sign > 1.5).any())
        assert bool((of_sign < 0.75).any())
        assert bool(((of_sign > 0.8) & (of_sign < 1.2)).any())
    _, gradient = theirs(TRL, "gspo")
    moved = [bool(gradient[inputs.sequence_index == s].any()) for s in range(6)]
    assert set(moved) == {True, False}


def test_untrained_tokens_have_no_gradient_in_either() -> None:
    inputs = peer_inputs(TRL, "grpo_kl")
    _, peers = theirs(TRL, "grpo_kl")
    _, ours = loss_and_gradient(EQUAL_TO_TRL["grpo_kl"], inputs)
    for gradient in (ours, peers):
        assert bool((gradient[~inputs.loss_mask] == 0).all())
        assert bool((gradient[inputs.loss_mask] != 0).any())


def test_decoupled_ppo_is_trls_clip_with_truncated_sampler_ratios() -> None:
    ours = loss_and_gradient(
        load("decoupled_ppo", {"max_weight": 1.3}), peer_inputs(TRL, "token_truncate")
    )
    assert_same(ours, theirs(TRL, "token_truncate"))


def test_trls_delta_inside_the_clip_bounds_good_tokens_too() -> None:
    # delta 1.2 below 1 + 0.5: good tokens stop at delta, bad ones at 1.5.
    objective = load("grpo", {"clip_high": 0.2, "dual_clip": 1.5}, aggregation="sequence")
    ours = loss_and_gradient(objective, peer_inputs(TRL, "dual_clip_inside"))
    assert_same(ours, theirs(TRL, "dual_clip_inside"))
    as_set = load("grpo", {"clip_high": 0.5, "dual_clip": 1.2}, aggregation="sequence")
    loss, _ = loss_and_gradient(as_set, peer_inputs(TRL, "dual_clip_inside"))
    assert abs(loss - theirs(TRL, "dual_clip_inside")[0]) > 1e-3


def test_trls_kl_term_is_times_the_ratio_unless_told_otherwise() -> None:
    def with_kl(batch: LossInputs) -> LossOutput:
        kl = k3(batch.policy_logprobs, batch.require("ref_logprobs"))
        policy = load("grpo")(batch)
        return LossOutput(policy.loss + 0.1 * batch.mean(batch.log_ratio().exp() * kl), {})

    ours = loss_and_gradient(with_kl, peer_inputs(TRL, "kl_times_ratio"))
    assert_same(ours, theirs(TRL, "kl_times_ratio"))
    plain, _ = loss_and_gradient(load("grpo", kl_coeff=0.1), peer_inputs(TRL, "kl_times_ratio"))
    assert abs(plain - ours[0]) > 1e-3


def test_trls_entropy_bonus_is_a_token_mean_whatever_the_aggregation() -> None:
    inputs = peer_inputs(TRL, "entropy_by_sequence")
    policy, gradient = loss_and_gradient(load("grpo", aggregation="sequence"), inputs)
    bonus = 0.05 * float(inputs.token_mean(inputs.require("entropy").detach()))
    assert_same((policy - bonus, gradient), theirs(TRL, "entropy_by_sequence"))


@pytest.mark.parametrize("name", ["sequence_mask", "sequence_truncate"])
def test_trls_sequence_ratios_are_of_sums_and_weigh_the_sequence(name: str) -> None:
    inputs = peer_inputs(TRL, name)
    mismatch = inputs.require("proximal_logprobs") - inputs.require("inference_logprobs")
    loss, gradient = 0.0, torch.zeros_like(mismatch)
    for sequence in range(inputs.num_sequences):
        kept = inputs.loss_mask & (inputs.sequence_index == sequence)
        ratio = math.exp(float(mismatch[kept].sum()))
        weight = ratio if 0.3 <= ratio <= 3.0 else 0.0
        if name == "sequence_truncate":
            weight = min(ratio, 1.3)
        own, moved = loss_and_gradient(
            load("grpo", aggregation="sequence"), of_sequences(inputs, [sequence])
        )
        loss += weight * own / inputs.num_sequences
        gradient += weight * moved / inputs.num_sequences
    assert_same((loss, gradient), theirs(TRL, name))


def test_our_sequence_mask_keeps_other_sequences_and_does_not_weigh_them() -> None:
    weights = Correction(kind="sequence_mask", low=0.3, high=3.0).weights(
        peer_inputs(TRL, "sequence_mask")
    )
    assert set(weights.tolist()) == {1.0}
    assert float(theirs(TRL, "sequence_mask")[1].reshape(6, 6).abs().sum(1).min()) == 0.0


def test_trls_bnpo_divides_each_micro_batch_by_its_own_tokens() -> None:
    inputs = peer_inputs(TRL, "bnpo_micro_batches")
    halves = [
        loss_and_gradient(load("grpo"), of_sequences(inputs, rows))
        for rows in ([0, 1, 2], [3, 4, 5])
    ]
    loss = sum(loss_of_half for loss_of_half, _ in halves) / 2
    gradient = (halves[0][1] + halves[1][1]) / 2
    peers = theirs(TRL, "bnpo_micro_batches")
    assert_same((loss, gradient), peers)
    whole, _ = loss_and_gradient(load("grpo"), inputs)
    assert abs(whole - peers[0]) > 1e-3


def test_trls_dapo_divides_each_step_by_the_mean_tokens_of_its_generations_steps() -> None:
    inputs = peer_inputs(TRL, "dapo_two_steps")
    loss, gradient = 0.0, torch.zeros_like(inputs.policy_logprobs)
    for rows in ([0, 1, 2], [3, 4, 5]):
        step = of_sequences(inputs, rows)
        own, moved = loss_and_gradient(load("grpo"), step)
        share = step.num_tokens / (inputs.num_tokens / 2)
        assert share != 1
        loss, gradient = loss + share * own, gradient + share * moved
    assert_same((loss, gradient), theirs(TRL, "dapo_two_steps"))


@pytest.mark.parametrize("golden", [TRL, TORCHRL], ids=["trl", "torchrl"])
def test_peers_do_not_clamp_log_ratios(golden: dict[str, Any]) -> None:
    # The wild token has a log-ratio of 25 and A < 0, where nothing else bounds the ratio.
    aggregation = "sequence" if golden is TRL else "token"
    objective = load("grpo", {} if golden is TRL else CLIP, aggregation=aggregation)
    inputs = peer_inputs(golden, "wild")
    weight = 1 / (3 * 6) if golden is TRL else 1 / inputs.num_tokens
    scale = float(-inputs.require("advantages")[6]) * weight
    ours, gradient = loss_and_gradient(objective, inputs)
    loss, moved = theirs(golden, "wild")
    assert loss - ours == pytest.approx(scale * (math.exp(25) - math.exp(20)), rel=1e-9)
    assert moved[6] == pytest.approx(scale * math.exp(25), rel=1e-9)
    assert gradient[6] == 0
    gradient[6] = moved[6]
    torch.testing.assert_close(gradient, moved, rtol=0, atol=1e-9)


def test_trls_rloo_clips_the_ratio_of_the_whole_sequence() -> None:
    # Ours on sequences as one token each, whose log-prob is the sum of theirs.
    inputs = peer_inputs(TRL, "rloo_all_trained", advantages=_rloo_advantages())
    one_each = _as_single_tokens(inputs)
    loss, gradient = loss_and_gradient(load("grpo"), one_each)
    spread = torch.where(inputs.loss_mask, gradient[inputs.sequence_index], 0.0)
    assert_same((loss, spread), theirs(TRL, "rloo_all_trained"))
    ours, _ = loss_and_gradient(
        load("rloo", aggregation="constant", constant=1.0),
        peer_inputs(TRL, "rloo_all_trained", advantages=_rloo_advantages()),
    )
    assert abs(ours - loss) > 1e-3


def test_trls_rloo_of_one_token_is_our_clip() -> None:
    inputs = peer_inputs(TRL, "rloo_one_token", advantages=_rloo_advantages())
    assert_same(loss_and_gradient(load("grpo"), inputs), theirs(TRL, "rloo_one_token"))


def test_our_rloo_moves_as_trls_does_on_policy() -> None:
    inputs = peer_inputs(TRL, "rloo_on_policy", advantages=_rloo_advantages())
    _, ours = loss_and_gradient(load("rloo", aggregation="constant", constant=1.0), inputs)
    torch.testing.assert_close(ours, theirs(TRL, "rloo_on_policy")[1], rtol=0, atol=1e-9)


def test_torchrls_cispo_does_not_move_clipped_tokens() -> None:
    inputs = peer_inputs(TORCHRL, "cispo")
    _, ours = loss_and_gradient(load("cispo", CLIP_DAPO), inputs)
    loss, gradient = theirs(TORCHRL, "cispo")
    ratio, advantages = inputs.log_ratio().exp().detach(), inputs.require("advantages")
    clipped = ratio.clamp(0.75, 1.5)
    assert loss == pytest.approx(float(inputs.token_mean(-clipped * advantages)), abs=1e-9)
    inside = torch.where(clipped == ratio, ours, 0.0)
    torch.testing.assert_close(gradient, inside, rtol=0, atol=1e-9)
    assert bool((ours[inputs.loss_mask & (clipped != ratio)] != 0).all())


@pytest.mark.parametrize("to", ["ref", "inference"])
def test_torchrls_kl_is_divided_by_untrained_positions_too(to: Any) -> None:
    name = f"kl_to_{to}"
    inputs = peer_inputs(TORCHRL, name)
    scaled = 0.125 * inputs.num_tokens / inputs.loss_mask.numel()
    objective = load("grpo", CLIP, kl_coeff=scaled, kl_to=to)
    assert_same(loss_and_gradient(objective, inputs), theirs(TORCHRL, name))


def test_torchrls_kl_mask_is_divided_by_the_tokens_that_are_left() -> None:
    inputs = peer_inputs(TORCHRL, "kl_mask")
    correction = Correction(kind="kl_mask", high=0.0625)
    kept = float(torch.where(inputs.loss_mask, correction.weights(inputs), 0.0).sum())
    assert 0 < kept < inputs.num_tokens
    loss, gradient = loss_and_gradient(load("grpo", CLIP, correction=correction), inputs)
    scale = inputs.num_tokens / kept
    assert_same((loss * scale, gradient * scale), theirs(TORCHRL, "kl_mask"))


def test_torchrls_kl_of_sft_is_a_mean_over_all_tokens() -> None:
    inputs = peer_inputs(TORCHRL, "sft_kl")
    num_all = sum(TORCHRL["tensors"]["lengths"])
    loss, gradient = loss_and_gradient(load("sft", aggregation="sequence"), inputs)
    of_kl = peer_inputs(TORCHRL, "sft_kl")
    kl, moved = loss_and_gradient(_only_kl(kl_coeff=0.125 * inputs.num_tokens / num_all), of_kl)
    assert_same((loss + kl, gradient + moved), theirs(TORCHRL, "sft_kl"))


def test_torchrls_minor_sft_of_sums_is_ours_with_beta_times_the_length() -> None:
    inputs = peer_inputs(TORCHRL, "minor_sft_of_sums")
    loss, gradient = 0.0, torch.zeros_like(inputs.policy_logprobs)
    for sequence in range(inputs.num_sequences):
        own = of_sequences(inputs, [sequence])
        value, moved = loss_and_gradient(load("minor_sft", {"beta": 0.5 * own.num_tokens}), own)
        loss += value / inputs.num_sequences
        gradient += moved / inputs.num_sequences
    assert_same((loss, gradient), theirs(TORCHRL, "minor_sft_of_sums"))


def test_torchrls_distillation_is_our_kl_term_alone() -> None:
    objective = _only_kl(aggregation="sequence")
    ours = loss_and_gradient(objective, peer_inputs(TORCHRL, "distill"))
    assert_same(ours, theirs(TORCHRL, "distill"))


def test_torchrls_forward_distillation_is_k3_with_its_sides_changed() -> None:
    inputs = peer_inputs(TORCHRL, "distill_forward", aggregation="sequence")

    def with_kl(batch: LossInputs) -> LossOutput:
        return LossOutput(batch.mean(k3(batch.require("ref_logprobs"), batch.policy_logprobs)), {})

    assert_same(loss_and_gradient(with_kl, inputs), theirs(TORCHRL, "distill_forward"))


def test_our_distill_has_the_gradient_of_k2_and_torchrls_that_of_k3() -> None:
    inputs = peer_inputs(TORCHRL, "distill")
    on_policy = peer_inputs(
        TORCHRL, "distill", inference_logprobs=inputs.policy_logprobs.detach().clone()
    )
    _, ours = loss_and_gradient(load("distill", aggregation="sequence"), on_policy)
    _, gradient = theirs(TORCHRL, "distill")
    gap = (inputs.policy_logprobs - inputs.require("ref_logprobs")).detach()
    share = torch.where(inputs.loss_mask, 1 / (inputs.sequence_num_tokens() * 6), 0.0)
    torch.testing.assert_close(ours, gap * share, rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, -torch.expm1(-gap) * share, rtol=0, atol=1e-9)


def _only_kl(**surroundings: Any) -> Objective:
    """No loss but the KL term to the reference."""

    def nothing(inputs: LossInputs) -> LossOutput:
        return LossOutput(inputs.mean(0.0 * inputs.policy_logprobs), {})

    return Objective(loss=nothing, **({"kl_coeff": 1.0} | surroundings))


def _rloo_advantages() -> torch.Tensor:
    advantages = torch.tensor(TRL["advantages"]["rloo"], dtype=torch.float64)
    return advantages.repeat_interleave(6)


def _as_single_tokens(inputs: LossInputs) -> LossInputs:
    """Each sequence as one token: the sum of its log-probs."""

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.loss_mask, values.detach(), 0.0).reshape(6, 6).sum(1)

    return LossInputs(
        policy_logprobs=total(inputs.policy_logprobs).requires_grad_(),
        sequence_index=torch.arange(6),
        loss_mask=torch.ones(6, dtype=torch.bool),
        num_tokens=6,
        num_sequences=6,
        inference_logprobs=total(inputs.require("inference_logprobs")),
        advantages=inputs.require("advantages")[::6],
    )
