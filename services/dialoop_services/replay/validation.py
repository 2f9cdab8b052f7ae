"""Validate groups and trajectories before the queue accepts them, without looking at the ledger.

check_group(group, stage=Stage.UNSCORED, vocab_size=32000)  # None, or why it is rejected

Columns of tokens are checked as arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from dialoop.errors import InvalidSequence
from dialoop.reasons import Reason
from dialoop.sequences import Along, Column
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire import columns_of
from numpy.typing import NDArray

from dialoop_services.replay.serialised import PER_TOKEN, floats_of

_Rejection = replay_service_pb2.AppendOutcome
_Columns = Mapping[str, Column]

# A log-softmax in float32 rounds to at most a little above 0.
_MAX_LOGPROB = 1e-3
_MIN_LOGPROB = -1e4
_NO_IDS = np.empty(0, np.int32)
# Beyond this, squares and sums lose all digits that tell rewards or advantages apart in float32.
_MAX_SIZE = 1e9
_PROBABILITY = (_MIN_LOGPROB, _MAX_LOGPROB)
_FINITE = (-sys.float_info.max, sys.float_info.max)
_BOUNDS = {
    "inference_logprobs": _PROBABILITY,
    "ref_logprobs": _PROBABILITY,
    "token_advantages": (-_MAX_SIZE, _MAX_SIZE),
}


def check_group(group: pb.Group, *, stage: Stage, vocab_size: int) -> _Rejection | None:
    """Return the first thing wrong with the group, or None; `vocab_size` 0 means unknown."""
    num_model_tokens = 0
    ids = set[str]()
    for trajectory in group.trajectories:
        rejection = check_trajectory(
            trajectory, group_id=group.group_id, stage=stage, vocab_size=vocab_size
        )
        if rejection is not None:
            return rejection
        if trajectory.trajectory_id in ids:
            message = f"Two trajectories have the trajectory_id '{trajectory.trajectory_id}'."
            return _reject(Reason.TRAJECTORY_REPEATED, message)
        ids.add(trajectory.trajectory_id)
        num_model_tokens += sum(map(_num_model_tokens, trajectory.sequences))
    # Evaluation groups are not trained on, so they may have no sampled token.
    if num_model_tokens == 0 and stage is not Stage.EVALUATION:
        return _reject(Reason.NO_TRAINABLE_TOKEN, f"Group {group.group_id}: no token was sampled.")
    return None


def check_trajectory(
    trajectory: pb.Trajectory, *, group_id: str, stage: Stage, vocab_size: int
) -> _Rejection | None:
    """Return the first thing wrong with the trajectory, or None; `vocab_size` 0 means unknown."""
    if trajectory.group_id != group_id:
        return _reject(
            Reason.GROUP_MISMATCH,
            f"Trajectory {trajectory.trajectory_id}: group_id is '{trajectory.group_id}', in group "
            f"'{group_id}'.",
        )
    rejection = _check_turns(trajectory)
    if rejection is not None:
        return rejection
    for index, sequence in enumerate(trajectory.sequences):
        rejection = _check_sequence(sequence, stage, vocab_size) or _check_places(
            sequence, len(trajectory.turns), len(trajectory.history.messages)
        )
        if rejection is not None:
            where = f"Trajectory {trajectory.trajectory_id}, sequence {index}: "
            rejection.message = where + rejection.message
            return rejection
    return None


def _check_turns(trajectory: pb.Trajectory) -> _Rejection | None:
    num_messages = len(trajectory.history.messages)
    for index, turn in enumerate(trajectory.turns):
        where = f"Trajectory {trajectory.trajectory_id}, turn {index}"
        start, end = turn.message_start, turn.message_start + turn.num_messages
        if not 0 <= start <= end <= num_messages:
            return _reject(
                Reason.OUT_OF_RANGE,
                f"{where}: message_start is {start} and num_messages {turn.num_messages}, of "
                f"{num_messages} messages.",
            )
        for reward in turn.rewards:
            rejection = _check_reward(reward)
            if rejection is not None:
                rejection.message = f"{where}, reward '{reward.name}': {rejection.message}"
                return rejection
    return None


def _check_reward(reward: pb.Reward) -> _Rejection | None:
    is_right = _is_number(reward.value) and _is_number(reward.weight)
    if reward.per_token and is_right:
        is_right = _lies_in(floats_of(reward.SerializeToString(), PER_TOKEN), -_MAX_SIZE, _MAX_SIZE)
    if is_right:
        return None
    if not np.isfinite([reward.value, reward.weight, *reward.per_token]).all():
        return _reject(Reason.NON_FINITE, "a number is not finite.")
    return _reject(Reason.OUT_OF_RANGE, f"a number is above {_MAX_SIZE:g} in size.")


def _is_number(value: float) -> bool:
    """Return whether the number can be trained; one that is not finite cannot."""
    return -_MAX_SIZE <= value <= _MAX_SIZE


def _lies_in(values: NDArray[Any], low: float, high: float) -> bool:
    # With a NaN both are NaN, which is in no order with the bounds.
    return not values.size or (low <= float(values.min()) and float(values.max()) <= high)


def _num_model_tokens(sequence: pb.Sequence) -> int:
    return sum(s.length for s in sequence.segments if s.source == pb.SOURCE_MODEL)


def _check_sequence(sequence: pb.Sequence, stage: Stage, vocab_size: int) -> _Rejection | None:
    try:
        columns = columns_of(sequence)
    except InvalidSequence as error:
        return _reject(Reason(error.reason), str(error))
    num_model_tokens = _num_model_tokens(sequence)
    ids = columns["token_ids"].values if "token_ids" in columns else _NO_IDS
    return (
        _check_versions(sequence)
        or _check_segments(sequence, ids.size)
        or _check_rows(columns, ids.size, num_model_tokens)
        or _check_ids(ids, vocab_size)
        or _check_values(sequence, columns)
        or (
            _reject(Reason.NO_ADVANTAGE, "sampled tokens have no advantage.")
            if stage is Stage.SCORED
            and num_model_tokens
            and not (sequence.HasField("advantage") or "token_advantages" in columns)
            else None
        )
    )


def _check_versions(sequence: pb.Sequence) -> _Rejection | None:
    """Reject versions that no segment names, which would count for staleness all the same."""
    places = {
        s.policy_version_index for s in sequence.segments if s.HasField("policy_version_index")
    }
    if places != set(range(len(sequence.policy_versions))):
        return _reject(
            Reason.OUT_OF_RANGE,
            f"policy_version_index of its segments has {sorted(places)}, of "
            f"{len(sequence.policy_versions)} policy_versions.",
        )
    for place, version in enumerate(sequence.policy_versions):
        if version.number < 0:
            return _reject(Reason.OUT_OF_RANGE, f"policy version {place} is {version.number}.")
    return None


def _check_segments(sequence: pb.Sequence, num_tokens: int) -> _Rejection | None:
    position = 0
    for segment in sequence.segments:
        if segment.start != position or segment.length <= 0:
            return _reject_ragged(f"segments leave a gap or overlap at token {position}.")
        if segment.source == 0:
            return _reject_ragged(f"the segment at {position} has no source.")
        if (segment.source == pb.SOURCE_MODEL) != segment.HasField("policy_version_index"):
            return _reject_ragged(
                f"at {position}: sampled tokens need a policy version, others must have none."
            )
        position += segment.length
    if position != num_tokens:
        return _reject_ragged(f"segments cover {position} of {num_tokens} tokens.")
    return None


def _check_places(sequence: pb.Sequence, num_turns: int, num_messages: int) -> _Rejection | None:
    """Reject segments of turns or messages that the trajectory does not have.

    One turn and message more may have been sampled, of a turn whose step failed.
    """
    for segment in sequence.segments:
        if not 0 <= segment.turn <= num_turns:
            return _reject(
                Reason.OUT_OF_RANGE,
                f"turn of the segment at {segment.start} is {segment.turn}, of {num_turns} turns.",
            )
        if segment.HasField("message_index") and not 0 <= segment.message_index <= num_messages:
            return _reject(
                Reason.OUT_OF_RANGE,
                f"message_index of the segment at {segment.start} is {segment.message_index}, of "
                f"{num_messages} messages.",
            )
    return None


def _check_rows(columns: _Columns, num_tokens: int, num_sampled: int) -> _Rejection | None:
    if num_sampled and "inference_logprobs" not in columns:
        return _reject_ragged(f"0 log-probs for {num_sampled} sampled tokens.")
    for name, column in columns.items():
        expected = num_tokens if column.along is Along.TOKENS else num_sampled
        num_rows = len(column.values)
        if num_rows != expected:
            what = "log-probs" if name == "inference_logprobs" else name
            kind = "tokens" if column.along is Along.TOKENS else "sampled tokens"
            return _reject_ragged(f"{num_rows} {what} for {expected} {kind}.")
    return None


def _check_ids(ids: NDArray[Any], vocab_size: int) -> _Rejection | None:
    if not ids.size:
        return None
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or (vocab_size and highest >= vocab_size):
        wrong = lowest if lowest < 0 else highest
        return _reject(
            Reason.TOKEN_OUT_OF_RANGE,
            f"token_ids has {wrong}, outside a vocabulary of {vocab_size or 'unknown size'}.",
        )
    return None


def _check_values(sequence: pb.Sequence, columns: _Columns) -> _Rejection | None:
    if not _is_number(sequence.advantage):
        reason = Reason.OUT_OF_RANGE if np.isfinite(sequence.advantage) else Reason.NON_FINITE
        return _reject(reason, f"advantage is {sequence.advantage:g}.")
    for name, column in columns.items():
        values, (low, high) = column.values, _BOUNDS.get(name, _FINITE)
        if values.dtype.kind != "f" or _lies_in(values, low, high):
            continue
        if not np.isfinite(values).all():
            return _reject(Reason.NON_FINITE, f"{name} has a value that is not finite.")
        wrong = values.min() if values.min() < low else values.max()
        return _reject(
            Reason.OUT_OF_RANGE, f"{name} has {wrong:g}, and may have {low:g} to {high:g}."
        )
    return None


def _reject_ragged(message: str) -> _Rejection:
    return _reject(Reason.RAGGED, message)


def _reject(reason: Reason, message: str) -> _Rejection:
    status = replay_service_pb2.APPEND_STATUS_REJECTED
    return _Rejection(status=status, reason=reason, message=message)
