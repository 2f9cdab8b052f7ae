"""What EnvironmentClient takes and gives, and how it goes over the wire."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dialoop.chat import ChatHistory
from dialoop.environments.environment import Environment, Given
from dialoop.environments.episode import Score
from dialoop.environments.modes import Answered, InputMode, RewardShape, Text, Tokens
from dialoop.environments.sessions.records import full_of
from dialoop.environments.spec import EnvironmentSpec, FieldSpec, spec_of
from dialoop.environments.tasks.choosing import TaskChoice
from dialoop.environments.tasks.source import TaskPage, TaskRef
from dialoop.episode import Redo, ResetResult, Resumed, SessionState, StepResult
from dialoop.trajectory import DoneReason
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire.codec import Codec, FieldRow, enum, many, submessage
from dialoop.wire.messages import CHAT_HISTORY, HISTORY, MESSAGE, TEXT, TOKENS, TOOL
from dialoop.wire.records import FAILURE, REWARD


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
    resumed: Resumed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One step of a batch."""

    session_id: str
    episode: int
    step_index: int
    history: Answered


def info_of(environment: Environment) -> EnvironmentInfo:
    """Describe an environment."""
    tasks, traits = environment.tasks, environment.traits
    return EnvironmentInfo(
        name=environment.name,
        version=environment.version,
        description=environment.description,
        splits=tuple(SplitInfo(name=s, num_tasks=tasks.num_tasks(s)) for s in tasks.splits),
        max_turns=traits.max_turns,
        stop=traits.stop,
        tools=traits.tools,
        reward_names=traits.reward_names,
        spec=spec_of(environment),
    )


def _given_fields(question: Given) -> dict[str, Any]:
    messages = None if question.messages is None else HISTORY.to_proto(question.messages)
    return {"query": question.query, "messages": messages, "data": dict(question.data)}


def _given(request: pb.TaskChoice | pb.ResetRequest) -> Given:
    messages = HISTORY.from_proto(request.messages) if request.HasField("messages") else None
    return Given(query=request.query, messages=messages, data=dict(request.data))


_QUESTION = FieldRow(_given_fields, _given, spreads=True)
# A reset has the same fields, so this reads its request too.
CHOICE: Codec[TaskChoice, Any] = Codec(TaskChoice, pb.TaskChoice, question=_QUESTION)
RESUMED = Codec(Resumed, pb.Resumed, messages=submessage(HISTORY))
RESET_ITEM = Codec(ResetItem, pb.ResetRequest, question=_QUESTION, resumed=submessage(RESUMED))
_FIELDS = many(Codec(FieldSpec, pb.FieldSpec))
INFO = Codec(
    EnvironmentInfo,
    pb.EnvironmentInfo,
    splits=many(Codec(SplitInfo, pb.SplitInfo)),
    spec=submessage(
        Codec(
            EnvironmentSpec,
            pb.EnvironmentSpec,
            input_mode=enum(InputMode, unspecified=InputMode.HISTORY),
            reward_shape=enum(RewardShape, unspecified=RewardShape.SPARSE),
            redo=enum(Redo, unspecified=Redo.NEVER),
            observation=_FIELDS,
            action=_FIELDS,
            reward=_FIELDS,
            tool_definitions=many(TOOL),
        )
    ),
)
TASK_PAGE = Codec(TaskPage, pb.ListTasksResponse, tasks=many(Codec(TaskRef, pb.TaskRef)))
TURN_SCORE = Codec(Score, pb.TurnRewards, rewards=many(REWARD), failures=many(FAILURE))
# Where the prompt is text or tokens there is no history.
_SHOWN = {
    "history": FieldRow(
        lambda shown: None if shown.prompt is None else CHAT_HISTORY.to_proto(shown),
        CHAT_HISTORY.from_proto,
    ),
    "text": submessage(TEXT),
    "tokens": submessage(TOKENS),
}
RESET_RESULT = Codec(ResetResult, pb.ResetResponse, tools=many(TOOL), **_SHOWN)
STEP_RESULT = Codec(
    StepResult,
    pb.StepResponse,
    rewards=many(REWARD),
    done_reason=enum(DoneReason, unspecified=DoneReason.NOT_DONE),
    failures=many(FAILURE),
    **_SHOWN,
)
SESSION_STATE = Codec(SessionState, pb.GetSessionResponse, **_SHOWN)


def step_to_proto(item: StepItem) -> pb.StepRequest:
    """Return a step's request: the service compares what there is of the prompt with its own.

    An answer says what was added; where the caller brings the response alone, it is whole.
    """
    sent: Answered = item.history
    answer: dict[str, Any] = {}
    has_prompt = sent.prompt is not None or sent.full is not None
    if sent.full is not None and sent.response is not None:
        sent = replace(sent, prompt=None)  # `full` is known to be prompt and response
    if isinstance(sent, Text):
        answer["text"] = TEXT.to_proto(sent)
    elif isinstance(sent, Tokens):
        answer["tokens"] = TOKENS.to_proto(sent)
    else:
        answer["history"] = CHAT_HISTORY.to_proto(sent)
    return pb.StepRequest(
        session_id=item.session_id,
        episode=item.episode,
        step_index=item.step_index,
        whole_prompt=not has_prompt,
        **answer,
    )


def step_result_from_proto(proto: pb.StepResponse, sent: Answered) -> StepResult:
    """Return the result of a step that sent this answer of a policy."""
    result = STEP_RESULT.from_proto(proto)
    if not proto.HasField("added"):
        return result
    full, added = full_of(None, sent), proto.added
    if isinstance(sent, Text):
        return replace(result, text=Text(prompt=full + added.text))
    if isinstance(sent, Tokens):
        return replace(result, tokens=Tokens(prompt=(*full, *added.token_ids.values)))
    messages = map(MESSAGE.from_proto, added.messages)
    return replace(result, history=ChatHistory(prompt=full.extend(messages)))
