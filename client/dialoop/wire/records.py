"""Sequences, tasks, trajectories and groups to protobuf and back.

Arrays are read with `numpy.array(field)` and written from lists: measured fastest. An absent
field stays absent; nothing is filled in.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dialoop.errors import InvalidHistory, InvalidInput
from dialoop.sequences import ForkCause, PolicyVersion, Segment, Sequence, Source
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Group,
    Owner,
    Purpose,
    Reward,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from dialoop.v1 import trajectory_pb2
from dialoop.wire.messages import history_from_proto, history_to_proto

if TYPE_CHECKING:
    from collections.abc import Callable

_E = TypeVar("_E")


def _number(value: IntEnum) -> Any:
    """An enum's number; the stubs ask for enum classes that do not exist at run time."""
    return int(value)


def _enum(kind: Callable[[int], _E], value: int, name: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(
            f"{name} is unspecified or unknown ({value}).", remedy=f"Set {name}."
        ) from None


def policy_version_to_proto(version: PolicyVersion) -> trajectory_pb2.PolicyVersion:
    """A policy version."""
    return trajectory_pb2.PolicyVersion(lineage=version.lineage, number=version.number)


def policy_version_from_proto(proto: trajectory_pb2.PolicyVersion) -> PolicyVersion:
    """A policy version."""
    return PolicyVersion(lineage=proto.lineage, number=proto.number)


def segment_to_proto(segment: Segment) -> trajectory_pb2.Segment:
    """One segment."""
    version = segment.policy_version
    return trajectory_pb2.Segment(
        start=segment.start,
        length=segment.length,
        source=_number(segment.source),
        turn=segment.turn,
        message_index=segment.message_index,
        char_start=segment.char_start,
        char_length=segment.char_length,
        policy_version=None if version is None else policy_version_to_proto(version),
    )


def segment_from_proto(proto: trajectory_pb2.Segment) -> Segment:
    """One segment."""
    return Segment(
        start=proto.start,
        length=proto.length,
        source=_enum(Source, proto.source, "source"),
        turn=proto.turn,
        message_index=proto.message_index if proto.HasField("message_index") else None,
        char_start=proto.char_start,
        char_length=proto.char_length,
        policy_version=(
            policy_version_from_proto(proto.policy_version)
            if proto.HasField("policy_version")
            else None
        ),
    )


def sequence_to_proto(sequence: Sequence) -> trajectory_pb2.Sequence:
    """One token row."""
    return trajectory_pb2.Sequence(
        token_ids=sequence.token_ids.tolist(),
        segments=[segment_to_proto(s) for s in sequence.segments],
        inference_logprobs=sequence.inference_logprobs.tolist(),
        ref_logprobs=sequence.ref_logprobs.tolist(),
        advantage=sequence.advantage,
        token_advantages=sequence.token_advantages.tolist(),
        fork_cause=_number(sequence.fork_cause),
    )


def sequence_from_proto(proto: trajectory_pb2.Sequence) -> Sequence:
    """One token row; raises InvalidSequence when ids, segments and log-probs disagree."""
    return Sequence(
        token_ids=np.array(proto.token_ids, dtype=np.int32),
        segments=tuple(segment_from_proto(s) for s in proto.segments),
        inference_logprobs=np.array(proto.inference_logprobs, dtype=np.float32),
        ref_logprobs=np.array(proto.ref_logprobs, dtype=np.float32),
        advantage=proto.advantage if proto.HasField("advantage") else None,
        token_advantages=np.array(proto.token_advantages, dtype=np.float32),
        fork_cause=_enum(ForkCause, proto.fork_cause or int(ForkCause.NONE), "fork_cause"),
    )


def sampling_to_proto(sampling: SamplingParams) -> trajectory_pb2.SamplingParams:
    """Sampling parameters; neutral ones stay absent."""
    return trajectory_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=sampling.max_new_tokens,
        stop=sampling.stop,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
    )


def sampling_from_proto(proto: trajectory_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters; raises InvalidInput (INVALID_SAMPLING) when out of range."""

    def given(name: str) -> float | int | None:
        return getattr(proto, name) if proto.HasField(name) else None

    return SamplingParams(
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=proto.top_k if proto.HasField("top_k") else None,
        min_p=given("min_p"),
        max_new_tokens=proto.max_new_tokens if proto.HasField("max_new_tokens") else None,
        stop=tuple(proto.stop),
        seed=proto.seed if proto.HasField("seed") else None,
        repetition_penalty=given("repetition_penalty"),
    )


def task_to_proto(task: Task) -> trajectory_pb2.Task:
    """A task."""
    return trajectory_pb2.Task(
        task_id=task.task_id,
        environment=task.environment,
        split=task.split,
        key=task.key,
        epoch=task.epoch,
        seed=task.seed,
        purpose=_number(task.purpose),
        num_trajectories=task.num_trajectories,
        sampling=sampling_to_proto(task.sampling),
    )


def task_from_proto(proto: trajectory_pb2.Task) -> Task:
    """A task."""
    return Task(
        task_id=proto.task_id,
        environment=proto.environment,
        split=proto.split,
        key=proto.key,
        epoch=proto.epoch,
        seed=proto.seed,
        purpose=_enum(Purpose, proto.purpose, "purpose"),
        num_trajectories=proto.num_trajectories,
        sampling=sampling_from_proto(proto.sampling),
    )


def reward_to_proto(reward: Reward) -> trajectory_pb2.Reward:
    """One reward component."""
    proto = trajectory_pb2.Reward(name=reward.name, value=reward.value, weight=reward.weight)
    if reward.success is not None:
        proto.success = reward.success
    if reward.per_token:
        proto.per_token.extend(reward.per_token)
    return proto


def reward_from_proto(proto: trajectory_pb2.Reward) -> Reward:
    """One reward component; an absent weight is 1."""
    return Reward(
        name=proto.name,
        value=proto.value,
        weight=proto.weight if proto.HasField("weight") else 1.0,
        success=proto.success if proto.HasField("success") else None,
        per_token=tuple(proto.per_token),
    )


def turn_to_proto(turn: Turn) -> trajectory_pb2.Turn:
    """One turn."""
    return trajectory_pb2.Turn(
        message_start=turn.message_start,
        num_messages=turn.num_messages,
        rewards=[reward_to_proto(r) for r in turn.rewards],
        stop_reason=_number(turn.stop_reason),
        generate_s=turn.generate_s,
        step_s=turn.step_s,
        num_tool_calls=turn.num_tool_calls,
    )


def turn_from_proto(proto: trajectory_pb2.Turn) -> Turn:
    """One turn."""
    return Turn(
        message_start=proto.message_start,
        num_messages=proto.num_messages,
        rewards=tuple(reward_from_proto(r) for r in proto.rewards),
        stop_reason=_enum(StopReason, proto.stop_reason, "stop_reason"),
        generate_s=proto.generate_s,
        step_s=proto.step_s,
        num_tool_calls=proto.num_tool_calls,
    )


def failure_to_proto(failure: Failure) -> trajectory_pb2.Failure:
    """One failure."""
    return trajectory_pb2.Failure(
        owner=_number(failure.owner),
        reason=failure.reason,
        message=failure.message,
    )


def failure_from_proto(proto: trajectory_pb2.Failure) -> Failure:
    """One failure."""
    return Failure(
        owner=_enum(Owner, proto.owner, "owner"), reason=proto.reason, message=proto.message
    )


def trajectory_to_proto(trajectory: Trajectory) -> trajectory_pb2.Trajectory:
    """One trajectory."""
    return trajectory_pb2.Trajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        task_key=trajectory.task_key,
        seed=trajectory.seed,
        environment=trajectory.environment,
        environment_version=trajectory.environment_version,
        history=history_to_proto(trajectory.history),
        turns=[turn_to_proto(t) for t in trajectory.turns],
        sequences=[sequence_to_proto(s) for s in trajectory.sequences],
        failures=[failure_to_proto(f) for f in trajectory.failures],
        sampling=sampling_to_proto(trajectory.sampling),
        tokenizer_digest=trajectory.tokenizer_digest,
        template_digest=trajectory.template_digest,
        terminated=trajectory.terminated,
        truncated=trajectory.truncated,
        done_reason=_number(trajectory.done_reason),
        labels=trajectory.labels,
    )


def trajectory_from_proto(proto: trajectory_pb2.Trajectory) -> Trajectory:
    """One trajectory; raises InvalidHistory or InvalidSequence when it contradicts itself."""
    history = history_from_proto(proto.history)
    if not len(history):
        raise InvalidHistory(
            f"Trajectory {proto.trajectory_id} has no messages.", remedy="Record its history."
        )
    return Trajectory(
        trajectory_id=proto.trajectory_id,
        group_id=proto.group_id,
        task_key=proto.task_key,
        seed=proto.seed,
        environment=proto.environment,
        environment_version=proto.environment_version,
        history=history,
        turns=tuple(turn_from_proto(t) for t in proto.turns),
        sequences=tuple(sequence_from_proto(s) for s in proto.sequences),
        failures=tuple(failure_from_proto(f) for f in proto.failures),
        sampling=sampling_from_proto(proto.sampling),
        tokenizer_digest=proto.tokenizer_digest,
        template_digest=proto.template_digest,
        terminated=proto.terminated,
        truncated=proto.truncated,
        done_reason=_enum(DoneReason, proto.done_reason, "done_reason"),
        labels=dict(proto.labels),
    )


def group_to_proto(group: Group) -> trajectory_pb2.Group:
    """One group."""
    return trajectory_pb2.Group(
        group_id=group.group_id,
        task=task_to_proto(group.task),
        trajectories=[trajectory_to_proto(t) for t in group.trajectories],
    )


def group_from_proto(proto: trajectory_pb2.Group) -> Group:
    """One group."""
    return Group(
        group_id=proto.group_id,
        task=task_from_proto(proto.task),
        trajectories=tuple(trajectory_from_proto(t) for t in proto.trajectories),
    )
