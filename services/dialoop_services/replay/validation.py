"""Validate groups and trajectories before the queue accepts them, without looking at the ledger.

check_group(group, stage=Stage.UNSCORED, vocab_size=32000)  # None, or why it is rejected

Sequences are read as the services behind the queue read them. What is checked here beside that is
what training needs of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dialoop.errors import InvalidInput, InvalidSequence
from dialoop.reasons import Reason
from dialoop.sequences import Sequence
from dialoop.trajectory import Stage, are_unrewarded
from dialoop.v1 import replay_service_pb2
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.records import REWARD
from dialoop.wire.sequences import sequence_from_proto
from dialoop_learning.rl import routed_experts
from dialoop_learning.rl.bounds import BOUNDS, MAX_SIZE
from numpy.typing import NDArray

_Rejection = replay_service_pb2.AppendOutcome
_MAX_LINEAGE = 512


def check_group(
    group: pb.Group,
    *,
    stage: Stage,
    vocab_size: int,
) -> _Rejection | None:
    """Return one thing that is wrong with the group, or None; `vocab_size` 0 means unknown."""
    group_id, num_sampled = group.group_id, 0
    ids = set[str]()
    try:
        for trajectory in group.trajectories:
            num_sampled += _require_fit(trajectory, group_id, stage, vocab_size)
            trajectory_id = trajectory.trajectory_id
            if trajectory_id in ids:
                message = f"Two trajectories have the trajectory_id '{trajectory_id}'."
                raise _unfit(Reason.TRAJECTORY_REPEATED, message)
            ids.add(trajectory_id)
        # Evaluation groups are not trained on, so they may have no sampled token.
        if not num_sampled and stage is not Stage.EVALUATION:
            raise _unfit(Reason.NO_TRAINABLE_TOKEN, f"Group {group_id}: no token was sampled.")
    except InvalidInput as error:
        return _rejection(error)
    return None


def check_trajectory(
    trajectory: pb.Trajectory,
    *,
    group_id: str,
    stage: Stage,
    vocab_size: int,
) -> _Rejection | None:
    """Return one thing that is wrong with the trajectory, or None, as `check_group` does."""
    try:
        _require_fit(trajectory, group_id, stage, vocab_size)
    except InvalidInput as error:
        return _rejection(error)
    return None


def _rejection(error: InvalidInput) -> _Rejection:
    status = replay_service_pb2.APPEND_STATUS_REJECTED
    return _Rejection(status=status, reason=error.reason, message=str(error))


def _unfit(reason: Reason, message: str) -> InvalidSequence:
    return InvalidSequence(message, reason=reason)


def _require_fit(trajectory: pb.Trajectory, group_id: str, stage: Stage, vocab_size: int) -> int:
    """Raise InvalidInput for what the queue does not take; return the number of samples."""
    name = f"Trajectory {trajectory.trajectory_id}"
    if trajectory.group_id != group_id:
        message = f"{name}: group_id is '{trajectory.group_id}', in group '{group_id}'."
        raise _unfit(Reason.GROUP_MISMATCH, message)
    num_messages, num_turns = len(trajectory.history.messages), len(trajectory.turns)
    for index, turn in enumerate(trajectory.turns):
        _require_turn(turn, f"{name}, turn {index}", num_messages)
    rewards = [REWARD.from_proto(reward) for turn in trajectory.turns for reward in turn.rewards]
    num_sampled, needed = 0, stage is Stage.SCORED and not are_unrewarded(rewards)
    for index, proto in enumerate(trajectory.sequences):
        try:
            sequence = _read(proto)
            _require_places(sequence, num_turns, num_messages)
            _require_numbers(sequence, vocab_size)
            _require_advantages(sequence, needed=needed)
        except InvalidInput as error:
            where = f"{name}, sequence {index}"
            raise _unfit(Reason(error.reason), f"{where}: {error}") from None
        num_sampled += sequence.num_model_tokens
    return num_sampled


def _require_turn(turn: pb.Turn, where: str, num_messages: int) -> None:
    """Raise InvalidSequence for a turn of messages that are not there, and for unfit rewards."""
    start, num = turn.message_start, turn.num_messages
    if not 0 <= start <= start + num <= num_messages:
        raise _unfit(
            Reason.OUT_OF_RANGE,
            f"{where}: message_start is {start} and num_messages {num}, of {num_messages} "
            "messages.",
        )
    for reward in turn.rewards:
        numbers = np.array([reward.value, reward.weight, *reward.per_token])
        named = f"{where}, reward '{reward.name}'"
        if not np.isfinite(numbers).all():
            raise _unfit(Reason.NON_FINITE, f"{named}: a number is not finite.")
        if np.abs(numbers).max() > MAX_SIZE:
            raise _unfit(Reason.OUT_OF_RANGE, f"{named}: a number is above {MAX_SIZE:g} in size.")


def _read(proto: pb.Sequence) -> Sequence:
    """Return the sequence; raise InvalidInput where its parts do not fit each other."""
    for segment in proto.segments:
        if segment.source == pb.SOURCE_UNSPECIFIED:
            raise _unfit(Reason.RAGGED, f"the segment at {segment.start} has no source.")
        if (segment.source == pb.SOURCE_MODEL) != segment.HasField("policy_version_index"):
            raise _unfit(
                Reason.RAGGED,
                f"at {segment.start}: sampled tokens need a policy version, others must have none.",
            )
    versions = proto.policy_versions
    used = {s.policy_version_index for s in proto.segments if s.source == pb.SOURCE_MODEL}
    if used != set(range(len(versions))):
        # A version that no segment names would count for staleness all the same.
        raise _unfit(
            Reason.OUT_OF_RANGE,
            f"policy_version_index of its segments has {sorted(used)}, of {len(versions)} "
            "policy_versions.",
        )
    for place, version in enumerate(versions):
        if version.number < 0 or len(version.lineage) > _MAX_LINEAGE:
            named = f"{version.lineage[:_MAX_LINEAGE]}-{version.number}"
            raise _unfit(Reason.OUT_OF_RANGE, f"policy version {place} is {named}.")
    return sequence_from_proto(proto)


def _require_places(sequence: Sequence, num_turns: int, num_messages: int) -> None:
    """Raise InvalidSequence for segments of turns and messages that are not there.

    One turn and message more may have been sampled, of a turn whose step failed.
    """
    for segment in sequence.segments:
        for what, number, most in (
            ("turn", segment.turn, num_turns),
            ("message_index", segment.message_index or 0, num_messages),
        ):
            if not 0 <= number <= most:
                message = f"{what} of the segment at {segment.start} is {number}, of {most}."
                raise _unfit(Reason.OUT_OF_RANGE, message)


def _require_numbers(sequence: Sequence, vocab_size: int) -> None:
    """Raise InvalidSequence where a number is not finite, or out of its column's bounds."""
    ids = sequence.token_ids
    if len(ids) and not 0 <= ids.min() <= ids.max() < (vocab_size or math.inf):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        size = vocab_size or "unknown size"
        message = f"token_ids has {wrong}, outside a vocabulary of {size}."
        raise _unfit(Reason.TOKEN_OUT_OF_RANGE, message)
    columns: dict[str, NDArray[Any]] = {name: getattr(sequence, name) for name in BOUNDS}
    columns |= {name: column.values for name, column in sequence.columns.items()}
    for name, values in columns.items():
        if not len(values) or values.dtype.kind != "f":
            continue
        if not np.isfinite(values).all():
            raise _unfit(Reason.NON_FINITE, f"{name} has a value that is not finite.")
        low, high = BOUNDS.get(name, (-math.inf, math.inf))
        lowest, highest = values.min(), values.max()
        if lowest < low or highest > high:
            wrong = lowest if lowest < low else highest
            message = f"{name} has {wrong:g}, and may have {low:g} to {high:g}."
            raise _unfit(Reason.OUT_OF_RANGE, message)
    experts = sequence.columns.get(routed_experts.COLUMN)
    if experts is not None and not routed_experts.has_form(experts):
        raise _unfit(
            Reason.BAD_COLUMN,
            f"{routed_experts.COLUMN} has {experts.values.ndim} axes of {experts.values.dtype}, "
            "and is [L, layers, k] of uint8 or uint16 along TOKENS.",
        )


def _require_advantages(sequence: Sequence, *, needed: bool) -> None:
    """Raise InvalidSequence where what training needs is absent or cannot be trained."""
    num_sampled = sequence.num_model_tokens
    if num_sampled and not len(sequence.inference_logprobs):
        raise _unfit(Reason.RAGGED, f"0 log-probs for {num_sampled} sampled tokens.")
    advantage = sequence.advantage
    if advantage is not None and not -MAX_SIZE <= advantage <= MAX_SIZE:
        reason = Reason.OUT_OF_RANGE if math.isfinite(advantage) else Reason.NON_FINITE
        raise _unfit(reason, f"advantage is {advantage:g}.")
    has_advantages = advantage is not None or len(sequence.token_advantages)
    if needed and num_sampled and not has_advantages:
        raise _unfit(Reason.NO_ADVANTAGE, "sampled tokens have no advantage.")
