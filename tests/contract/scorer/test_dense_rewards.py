"""Rewards with one number for each token, from the queue through the scorer to the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dialoop.errors import PreconditionFailed
from dialoop.trajectory import Reward, Stage, Turn
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.rl.advantages import AdvantageSettings
from dialoop_learning.training import forward_backward
from dialoop_services.scorer.reference_batches import ReferenceBatches
from dialoop_services.scorer.rewards import GroupReward, KlPenalty
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.scorer.servicer import Scorer
from transformers import AutoModelForCausalLM

from tests.support.collector_world import RUN, world
from tests.support.samples.scorer_samples import make_group, make_sequence
from tests.support.scorer_world import append, scoring, with_names

CENTRED = AdvantageSettings(divide_by_std=False)


def two_answers(*, with_dense: bool = True) -> Any:
    """Rewards 0 and 1, with (-1, -2) and (0, -1, -1) on the tokens."""
    group = make_group(0.0, 1.0, task_id="dense")
    sampled = ((11, 12), (13, 14, 15))
    dense = ((-1.0, -2.0), (0.0, -1.0, -1.0))
    members = []
    for trajectory, ids, values in zip(group.trajectories, sampled, dense, strict=True):
        extra = (Reward.dense("d", values),) if with_dense else ()
        (turn,) = trajectory.turns
        members.append(
            replace(
                trajectory,
                turns=(replace(turn, rewards=(*turn.rewards, *extra)),),
                sequences=(make_sequence(sampled=ids, logprobs=(-1.0,) * len(ids)),),
            )
        )
    return with_names(replace(group, trajectories=tuple(members)))


async def scored_through_the_queue(group: Any, scorer: Scorer) -> Any:
    async with world() as w:
        (outcome,) = await append(w, group)
        assert not outcome.reason
        async with scoring(w, scorer):
            await w.until(lambda c: c.num_groups_scored == 1)
        leased = await w.replay.lease_groups(RUN, Stage.SCORED, worker="t", max_groups=1)
    (lease,) = leased.leases
    return lease.group


def advantages(group: Any) -> list[list[float]]:
    return [t.sequences[0].token_advantages.tolist() for t in group.trajectories]


async def test_dense_rewards_reach_the_trainer_as_advantages_of_tokens() -> None:
    scored = await scored_through_the_queue(two_answers(), Scorer(Scoring(advantages=CENTRED)))
    assert advantages(scored) == [[-1.0, -0.5], [1.0, 0.5, 0.0]]
    assert [t.sequences[0].advantage for t in scored.trajectories] == [None, None]
    rows = [TokenRow.from_sequence(t.sequences[0]) for t in scored.trajectories]
    packed = pack_rows(rows)
    assert packed.gather(packed.advantages).tolist() == [-1.0, -0.5, 1.0, 0.5, 0.0]


async def test_plain_rewards_alone_give_the_advantages_of_trajectories() -> None:
    group = two_answers(with_dense=False)
    scored = await scored_through_the_queue(group, Scorer(Scoring(advantages=CENTRED)))
    assert [t.sequences[0].advantage for t in scored.trajectories] == [-0.5, 0.5]
    assert advantages(scored) == [[], []]


async def test_a_loss_of_token_advantages_is_the_sum_by_hand_packed_or_not(tmp_path: Any) -> None:
    scored = await scored_through_the_queue(two_answers(), Scorer(Scoring(advantages=CENTRED)))
    directory = make_tiny_model(tmp_path, seed=0)
    policy = load_policy(directory).double()
    rows = [TokenRow.from_sequence(t.sequences[0]) for t in scored.trajectories]
    objective = load_objective("cispo", {"clip_high": 1e9})  # -A ratio log p, ratio no gradient

    def gradient(batches: list[Any]) -> tuple[float, torch.Tensor]:
        policy.zero_grad(set_to_none=True)
        report = forward_backward(policy, batches, objective)
        return report.loss, torch.cat(
            [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        )

    packed = gradient([pack_rows(rows)])
    alone = gradient([pack_rows([row]) for row in rows])
    # By hand, from the model's own log-probs of each row without any packing.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    by_hand = {0: (-1.0, -0.5), 1: (1.0, 0.5, 0.0)}
    for number, row in enumerate(rows):
        logits = model(row.token_ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = logits.gather(-1, row.token_ids[1:, None])[row.response_mask[1:], 0]
        ratio = (logprobs.detach() + 1.0).exp()  # the sampler's log-probs are -1
        total = total - (torch.tensor(by_hand[number]) * ratio * logprobs).sum() / 5
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for loss, computed in (packed, alone):
        assert loss == pytest.approx(float(total.detach()), rel=1e-6)
        assert float((computed - expected).norm()) <= 1e-5 * float(expected.norm())
    assert alone[0] == pytest.approx(packed[0], abs=1e-12)


class Given:
    """A reference that is 0.5, 1.0, 1.5, ... nats less sure of each next token than the sampler."""

    def logprobs_of_sampled(self, sequences: Any, temperatures: Any) -> Any:
        return [
            s.inference_logprobs - np.arange(1, s.num_model_tokens + 1, dtype=np.float32) / 2
            for s in sequences
        ]

    def logprobs_of_all(self, token_ids: Any, temperatures: Any) -> Any:
        raise NotImplementedError


async def test_the_kl_penalty_is_a_dense_reward() -> None:
    kl = Scoring(
        advantages=CENTRED,
        reference=ReferenceBatches(Given),
        kl_penalty=KlPenalty(coefficient=0.1),
    )
    group = two_answers(with_dense=False)
    scored = await scored_through_the_queue(group, Scorer(kl))
    rewards = [t.turns[-1].rewards[-1] for t in scored.trajectories]
    assert rewards == [
        Reward.dense("kl", (-0.5, -1.0), weight=pytest.approx(0.1)),
        Reward.dense("kl", (-0.5, -1.0, -1.5), weight=pytest.approx(0.1)),
    ]
    assert [t.reward for t in scored.trajectories] == pytest.approx([-0.15, 0.7])
    # to come: -.15, -.1, 0 and .7, .75, .85
    first, second = advantages(scored)
    assert first == pytest.approx([-0.425, -0.425])
    assert second == pytest.approx([0.425, 0.425, 0.425])


async def test_a_group_reward_gives_one_value_for_each_token_of_all_turns() -> None:
    def by_token(group: Any) -> list[Reward]:
        return [
            Reward.dense("x", [float(n) for n in range(t.num_model_tokens)], weight=2.0)
            for t in group.trajectories
        ]

    def wrong(group: Any) -> list[Reward]:
        return [Reward.dense("x", [1.0]) for _ in group.trajectories]

    group = two_answers(with_dense=False)
    first = group.trajectories[0]
    (own,) = first.sequences
    second_turn = replace(own.segments[-1], start=4, length=1, turn=1)
    split = replace(
        own, segments=(own.segments[0], replace(own.segments[-1], length=1), second_turn)
    )
    turns = (*first.turns, Turn(message_start=1, num_messages=1))
    first = replace(first, turns=turns, sequences=(split,))
    group = replace(group, trajectories=(first, group.trajectories[1]))
    scored = await Scoring(rewards=(GroupReward(name="x", function=by_token),)).score(group)
    of_turns = [turn.rewards[-1] for turn in scored.trajectories[0].turns]
    assert of_turns == [Reward.dense("x", [0.0], weight=2.0), Reward.dense("x", [1.0], weight=2.0)]
    with pytest.raises(PreconditionFailed, match="gave 1 values per token for the 2 sampled"):
        await Scoring(rewards=(GroupReward(name="x", function=wrong),)).score(group)
