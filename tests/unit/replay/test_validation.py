"""What a group must be before the queue takes it in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dialoop.trajectory import Stage
from dialoop.v1 import trajectory_pb2 as pb
from dialoop_services.replay.store import group_facts, member_facts
from dialoop_services.replay.validation import check_group

from tests.support.samples.replay_samples import (
    make_group,
    make_sequence,
    make_task,
    with_advantages,
)

TASK = make_task("a")


def first_sequence(group: pb.Group) -> pb.Sequence:
    return group.trajectories[0].sequences[0]


def reason_of(group: pb.Group, stage: Stage = Stage.UNSCORED, vocab_size: int = 100) -> str:
    rejection = check_group(group, stage=stage, vocab_size=vocab_size)
    return rejection.reason if rejection else ""


def drop_logprob(sequence: pb.Sequence) -> None:
    del sequence.inference_logprobs[-1]


def add_token(sequence: pb.Sequence) -> None:
    sequence.token_ids.append(1)


def leave_gap(sequence: pb.Sequence) -> None:
    sequence.segments[1].start += 1


def empty_segment(sequence: pb.Sequence) -> None:
    sequence.segments.add(start=5, length=0, source=pb.SOURCE_TOOL)


def forget_version(sequence: pb.Sequence) -> None:
    sequence.segments[1].ClearField("policy_version")


def forget_source(sequence: pb.Sequence) -> None:
    sequence.segments[0].source = pb.SOURCE_UNSPECIFIED


def add_ref_logprob(sequence: pb.Sequence) -> None:
    sequence.ref_logprobs.append(-1.0)


def nan_logprob(sequence: pb.Sequence) -> None:
    sequence.inference_logprobs[0] = float("nan")


def positive_logprob(sequence: pb.Sequence) -> None:
    sequence.inference_logprobs[0] = 0.5


def impossible_ref_logprob(sequence: pb.Sequence) -> None:
    sequence.ref_logprobs.extend([-1e5, -1.0])


def negative_version(sequence: pb.Sequence) -> None:
    sequence.segments[1].policy_version.number = -1


def infinite_advantage(sequence: pb.Sequence) -> None:
    sequence.advantage = float("inf")


def negative_id(sequence: pb.Sequence) -> None:
    sequence.token_ids[0] = -1


def large_id(sequence: pb.Sequence) -> None:
    sequence.token_ids[0] = 100


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (drop_logprob, "RAGGED"),
        (add_token, "RAGGED"),
        (leave_gap, "RAGGED"),
        (empty_segment, "RAGGED"),
        (forget_version, "RAGGED"),
        (forget_source, "RAGGED"),
        (add_ref_logprob, "RAGGED"),
        (nan_logprob, "NON_FINITE"),
        (positive_logprob, "OUT_OF_RANGE"),
        (impossible_ref_logprob, "OUT_OF_RANGE"),
        (negative_version, "OUT_OF_RANGE"),
        (infinite_advantage, "NON_FINITE"),
        (negative_id, "TOKEN_OUT_OF_RANGE"),
        (large_id, "TOKEN_OUT_OF_RANGE"),
    ],
)
def test_a_broken_sequence_is_refused(spoil: Callable[[pb.Sequence], None], reason: str) -> None:
    group = make_group(TASK)
    assert reason_of(group) == ""
    spoil(first_sequence(group))
    assert reason_of(group) == reason


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (pb.Reward(name="judge", value=float("nan")), "NON_FINITE"),
        (pb.Reward(name="judge", value=float("inf")), "NON_FINITE"),
        (pb.Reward(name="judge", value=1.0, weight=float("nan")), "NON_FINITE"),
        (pb.Reward(name="judge", value=1.0, per_token=[float("inf")]), "NON_FINITE"),
        (pb.Reward(name="judge", value=-1e30), "OUT_OF_RANGE"),
        (pb.Reward(name="judge", value=1.0, per_token=[1e10, -1e10]), "OUT_OF_RANGE"),
    ],
)
@pytest.mark.parametrize("stage", [Stage.UNSCORED, Stage.SCORED])
def test_a_reward_that_cannot_be_trained_is_refused_by_name(
    wrong: pb.Reward, reason: str, stage: Stage
) -> None:
    group = make_group(TASK)
    if stage is Stage.SCORED:
        group = with_advantages(group)
    group.trajectories[1].turns[0].rewards.append(wrong)
    rejection = check_group(group, stage=stage, vocab_size=100)
    assert rejection is not None
    assert rejection.reason == reason
    assert rejection.message.startswith("Trajectory a.1, turn 0, reward 'judge': ")


def test_a_log_probability_that_rounding_put_above_zero_is_taken() -> None:
    group = make_group(TASK)
    first_sequence(group).inference_logprobs[0] = 1e-6
    assert reason_of(group) == ""


def test_without_a_known_vocabulary_only_negative_ids_are_refused() -> None:
    group = make_group(TASK)
    large_id(first_sequence(group))
    assert reason_of(group, vocab_size=0) == ""
    negative_id(first_sequence(group))
    assert reason_of(group, vocab_size=0) == "TOKEN_OUT_OF_RANGE"


def test_a_group_without_sampled_tokens_trains_nothing_but_can_be_evaluated() -> None:
    group = make_group(TASK)
    for trajectory in group.trajectories:
        del trajectory.sequences[:]
    assert reason_of(group) == "NO_TRAINABLE_TOKEN"
    assert reason_of(group, Stage.EVALUATION) == ""


def test_a_scored_group_needs_an_advantage_on_every_sampled_sequence() -> None:
    assert reason_of(make_group(TASK), Stage.SCORED) == "NO_ADVANTAGE"
    group = with_advantages(make_group(TASK))
    assert reason_of(group, Stage.SCORED) == ""
    first_sequence(group).ClearField("advantage")
    assert reason_of(group, Stage.SCORED) == "NO_ADVANTAGE"
    first_sequence(group).token_advantages.extend([0.1, 0.2])
    assert reason_of(group, Stage.SCORED) == ""


def test_scoring_keeps_the_digest_and_any_other_change_breaks_it() -> None:
    group = make_group(TASK)
    digest = group_facts(group).digest
    assert group_facts(with_advantages(group)).digest == digest
    first_sequence(group).token_ids[0] = 6
    assert group_facts(group).digest != digest


def test_the_digest_ignores_the_order_of_labels() -> None:
    group, other = make_group(TASK), make_group(TASK)
    for name in ("x", "y", "z"):
        group.trajectories[0].labels[name] = name
    for name in ("z", "y", "x"):
        other.trajectories[0].labels[name] = name
    assert group_facts(group).digest == group_facts(other).digest


def test_the_facts_hold_the_oldest_and_newest_version_of_each_lineage() -> None:
    group = make_group(TASK, versions=[("main", 4), ("main", 6)])
    group.trajectories[1].sequences.append(make_sequence(("second", 0)))
    assert member_facts(group.trajectories[1]).versions == {"main": (4, 6), "second": (0, 0)}
