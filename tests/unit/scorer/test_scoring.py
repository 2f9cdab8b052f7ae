from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop.errors import InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.sequences import Source, sequence_of
from dialoop.trajectory import DoneReason, Failure, Group, Owner, Reward, SamplingParams, Turn
from dialoop_learning.rl.advantages import AdvantageSettings
from dialoop_services.config.scorer_tables import RewardSpec
from dialoop_services.runtime import load
from dialoop_services.scorer.reference_batches import ReferenceBatches
from dialoop_services.scorer.rewards import (
    GroupReward,
    KlPenalty,
    load_rewards,
    token_kl,
    with_reward,
)
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.scorer.settings import ScorerSettings

from tests.support.samples.scorer_samples import MAIN_0, make_group, make_sequence
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def brevity(group) -> list[float]:
    return [-float(t.num_model_tokens) for t in group.trajectories]


class Halved:
    """A reference that finds every sampled token half a nat less likely than -0.5 and -1.25."""

    def __init__(self) -> None:
        self.temperatures = []

    def logprobs_of_sampled(self, sequences, temperatures):
        self.temperatures.extend(temperatures)
        return [s.inference_logprobs - np.float32(0.5) for s in sequences]

    def logprobs_of_all(self, token_ids, temperatures):
        raise AssertionError("not asked for")


def score_with(scoring: Scoring, group: Group) -> Group:
    return asyncio.run(scoring.score(group))


def advantages(group) -> list[float]:
    return [t.sequences[0].advantage for t in group.trajectories]


def test_a_scored_group_has_the_groups_advantage_on_every_sequence():
    two = (make_sequence(), make_sequence())
    scored = score_with(Scoring(), make_group(0.0, 1.0, sequences=two))
    for trajectory, expected in zip(scored.trajectories, (-0.7071, 0.7071), strict=True):
        assert [s.advantage for s in trajectory.sequences] == pytest.approx(
            [expected] * 2, abs=1e-4
        )


def test_scoring_twice_gives_the_same():
    scoring = Scoring(rewards=(GroupReward(name="brief", function=brevity, weight=0.5),))
    group = make_group(0.0, 1.0)
    assert score_with(scoring, group) == score_with(scoring, group)


def test_an_extra_reward_counts_with_its_weight_on_the_last_turn():
    extra = GroupReward(name="first", function=lambda _: [3.0, 0.0], weight=0.5)
    scored = score_with(
        Scoring(rewards=(extra,), advantages=AdvantageSettings(divide_by_std=False)),
        make_group(0.0, 1.0),
    )
    assert [t.reward for t in scored.trajectories] == [1.5, 1.0]
    assert advantages(scored) == pytest.approx([0.25, -0.25])


def test_an_extra_reward_may_say_whether_it_is_a_success_and_what_failed():
    def grade(_):
        return [
            Reward(name="own", value=0.5, weight=2.0, success=False),
            replace(Reward.dense("own", (0.25, 0.75)), feedback="Be brief."),
        ]

    extra = GroupReward(name="graded", function=grade, weight=0.1)
    scored = score_with(Scoring(rewards=(extra,)), make_group(0.0, 1.0))
    rewards = [t.turns[-1].rewards[-1] for t in scored.trajectories]
    assert rewards == [
        Reward(name="graded", value=0.5, weight=0.2, success=False),
        Reward(name="graded", value=1.0, weight=0.1, per_token=(0.25, 0.75), feedback="Be brief."),
    ]


@pytest.mark.parametrize("right", [True, np.True_])
def test_an_extra_reward_of_true_or_false_is_its_own_success(right):
    extra = GroupReward(name="right", function=lambda _: [right, not right])
    scored = score_with(Scoring(rewards=(extra,)), make_group(0.0, 1.0))
    rewards = [t.turns[-1].rewards[-1] for t in scored.trajectories]
    assert [(r.value, r.success) for r in rewards] == [(1.0, True), (0.0, False)]


@pytest.mark.parametrize(
    "function",
    [
        lambda _: 1 / 0,
        lambda _: [1.0],
        lambda _: [float("nan"), 0.0],
        lambda _: None,
        lambda _: [(1.0, True), (0.0, False)],
        lambda _: [Reward(name="r", value=1.0, weight=float("inf")), 0.0],
    ],
)
def test_a_reward_function_that_fails_is_an_error_and_never_a_zero(function):
    scoring = Scoring(rewards=(GroupReward(name="bad", function=function),))
    with pytest.raises(PreconditionFailed) as caught:
        score_with(scoring, make_group(0.0, 1.0))
    assert caught.value.reason == "REWARD_FAILED"
    assert "division" not in str(caught.value)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (make_group(1.0), "GROUP_TOO_SMALL"),
        (make_group(0.0, 1.0, size=3), "GROUP_INCOMPLETE"),
        (make_group(0.0, 1.0, sequences=()), "UNSCORABLE_TRAJECTORY"),
        (make_group(0.0, 1.0, turns=()), "UNSCORABLE_TRAJECTORY"),
        (
            make_group(0.0, 1.0, failures=(Failure(owner=Owner.TOOL, reason="X", message=""),)),
            "UNSCORABLE_TRAJECTORY",
        ),
    ],
)
def test_a_group_that_cannot_be_scored_says_why(group, reason):
    with pytest.raises(InvalidInput) as caught:
        score_with(Scoring(), group)
    assert caught.value.reason == reason


@pytest.mark.parametrize("cut", [{"terminated": True}, {"truncated": True}, {}])
def test_a_trajectory_that_has_not_ended_is_not_scored(cut):
    ending = {"terminated": False, "done_reason": DoneReason.NOT_DONE} | cut
    group = make_group(0.0, 1.0, **ending)
    if cut:
        assert score_with(Scoring(), group)
        return
    with pytest.raises(InvalidInput, match="Trajectory t0 has not ended") as caught:
        score_with(Scoring(), group)
    assert caught.value.reason == "TRAJECTORY_NOT_DONE"


def test_a_policys_own_failure_is_scored():
    mistakes = (Failure(owner=Owner.POLICY, reason="BAD_CALL", message=""),)
    assert score_with(Scoring(), make_group(0.0, 1.0, failures=mistakes))


def test_uniform_groups_are_kept_with_advantage_zero_or_dropped_when_asked():
    group = make_group(1.0, 1.0)
    assert advantages(score_with(Scoring(), group)) == [0.0, 0.0]
    with pytest.raises(PreconditionFailed) as caught:
        score_with(Scoring(drop_uniform=True), group)
    assert caught.value.reason == "UNIFORM_REWARD"


UNREWARDED = (Turn(message_start=1, num_messages=1),)


def gives_none_to(*places: int) -> GroupReward:
    """A function without a reward for the trajectories at these places, and else their number."""

    def function(group: Group) -> list[float | None]:
        numbers = range(group.num_trajectories)
        return [None if number in places else float(number) for number in numbers]

    return GroupReward(name="own", function=function)


def test_a_trajectory_without_a_reward_has_no_advantage_and_is_in_no_baseline():
    unplayed = make_group(0.0, 0.0, 0.0, turns=UNREWARDED)
    scored = score_with(Scoring(rewards=(gives_none_to(1),)), unplayed)
    alone = score_with(Scoring(), make_group(0.0, 2.0))
    assert advantages(scored) == [advantages(alone)[0], None, advantages(alone)[1]]
    assert [t.is_unrewarded for t in scored.trajectories] == [False, True, False]
    penalty = KlPenalty(coefficient=0.1)
    reference = ReferenceBatches(Halved)
    held = Scoring(rewards=(gives_none_to(1),), kl_penalty=penalty, reference=reference)
    assert len(score_with(held, unplayed).trajectories[1].turns[-1].rewards) == 1


@pytest.mark.parametrize("places", [(0, 1), (1,)])
def test_a_group_in_which_fewer_than_two_have_a_reward_says_so(places):
    scoring = Scoring(rewards=(gives_none_to(*places),), drop_uniform=True)
    with pytest.raises(PreconditionFailed) as caught:
        score_with(scoring, make_group(0.0, 0.0, turns=UNREWARDED))
    assert caught.value.reason == "NO_REWARD"


def played_turns(*rewards: float) -> dict[str, Any]:
    """Turns of one sampled token and one reward each."""
    turns = tuple(
        Turn(message_start=1, num_messages=1, rewards=(Reward(name="r", value=value),))
        for value in rewards
    )
    pieces: list[tuple[list[int], dict[str, Any]]] = [([5], {"source": Source.PROMPT})]
    for number in range(len(rewards)):
        model = {"source": Source.MODEL, "turn": number, "policy_version": MAIN_0}
        pieces.append(([11 + number], model))
    row = sequence_of(pieces, logprobs=[-0.5] * len(rewards))
    return {"turns": turns, "sequences": (row,)}


def test_turns_that_differ_are_no_uniform_group_though_their_sums_are_the_same():
    turns = (played_turns(1.0, 0.0), played_turns(0.0, 1.0))
    group = make_group(0.0, 0.0)
    pairs = zip(group.trajectories, turns, strict=True)
    differing = replace(group, trajectories=tuple(replace(t, **own) for t, own in pairs))
    scored = score_with(Scoring(per_turn=True, drop_uniform=True), differing)
    advantages = [t.sequences[0].token_advantages.tolist() for t in scored.trajectories]
    assert advantages == [
        pytest.approx([0.866, -0.866], abs=1e-3),
        pytest.approx([-0.866, 0.866], abs=1e-3),
    ]
    with pytest.raises(PreconditionFailed) as caught:
        score_with(
            Scoring(per_turn=True, drop_uniform=True),
            make_group(0.0, 0.0, **played_turns(1.0, 1.0)),
        )
    assert caught.value.reason == "UNIFORM_REWARD"


def test_reference_logprobs_are_one_per_sampled_token_at_the_sampling_temperature():
    reference = Halved()
    group = make_group(0.0, 1.0, sampling=SamplingParams(temperature=0.7))
    scored = score_with(Scoring(reference=ReferenceBatches(lambda: reference)), group)
    for trajectory in scored.trajectories:
        assert trajectory.sequences[0].ref_logprobs.tolist() == [-1.0, -1.75]
    assert reference.temperatures == [0.7, 0.7]


def test_the_kl_penalty_lowers_the_reward_by_coefficient_times_the_sum():
    penalty = KlPenalty(coefficient=0.1)
    scored = score_with(
        Scoring(reference=ReferenceBatches(Halved), kl_penalty=penalty), make_group(0.0, 1.0)
    )
    assert [t.reward for t in scored.trajectories] == pytest.approx([-0.1, 0.9])


def test_greedy_trajectories_have_no_reference_logprobs():
    group = make_group(0.0, 1.0, sampling=SamplingParams(temperature=0.0))
    with pytest.raises(InvalidInput) as caught:
        score_with(Scoring(reference=ReferenceBatches(Halved)), group)
    assert caught.value.reason == "INVALID_TEMPERATURE"


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_kl_estimates_are_those_computed_by_hand(estimator, value):
    policy, reference = np.float32([-1.0]), np.float32([-1.5])
    assert token_kl(policy, reference, estimator) == pytest.approx([value], abs=1e-6)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_kl_of_other_tokens_is_refused_and_not_spread_over_them(size):
    with pytest.raises(InvalidInput) as caught:
        token_kl(np.zeros(2, dtype=np.float32), np.zeros(size, dtype=np.float32))
    assert caught.value.reason == "RAGGED"


def test_a_reward_is_found_by_its_import_path():
    (reward,) = load_rewards([RewardSpec(name="b", use=f"{__name__}:brevity", weight=2.0)])
    assert reward.function(make_group(0.0, 1.0)) == [-2.0, -2.0]
    assert reward.weight == 2.0


@pytest.mark.parametrize("use", ["nothing", "no.such.module:x", "json:nothing", "json:__name__"])
def test_a_reward_that_cannot_be_found_names_itself(use):
    with pytest.raises(InvalidConfig, match=use.replace(".", r"\.")):
        load_rewards([RewardSpec(name="x", use=use)])


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_coefficient": 0.1},
        {"reference_logprobs": True},
        {"rewards": [{"name": "a", "use": "m:f"}, {"name": "a", "use": "m:g"}]},
        {"rewards": [{"name": "kl", "use": "m:f"}]},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(InvalidConfig):
        load(ScorerSettings, **settings).require_consistent()


def test_a_scorer_without_a_reference_imports_no_torch():
    check = "import sys, dialoop_services.scorer.__main__; assert 'torch' not in sys.modules"
    paths = f"import sys; sys.path[:0] = {[str(ROOT / name) for name in ('client', 'services')]}; "
    subprocess.run([sys.executable, "-c", paths + check], check=True, timeout=2 * PATIENCE_S)


async def _slow(group) -> list[float]:
    await asyncio.sleep(5)
    return [0.0] * group.num_trajectories


async def _async_reward(group) -> list[float]:
    await asyncio.sleep(0)
    return [2.0] * group.num_trajectories


def test_a_reward_may_be_async() -> None:
    reward = GroupReward(name="two", function=_async_reward)
    group = asyncio.run(with_reward(make_group(0.0, 1.0), reward))
    assert [t.reward for t in group.trajectories] == [2.0, 3.0]


def test_a_reward_that_takes_too_long_drops_the_group() -> None:
    reward = GroupReward(name="slow", function=_slow, timeout_s=0.05)
    with pytest.raises(PreconditionFailed, match="slow took more than") as caught:
        asyncio.run(with_reward(make_group(0.0, 1.0), reward))
    assert caught.value.reason == "REWARD_FAILED"
