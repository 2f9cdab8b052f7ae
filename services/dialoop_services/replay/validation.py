"""Validate groups and trajectories before the queue accepts them, without looking at the ledger.

check_group(group, stage=Stage.UNSCORED, vocab_size=32000)  # None, or why it is rejected

The numbers of all sequences of a group are compared with their bounds together, as arrays. Lists of
messages are read as slices, `sequence.columns[:]`: protobuf takes twice as long to walk through the
list itself.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from dialoop.errors import InvalidSequence
from dialoop.reasons import Reason
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.sequences import DATA_TYPES, FIXED_COLUMNS, column_twice, type_of_column
from dialoop_learning.rl import routed_experts
from dialoop_learning.rl.bounds import BOUNDS, MAX_SIZE
from numpy.typing import NDArray

_Rejection = replay_service_pb2.AppendOutcome

_FINITE = (-sys.float_info.max, sys.float_info.max)
# Characters of numpy's types of floating-point numbers.
_FLOATS = "efd"
_CHARS = {number: dtype.char for number, dtype in DATA_TYPES.items()}
_TOKENS, _SAMPLED, _MODEL = pb.ALONG_TOKENS, pb.ALONG_SAMPLED, pb.SOURCE_MODEL


class _Unfit(Exception):
    """What makes a group unfit to be taken, ended by where it is."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def within(self, where: str) -> _Unfit:
        """Return the same with its place in front."""
        return _Unfit(self.reason, f"{where}: {self.message}")

    def rejection(self) -> _Rejection:
        """Return the outcome of the append."""
        status = replay_service_pb2.APPEND_STATUS_REJECTED
        return _Rejection(status=status, reason=self.reason, message=self.message)


def check_group(
    group: pb.Group,
    *,
    stage: Stage,
    vocab_size: int,
) -> _Rejection | None:
    """Return one thing that is wrong with the group, or None; `vocab_size` 0 means unknown."""
    group_id, num_sampled = group.group_id, 0
    numbers: _Numbers = defaultdict(list)
    ids = set[str]()
    try:
        for trajectory in group.trajectories[:]:
            num_sampled += _check_form(trajectory, group_id, stage, numbers)
            trajectory_id = trajectory.trajectory_id
            if trajectory_id in ids:
                message = f"Two trajectories have the trajectory_id '{trajectory_id}'."
                raise _Unfit(Reason.TRAJECTORY_REPEATED, message)
            ids.add(trajectory_id)
        _check_numbers(numbers, vocab_size)
        # Evaluation groups are not trained on, so they may have no sampled token.
        if not num_sampled and stage is not Stage.EVALUATION:
            message = f"Group {group_id}: no token was sampled."
            raise _Unfit(Reason.NO_TRAINABLE_TOKEN, message)
    except _Unfit as unfit:
        return unfit.rejection()
    return None


def check_trajectory(
    trajectory: pb.Trajectory,
    *,
    group_id: str,
    stage: Stage,
    vocab_size: int,
) -> _Rejection | None:
    """Return one thing that is wrong with the trajectory, or None, as `check_group` does."""
    numbers: _Numbers = defaultdict(list)
    try:
        _check_form(trajectory, group_id, stage, numbers)
        _check_numbers(numbers, vocab_size)
    except _Unfit as unfit:
        return unfit.rejection()
    return None


# The bytes of many sequences' columns, by name and numpy's character of their type; each with the
# trajectory and the place of its sequence.
_Numbers = defaultdict[tuple[str, str], list[tuple[pb.Trajectory, int, bytes]]]


def _check_numbers(numbers: _Numbers, vocab_size: int) -> None:
    """Raise _Unfit where a number is not finite, or out of its column's bounds."""
    highest_id = vocab_size - 1 if vocab_size else math.inf
    for (name, char), columns in numbers.items():
        is_ids = name == "token_ids"
        if not is_ids and char not in _FLOATS:
            continue
        low, high = (0, highest_id) if is_ids else BOUNDS.get(name, _FINITE)
        whole = b"".join([data for _, _, data in columns])
        if _lies_in(np.frombuffer(whole, char), low, high):
            continue
        for trajectory, index, data in columns:
            values = np.frombuffer(data, char)
            if not _lies_in(values, low, high):
                raise _unfit_number(name, values, low, high).within(_place(trajectory, index))


def _place(trajectory: pb.Trajectory, index: int) -> str:
    return f"Trajectory {trajectory.trajectory_id}, sequence {index}"


def _unfit_number(name: str, values: NDArray[Any], low: float, high: float) -> _Unfit:
    lowest, highest = values.min(), values.max()
    wrong = lowest if float(lowest) < low else highest
    if name == "token_ids":
        size = "unknown size" if high == math.inf else str(int(high) + 1)
        message = f"token_ids has {wrong}, outside a vocabulary of {size}."
        return _Unfit(Reason.TOKEN_OUT_OF_RANGE, message)
    if not np.isfinite(values).all():
        return _Unfit(Reason.NON_FINITE, f"{name} has a value that is not finite.")
    message = f"{name} has {wrong:g}, and may have {low:g} to {high:g}."
    return _Unfit(Reason.OUT_OF_RANGE, message)


def _lies_in(values: NDArray[Any], low: float, high: float) -> bool:
    # With a NaN both are NaN, which is in no order with the bounds.
    return not values.size or (low <= float(values.min()) and float(values.max()) <= high)


def _check_form(trajectory: pb.Trajectory, group_id: str, stage: Stage, numbers: _Numbers) -> int:
    """Raise _Unfit where parts do not fit each other; return the number of samples.

    What columns hold is added to `numbers`, for the caller to check.
    """
    if trajectory.group_id != group_id:
        raise _Unfit(
            Reason.GROUP_MISMATCH,
            f"Trajectory {trajectory.trajectory_id}: group_id is '{trajectory.group_id}', in group "
            f"'{group_id}'.",
        )
    # Asking for an absent history or list would make an empty one.
    num_sampled = num_messages = num_turns = 0
    if trajectory.HasField("history"):
        num_messages = len(trajectory.history.messages)
    if turns := trajectory.turns:
        num_turns = len(turns)
        _check_turns(trajectory, num_messages)
    for index, sequence in enumerate(trajectory.sequences[:]):
        try:
            num_tokens, num_here = _check_segments(sequence, num_turns, num_messages)
            columns = _check_columns(sequence, num_tokens, num_here)
            _check_presence(sequence, stage, columns, num_tokens, num_here)
        except (_Unfit, InvalidSequence) as error:
            raise _Unfit(Reason(error.reason), str(error)).within(
                _place(trajectory, index)
            ) from None
        num_sampled += num_here
        for name, (char, data) in columns.items():
            numbers[name, char].append((trajectory, index, data))
    return num_sampled


def _check_turns(trajectory: pb.Trajectory, num_messages: int) -> None:
    """Raise _Unfit for turns of messages that are not there, and for unfit rewards."""
    for index, turn in enumerate(trajectory.turns[:]):
        start, num = turn.message_start, turn.num_messages
        if not 0 <= start <= start + num <= num_messages:
            raise _Unfit(
                Reason.OUT_OF_RANGE,
                f"Trajectory {trajectory.trajectory_id}, turn {index}: message_start is {start} "
                f"and num_messages {num}, of {num_messages} messages.",
            )
        for reward in turn.rewards[:]:
            if not _is_trainable(reward):
                where = f"Trajectory {trajectory.trajectory_id}, turn {index}"
                raise _unfit_reward(reward).within(f"{where}, reward '{reward.name}'")


def _is_trainable(reward: pb.Reward) -> bool:
    if not (_is_number(reward.value) and _is_number(reward.weight)):
        return False
    if not reward.per_token:
        return True
    return _lies_in(np.array(reward.per_token, np.float32), -MAX_SIZE, MAX_SIZE)


def _unfit_reward(reward: pb.Reward) -> _Unfit:
    if not np.isfinite([reward.value, reward.weight, *reward.per_token]).all():
        return _Unfit(Reason.NON_FINITE, "a number is not finite.")
    return _Unfit(Reason.OUT_OF_RANGE, f"a number is above {MAX_SIZE:g} in size.")


def _is_number(value: float) -> bool:
    """Return whether the number can be trained; one that is not finite cannot."""
    return -MAX_SIZE <= value <= MAX_SIZE


def _check_columns(
    sequence: pb.Sequence, num_tokens: int, num_sampled: int
) -> dict[str, tuple[str, bytes]]:
    """Raise _Unfit or InvalidSequence for columns that fit neither themselves nor the tokens.

    Return numpy's character of each column's type, and its bytes, by name.
    """
    columns = dict[str, tuple[str, bytes]]()
    for proto in sequence.columns[:]:
        name, number, along = proto.name, proto.data_type, proto.along
        shape, data = proto.shape, proto.data
        if name in columns:
            raise column_twice(name)
        fixed = FIXED_COLUMNS.get(name)
        if fixed == (number, along) and len(shape) == 1 and shape[0] * 4 == len(data):
            char = _CHARS[number]
        else:
            char = type_of_column(name, number, along, shape, len(data)).char
        if shape[0] != (num_tokens if along == _TOKENS else num_sampled):
            raise _unfit_rows(name, shape[0], along, num_tokens, num_sampled)
        if name == routed_experts.COLUMN and not routed_experts.has_form(
            DATA_TYPES[number], along, len(shape)
        ):
            raise _Unfit(
                Reason.BAD_COLUMN,
                f"{name} has {len(shape)} axes of {DATA_TYPES[number]}, and is [L, layers, k] of "
                "uint8 or uint16 along TOKENS.",
            )
        columns[name] = char, data
    return columns


def _check_presence(
    sequence: pb.Sequence,
    stage: Stage,
    columns: Mapping[str, object],
    num_tokens: int,
    num_sampled: int,
) -> None:
    """Raise _Unfit where what training needs of the sequence is absent or cannot be trained."""
    if num_tokens and "token_ids" not in columns:
        raise _unfit_rows("token_ids", 0, _TOKENS, num_tokens, num_sampled)
    if num_sampled and "inference_logprobs" not in columns:
        raise _unfit_rows("inference_logprobs", 0, _SAMPLED, num_tokens, num_sampled)
    advantage = sequence.advantage
    if not -MAX_SIZE <= advantage <= MAX_SIZE:
        reason = Reason.OUT_OF_RANGE if math.isfinite(advantage) else Reason.NON_FINITE
        raise _Unfit(reason, f"advantage is {advantage:g}.")
    if stage is not Stage.SCORED or not num_sampled or "token_advantages" in columns:
        return
    if not sequence.HasField("advantage"):
        raise _Unfit(Reason.NO_ADVANTAGE, "sampled tokens have no advantage.")


def _unfit_rows(name: str, num_rows: int, along: int, num_tokens: int, num_sampled: int) -> _Unfit:
    if name == "token_ids":
        return _unfit_shape(f"segments cover {num_tokens} of {num_rows} tokens.")
    what = "log-probs" if name == "inference_logprobs" else name
    if along == _TOKENS:
        return _unfit_shape(f"{num_rows} {what} for {num_tokens} tokens.")
    return _unfit_shape(f"{num_rows} {what} for {num_sampled} sampled tokens.")


def _check_segments(sequence: pb.Sequence, num_turns: int, num_messages: int) -> tuple[int, int]:
    """Raise _Unfit for gaps and for what is not there; return the numbers of tokens and samples.

    One turn and message more may have been sampled, of a turn whose step failed.
    """
    position = num_sampled = 0
    places = set[int]()
    for segment in sequence.segments[:]:
        start, length, source = segment.start, segment.length, segment.source
        if start != position or length <= 0:
            raise _unfit_shape(f"segments leave a gap or overlap at token {position}.")
        if source == 0:
            raise _unfit_shape(f"the segment at {position} has no source.")
        if (source == _MODEL) != segment.HasField("policy_version_index"):
            raise _unfit_shape(
                f"at {position}: sampled tokens need a policy version, others must have none."
            )
        if source == _MODEL:
            num_sampled += length
            places.add(segment.policy_version_index)
        # Absent numbers are 0.
        if not (0 <= segment.turn <= num_turns and 0 <= segment.message_index <= num_messages):
            raise _unfit_place(segment, num_turns, num_messages)
        position += length
    versions = sequence.policy_versions[:]
    num = len(versions)
    if len(places) != num or (num and (min(places) < 0 or max(places) >= num)):
        # A version that no segment names would count for staleness all the same.
        raise _Unfit(
            Reason.OUT_OF_RANGE,
            f"policy_version_index of its segments has {sorted(places)}, of {num} policy_versions.",
        )
    for place, version in enumerate(versions):
        if version.number < 0:
            raise _Unfit(Reason.OUT_OF_RANGE, f"policy version {place} is {version.number}.")
    return position, num_sampled


def _unfit_place(segment: pb.Segment, num_turns: int, num_messages: int) -> _Unfit:
    what, number, of = "turn", segment.turn, f"{num_turns} turns"
    if 0 <= number <= num_turns:
        what, number, of = "message_index", segment.message_index, f"{num_messages} messages"
    message = f"{what} of the segment at {segment.start} is {number}, of {of}."
    return _Unfit(Reason.OUT_OF_RANGE, message)


def _unfit_shape(message: str) -> _Unfit:
    return _Unfit(Reason.RAGGED, message)
