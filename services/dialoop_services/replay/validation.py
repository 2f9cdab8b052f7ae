"""Validate groups and trajectories before the queue accepts them, without looking at the ledger.

check_group(group, stage=Stage.UNSCORED, vocab_size=32000)  # None, or why it is rejected
"""

from __future__ import annotations

import numpy as np
from dialoop.reasons import Reason
from dialoop.trajectory import Stage
from dialoop.v1 import replay_service_pb2
from dialoop.v1 import trajectory_pb2 as pb

_Rejection = replay_service_pb2.AppendOutcome

# A log-softmax in float32 rounds to at most a little above 0.
_MAX_LOGPROB = 1e-3
_MIN_LOGPROB = -1e4
# Beyond this, squares and sums of rewards lose all digits that tell them apart in float32.
_MAX_REWARD = 1e9


def check_group(group: pb.Group, *, stage: Stage, vocab_size: int) -> _Rejection | None:
    """Return the first thing wrong with the group, or None; `vocab_size` 0 means unknown."""
    num_model_tokens = 0
    for trajectory in group.trajectories:
        rejection = check_trajectory(trajectory, stage=stage, vocab_size=vocab_size)
        if rejection is not None:
            return rejection
        num_model_tokens += sum(map(_num_model_tokens, trajectory.sequences))
    # Evaluation groups are not trained on, so they may have no sampled token.
    if num_model_tokens == 0 and stage is not Stage.EVALUATION:
        return _reject(Reason.NO_TRAINABLE_TOKEN, f"Group {group.group_id}: no token was sampled.")
    return None


def check_trajectory(
    trajectory: pb.Trajectory, *, stage: Stage, vocab_size: int
) -> _Rejection | None:
    """Return the first thing wrong with the trajectory, or None; `vocab_size` 0 means unknown."""
    for index, sequence in enumerate(trajectory.sequences):
        rejection = _check_sequence(sequence, stage, vocab_size)
        if rejection is not None:
            where = f"Trajectory {trajectory.trajectory_id}, sequence {index}: "
            rejection.message = where + rejection.message
            return rejection
    return _check_rewards(trajectory)


def _check_rewards(trajectory: pb.Trajectory) -> _Rejection | None:
    for index, turn in enumerate(trajectory.turns):
        for reward in turn.rewards:
            values = np.array([reward.value, reward.weight, *reward.per_token])
            where = f"Trajectory {trajectory.trajectory_id}, turn {index}, reward '{reward.name}': "
            if not np.isfinite(values).all():
                return _reject(Reason.NON_FINITE, where + "a number is not finite.")
            if np.abs(values).max() > _MAX_REWARD:
                return _reject(
                    Reason.OUT_OF_RANGE, where + f"a number is above {_MAX_REWARD:g} in size."
                )
    return None


def _num_model_tokens(sequence: pb.Sequence) -> int:
    return sum(s.length for s in sequence.segments if s.source == pb.SOURCE_MODEL)


def _check_sequence(sequence: pb.Sequence, stage: Stage, vocab_size: int) -> _Rejection | None:
    return (
        _check_segments(sequence)
        or _check_lengths(sequence)
        or _check_ids(sequence, vocab_size)
        or _check_finite(sequence)
        or _check_logprobs(sequence)
        or (_check_advantage(sequence) if stage is Stage.SCORED else None)
    )


def _check_segments(sequence: pb.Sequence) -> _Rejection | None:
    position = 0
    for segment in sequence.segments:
        if segment.start != position or segment.length <= 0:
            return _reject_ragged(f"segments leave a gap or overlap at token {position}.")
        if segment.source == 0:
            return _reject_ragged(f"the segment at {position} has no source.")
        if (segment.source == pb.SOURCE_MODEL) != segment.HasField("policy_version"):
            return _reject_ragged(
                f"at {position}: sampled tokens need a policy version, others must have none."
            )
        if segment.policy_version.number < 0:
            return _reject(
                Reason.OUT_OF_RANGE,
                f"policy_version of the segment at {position} is {segment.policy_version.number}.",
            )
        position += segment.length
    if position != len(sequence.token_ids):
        return _reject_ragged(f"segments cover {position} of {len(sequence.token_ids)} tokens.")
    return None


def _check_lengths(sequence: pb.Sequence) -> _Rejection | None:
    expected = _num_model_tokens(sequence)
    if len(sequence.inference_logprobs) != expected:
        return _reject_ragged(
            f"{len(sequence.inference_logprobs)} log-probs for {expected} sampled tokens."
        )
    for name in ("ref_logprobs", "token_advantages"):
        if len(getattr(sequence, name)) not in (0, expected):
            return _reject_ragged(
                f"{len(getattr(sequence, name))} {name} for {expected} sampled tokens."
            )
    return None


def _check_ids(sequence: pb.Sequence, vocab_size: int) -> _Rejection | None:
    if not sequence.token_ids:
        return None
    ids = np.array(sequence.token_ids)
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or (vocab_size and highest >= vocab_size):
        wrong = lowest if lowest < 0 else highest
        return _reject(
            Reason.TOKEN_OUT_OF_RANGE,
            f"token id {wrong} is outside a vocabulary of {vocab_size or 'unknown size'}.",
        )
    return None


def _check_finite(sequence: pb.Sequence) -> _Rejection | None:
    for name in ("inference_logprobs", "ref_logprobs", "token_advantages"):
        if not np.isfinite(np.array(getattr(sequence, name))).all():
            return _reject(Reason.NON_FINITE, f"{name} has a value that is not finite.")
    if not np.isfinite(sequence.advantage):
        return _reject(Reason.NON_FINITE, "the advantage is not finite.")
    return None


def _check_logprobs(sequence: pb.Sequence) -> _Rejection | None:
    for name in ("inference_logprobs", "ref_logprobs"):
        values = np.array(getattr(sequence, name))
        if values.size and not _MIN_LOGPROB <= values.min() <= values.max() <= _MAX_LOGPROB:
            wrong = values.min() if values.min() < _MIN_LOGPROB else values.max()
            return _reject(
                Reason.OUT_OF_RANGE,
                f"{name} has {wrong:g}; log-probabilities are from {_MIN_LOGPROB:g} to 0.",
            )
    return None


def _check_advantage(sequence: pb.Sequence) -> _Rejection | None:
    if not _num_model_tokens(sequence):
        return None
    if sequence.HasField("advantage") or sequence.token_advantages:
        return None
    return _reject(Reason.NO_ADVANTAGE, "sampled tokens have no advantage.")


def _reject_ragged(message: str) -> _Rejection:
    return _reject(Reason.RAGGED, message)


def _reject(reason: Reason, message: str) -> _Rejection:
    status = replay_service_pb2.APPEND_STATUS_REJECTED
    return _Rejection(status=status, reason=reason, message=message)
