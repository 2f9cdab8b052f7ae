"""What EnvironmentClient takes and gives, and how it goes over the wire."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import ChatHistory
from dialoop.environments.environment import Given
from dialoop.environments.modes import InputMode, RewardShape, Text, Tokens
from dialoop.environments.sessions.prompts import full_of
from dialoop.environments.spec import EnvironmentSpec, FieldSpec
from dialoop.episode import ResetResult, StepResult
from dialoop.trajectory import DoneReason
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire import (
    chat_history_from_proto,
    chat_history_to_proto,
    failure_from_proto,
    history_to_proto,
    message_from_proto,
    reward_from_proto,
    text_from_proto,
    text_to_proto,
    tokens_from_proto,
    tokens_to_proto,
    tool_from_proto,
)

if TYPE_CHECKING:
    from dialoop.environments.modes import Answered
    from dialoop.environments.tasks.choosing import TaskChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInfo:
    """A named set of tasks: `SplitInfo(name="train", num_tasks=10000)`."""

    name: str
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """What a client needs to know of an environment before it plays."""

    name: str
    version: str
    description: str = ""
    splits: tuple[SplitInfo, ...] = ()
    max_turns: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    reward_names: tuple[str, ...] = ()
    spec: EnvironmentSpec = field(default_factory=EnvironmentSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetItem:
    """One reset of a batch: a task, or a question of the caller's own."""

    session_id: str
    episode: int
    split: str = ""
    task_key: str = ""
    seed: int = 0
    question: Given = field(default_factory=Given)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One step of a batch."""

    session_id: str
    episode: int
    step_index: int
    history: Answered


def info_from_proto(proto: pb.EnvironmentInfo) -> EnvironmentInfo:
    """Return an environment's description."""
    return EnvironmentInfo(
        name=proto.name,
        version=proto.version,
        description=proto.description,
        splits=tuple(SplitInfo(name=s.name, num_tasks=s.num_tasks) for s in proto.splits),
        max_turns=proto.max_turns,
        stop=tuple(proto.stop),
        tools=tuple(proto.tools),
        reward_names=tuple(proto.reward_names),
        spec=_spec_from_proto(proto.spec),
    )


def _spec_from_proto(proto: pb.EnvironmentSpec) -> EnvironmentSpec:
    return EnvironmentSpec(
        input_mode=InputMode(proto.input_mode or InputMode.HISTORY),
        reward_shape=RewardShape(proto.reward_shape or RewardShape.SPARSE),
        observation=tuple(map(_field_from_proto, proto.observation)),
        action=tuple(map(_field_from_proto, proto.action)),
        reward=tuple(map(_field_from_proto, proto.reward)),
        policy_role=proto.policy_role,
        data_key=proto.data_key,
        tool_definitions=tuple(map(tool_from_proto, proto.tool_definitions)),
        is_stateless=proto.is_stateless,
        facts=dict(proto.facts),
    )


def _field_from_proto(proto: pb.FieldSpec) -> FieldSpec:
    return FieldSpec(name=proto.name, dtype=proto.dtype, shape=tuple(proto.shape))


def choice_to_proto(choice: TaskChoice) -> pb.TaskChoice:
    """Return the message of a task choice."""
    question = choice.question
    return pb.TaskChoice(
        split=choice.split,
        task_key=choice.task_key,
        seed=choice.seed,
        query=question.query,
        messages=None if question.messages is None else history_to_proto(question.messages),
        data=dict(question.data),
    )


def reset_to_proto(item: ResetItem) -> pb.ResetRequest:
    """Return a reset's request."""
    return pb.ResetRequest(
        session_id=item.session_id,
        episode=item.episode,
        split=item.split,
        task_key=item.task_key,
        seed=item.seed,
        query=item.question.query,
        messages=None
        if item.question.messages is None
        else history_to_proto(item.question.messages),
        data=dict(item.question.data),
    )


def step_to_proto(item: StepItem) -> pb.StepRequest:
    """Return a step's request: the service compares what there is of the prompt with its own.

    An answer says what was added; where the caller brings the response alone, it is whole.
    """
    sent: Answered = item.history
    answer: dict[str, Any] = {}
    has_prompt = sent.prompt is not None or sent.full is not None
    if sent.full is not None:
        sent = replace(sent, prompt=None)  # `full` begins with it
    if isinstance(sent, Text):
        answer["text"] = text_to_proto(sent)
    elif isinstance(sent, Tokens):
        answer["tokens"] = tokens_to_proto(sent)
    else:
        answer["history"] = chat_history_to_proto(sent)
    return pb.StepRequest(
        session_id=item.session_id,
        episode=item.episode,
        step_index=item.step_index,
        whole_prompt=not has_prompt,
        **answer,
    )


def reset_result_from_proto(proto: pb.ResetResponse) -> ResetResult:
    """Return a reset's result."""
    return ResetResult(
        history=chat_history_from_proto(proto.history),
        info=dict(proto.info),
        environment_version=proto.environment_version,
        text=text_from_proto(proto.text) if proto.HasField("text") else None,
        tokens=tokens_from_proto(proto.tokens) if proto.HasField("tokens") else None,
    )


def step_result_from_proto(proto: pb.StepResponse, sent: Answered) -> StepResult:
    """Return the result of a step that sent this answer of a policy."""
    result = StepResult(
        history=chat_history_from_proto(proto.history),
        rewards=tuple(reward_from_proto(r) for r in proto.rewards),
        terminated=proto.terminated,
        truncated=proto.truncated,
        done_reason=DoneReason(proto.done_reason or DoneReason.NOT_DONE),
        failures=tuple(failure_from_proto(f) for f in proto.failures),
        num_tool_calls=proto.num_tool_calls,
        replayed=proto.replayed,
        info=dict(proto.info),
        text=text_from_proto(proto.text) if proto.HasField("text") else None,
        tokens=tokens_from_proto(proto.tokens) if proto.HasField("tokens") else None,
    )
    if not proto.HasField("added"):
        return result
    full, added = full_of(None, sent), proto.added
    if isinstance(sent, Text):
        return replace(result, text=Text(prompt=full + added.text))
    if isinstance(sent, Tokens):
        return replace(result, tokens=Tokens(prompt=(*full, *added.token_ids.values)))
    messages = map(message_from_proto, added.messages)
    return replace(result, history=ChatHistory(prompt=full.extend(messages)))
