"""What a group must be before the queue takes it in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dialoop.sequences import Along
from dialoop.trajectory import Stage
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.sequences import column_to_proto
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.replay.store import pack_group, pack_member
from dialoop_services.replay.validation import check_group

from tests.support.samples.replay_samples import (
    make_group,
    make_sequence,
    make_task,
    set_values,
    values_of,
    with_advantages,
)

TASK = make_task("a")


def first_sequence(group: pb.Group) -> pb.Sequence:
    return group.trajectories[0].sequences[0]


def reason_of(group: pb.Group, stage: Stage = Stage.UNSCORED, vocab_size: int = 100) -> str:
    rejection = check_group(group, stage=stage, vocab_size=vocab_size)
    return rejection.reason if rejection else ""


def drop_logprob(sequence: pb.Sequence) -> None:
    set_values(sequence, "inference_logprobs", [-0.5])


def add_token(sequence: pb.Sequence) -> None:
    set_values(sequence, "token_ids", [*values_of(sequence, "token_ids"), 1])


def leave_gap(sequence: pb.Sequence) -> None:
    sequence.segments[1].start += 1


def empty_segment(sequence: pb.Sequence) -> None:
    sequence.segments.add(start=5, length=0, source=pb.SOURCE_TOOL)


def forget_version(sequence: pb.Sequence) -> None:
    sequence.segments[1].ClearField("policy_version_index")
    sequence.ClearField("policy_versions")


def forget_source(sequence: pb.Sequence) -> None:
    sequence.segments[0].source = pb.SOURCE_UNSPECIFIED


def add_ref_logprob(sequence: pb.Sequence) -> None:
    set_values(sequence, "ref_logprobs", [-1.0])


def nan_logprob(sequence: pb.Sequence) -> None:
    set_values(sequence, "inference_logprobs", [float("nan"), -1.0])


def positive_logprob(sequence: pb.Sequence) -> None:
    set_values(sequence, "inference_logprobs", [0.5, -1.0])


def impossible_ref_logprob(sequence: pb.Sequence) -> None:
    set_values(sequence, "ref_logprobs", [-1e5, -1.0])


def negative_version(sequence: pb.Sequence) -> None:
    sequence.policy_versions[0].number = -1


def version_of_nobody(sequence: pb.Sequence) -> None:
    sequence.policy_versions.add(lineage="main", number=0)


def version_that_is_not_there(sequence: pb.Sequence) -> None:
    sequence.segments[1].policy_version_index = 1


def twice_the_same(sequence: pb.Sequence) -> None:
    sequence.columns.append(sequence.columns[0])


def other_type(sequence: pb.Sequence) -> None:
    sequence.columns[1].data_type = pb.DATA_TYPE_INT32


def missing_bytes(sequence: pb.Sequence) -> None:
    sequence.columns[1].data = sequence.columns[1].data[:-1]


def bad_name(sequence: pb.Sequence) -> None:
    sequence.columns.append(pb.Column(name="Routed experts", shape=[0]))


def gates_of(*values: float, rows: int = 5) -> Callable[[pb.Sequence], None]:
    def add(sequence: pb.Sequence) -> None:
        gates = np.resize(np.array(values, np.float16), (rows, 2, 1))
        sequence.columns.append(column_to_proto("expert_gates", Along.TOKENS, gates))

    return add


def experts_of(
    *shape: int, dtype: str = "u1", along: Along = Along.TOKENS
) -> Callable[[pb.Sequence], None]:
    def add(sequence: pb.Sequence) -> None:
        experts = np.zeros(shape, dtype)
        sequence.columns.append(column_to_proto("routed_experts", along, experts))

    return add


def infinite_advantage(sequence: pb.Sequence) -> None:
    sequence.advantage = float("inf")


def huge_advantage(sequence: pb.Sequence) -> None:
    sequence.advantage = 1e30


def huge_token_advantage(sequence: pb.Sequence) -> None:
    set_values(sequence, "token_advantages", [0.0, -1e30])


def turn_far_away(sequence: pb.Sequence) -> None:
    sequence.segments[1].turn = 2


def turn_before_the_first(sequence: pb.Sequence) -> None:
    sequence.segments[1].turn = -1


def message_far_away(sequence: pb.Sequence) -> None:
    sequence.segments[1].message_index = 10**9


def message_before_the_first(sequence: pb.Sequence) -> None:
    sequence.segments[0].message_index = -1


def negative_id(sequence: pb.Sequence) -> None:
    set_values(sequence, "token_ids", [-1, *values_of(sequence, "token_ids")[1:]])


def large_id(sequence: pb.Sequence) -> None:
    set_values(sequence, "token_ids", [100, *values_of(sequence, "token_ids")[1:]])


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
        (version_of_nobody, "OUT_OF_RANGE"),
        (version_that_is_not_there, "OUT_OF_RANGE"),
        (twice_the_same, "BAD_COLUMN"),
        (other_type, "BAD_COLUMN"),
        (missing_bytes, "BAD_COLUMN"),
        (bad_name, "BAD_COLUMN"),
        (gates_of(1, rows=4), "RAGGED"),
        (gates_of(1, float("inf")), "NON_FINITE"),
        (experts_of(4, 2, 1), "RAGGED"),
        (experts_of(5, 2), "BAD_COLUMN"),
        (experts_of(5, 2, 1, dtype="i4"), "BAD_COLUMN"),
        (experts_of(2, 2, 1, along=Along.SAMPLED), "BAD_COLUMN"),
        (infinite_advantage, "NON_FINITE"),
        (huge_advantage, "OUT_OF_RANGE"),
        (huge_token_advantage, "OUT_OF_RANGE"),
        (turn_far_away, "OUT_OF_RANGE"),
        (turn_before_the_first, "OUT_OF_RANGE"),
        (message_far_away, "OUT_OF_RANGE"),
        (message_before_the_first, "OUT_OF_RANGE"),
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
    set_values(first_sequence(group), "inference_logprobs", [1e-6, -1.0])
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
    set_values(first_sequence(group), "token_advantages", [0.1, 0.2])
    assert reason_of(group, Stage.SCORED) == ""


def test_scoring_keeps_the_digest_and_any_other_change_breaks_it() -> None:
    group = make_group(TASK)
    digest = pack_group(group)[0].digest
    assert pack_group(with_advantages(group))[0].digest == digest
    set_values(first_sequence(group), "token_ids", [6, 8, 2, 11, 12])
    assert pack_group(group)[0].digest != digest


def test_the_digest_ignores_the_order_of_labels() -> None:
    group, other = make_group(TASK), make_group(TASK)
    for name in ("x", "y", "z"):
        group.trajectories[0].labels[name] = name
    for name in ("z", "y", "x"):
        other.trajectories[0].labels[name] = name
    assert pack_group(group)[0].digest == pack_group(other)[0].digest


def test_the_facts_hold_the_oldest_and_newest_version_of_each_lineage() -> None:
    group = make_group(TASK, versions=[("main", 4), ("main", 6)])
    group.trajectories[1].sequences.append(make_sequence(("second", 0)))
    assert pack_member(group.trajectories[1])[0].versions == {"main": (4, 6), "second": (0, 0)}


@pytest.mark.parametrize(
    ("start", "num"), [(0, 2), (1, 1), (-1, 1), (0, -1), (2**31 - 1, 1), (1, -1)]
)
def test_a_turn_of_messages_that_are_not_there_is_refused(start: int, num: int) -> None:
    group = make_group(TASK)
    turn = group.trajectories[0].turns[0]
    turn.message_start, turn.num_messages = start, num
    rejection = check_group(group, stage=Stage.UNSCORED, vocab_size=0)
    assert rejection is not None
    assert rejection.reason == "OUT_OF_RANGE"
    assert "message_start" in rejection.message


def test_an_id_twice_or_of_another_group_is_refused() -> None:
    group = make_group(TASK)
    group.trajectories[1].trajectory_id = group.trajectories[0].trajectory_id
    assert reason_of(group) == "TRAJECTORY_REPEATED"
    group = make_group(TASK)
    group.trajectories[1].group_id = "b"
    assert reason_of(group) == "GROUP_MISMATCH"


def test_what_was_sampled_for_a_turn_whose_step_failed_is_taken() -> None:
    group = make_group(TASK)
    segment = first_sequence(group).segments[1]
    segment.turn = segment.message_index = 1
    assert reason_of(group) == ""


def test_the_digest_of_a_member_covers_what_scoring_may_change() -> None:
    """One with another reward was taken for a repetition of the first."""
    (bare,) = make_group(make_task("a", num_trajectories=1)).trajectories
    digests = {pack_member(bare)[0].digest}
    for change in ("reward", "ref_logprobs", "advantage", "token_advantages"):
        other = pb.Trajectory()
        other.CopyFrom(bare)
        if change == "reward":
            other.turns[0].rewards[0].value = 0.5
        elif change == "advantage":
            other.sequences[0].advantage = 0.0
        else:
            set_values(other.sequences[0], change, [-0.5, -0.5])
        digests.add(pack_member(other)[0].digest)
    assert len(digests) == 5
    assert len({digest.partition(".")[0] for digest in digests}) == 1


def test_the_vocabulary_is_that_of_the_model_once_it_is_there(tmp_path: Path) -> None:
    settings = ReplaySettings(model_dir=tmp_path)
    assert settings.read_vocab_size() == 0
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 151936}}')
    assert settings.read_vocab_size() == 151936
    assert ReplaySettings(model_dir=tmp_path, vocab_size=7).read_vocab_size() == 7
