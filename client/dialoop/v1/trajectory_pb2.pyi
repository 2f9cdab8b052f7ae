from dialoop.v1 import chat_pb2 as _chat_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_PROMPT: _ClassVar[Source]
    SOURCE_TEMPLATE: _ClassVar[Source]
    SOURCE_MODEL: _ClassVar[Source]
    SOURCE_ENVIRONMENT: _ClassVar[Source]
    SOURCE_TOOL: _ClassVar[Source]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_BOOL: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_UINT16: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]

class Along(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALONG_UNSPECIFIED: _ClassVar[Along]
    ALONG_TOKENS: _ClassVar[Along]
    ALONG_SAMPLED: _ClassVar[Along]

class ForkCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORK_CAUSE_UNSPECIFIED: _ClassVar[ForkCause]
    FORK_CAUSE_NONE: _ClassVar[ForkCause]
    FORK_CAUSE_TEMPLATE_REWRITES_PAST: _ClassVar[ForkCause]
    FORK_CAUSE_HISTORY_REWRITTEN: _ClassVar[ForkCause]
    FORK_CAUSE_BRANCHED: _ClassVar[ForkCause]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_STOP: _ClassVar[StopReason]
    STOP_REASON_LENGTH: _ClassVar[StopReason]
    STOP_REASON_CONTEXT_FULL: _ClassVar[StopReason]
    STOP_REASON_CANCELLED: _ClassVar[StopReason]

class DoneReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DONE_REASON_UNSPECIFIED: _ClassVar[DoneReason]
    DONE_REASON_NOT_DONE: _ClassVar[DoneReason]
    DONE_REASON_SUBMITTED: _ClassVar[DoneReason]
    DONE_REASON_NO_CALL: _ClassVar[DoneReason]
    DONE_REASON_MAX_TURNS: _ClassVar[DoneReason]
    DONE_REASON_MAX_LENGTH: _ClassVar[DoneReason]
    DONE_REASON_INCOMPLETE: _ClassVar[DoneReason]
    DONE_REASON_CONTENT: _ClassVar[DoneReason]
    DONE_REASON_ERROR: _ClassVar[DoneReason]

class Owner(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWNER_UNSPECIFIED: _ClassVar[Owner]
    OWNER_POLICY: _ClassVar[Owner]
    OWNER_ENVIRONMENT: _ClassVar[Owner]
    OWNER_TOOL: _ClassVar[Owner]
    OWNER_INFERENCE: _ClassVar[Owner]
    OWNER_REWARD: _ClassVar[Owner]
    OWNER_REPLAY: _ClassVar[Owner]
    OWNER_COLLECTOR: _ClassVar[Owner]
    OWNER_AGENT: _ClassVar[Owner]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAINING: _ClassVar[Purpose]
    PURPOSE_EVALUATION: _ClassVar[Purpose]

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_UNSCORED: _ClassVar[Stage]
    STAGE_SCORED: _ClassVar[Stage]
    STAGE_EVALUATION: _ClassVar[Stage]
SOURCE_UNSPECIFIED: Source
SOURCE_PROMPT: Source
SOURCE_TEMPLATE: Source
SOURCE_MODEL: Source
SOURCE_ENVIRONMENT: Source
SOURCE_TOOL: Source
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_BOOL: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_UINT16: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT64: DataType
ALONG_UNSPECIFIED: Along
ALONG_TOKENS: Along
ALONG_SAMPLED: Along
FORK_CAUSE_UNSPECIFIED: ForkCause
FORK_CAUSE_NONE: ForkCause
FORK_CAUSE_TEMPLATE_REWRITES_PAST: ForkCause
FORK_CAUSE_HISTORY_REWRITTEN: ForkCause
FORK_CAUSE_BRANCHED: ForkCause
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_STOP: StopReason
STOP_REASON_LENGTH: StopReason
STOP_REASON_CONTEXT_FULL: StopReason
STOP_REASON_CANCELLED: StopReason
DONE_REASON_UNSPECIFIED: DoneReason
DONE_REASON_NOT_DONE: DoneReason
DONE_REASON_SUBMITTED: DoneReason
DONE_REASON_NO_CALL: DoneReason
DONE_REASON_MAX_TURNS: DoneReason
DONE_REASON_MAX_LENGTH: DoneReason
DONE_REASON_INCOMPLETE: DoneReason
DONE_REASON_CONTENT: DoneReason
DONE_REASON_ERROR: DoneReason
OWNER_UNSPECIFIED: Owner
OWNER_POLICY: Owner
OWNER_ENVIRONMENT: Owner
OWNER_TOOL: Owner
OWNER_INFERENCE: Owner
OWNER_REWARD: Owner
OWNER_REPLAY: Owner
OWNER_COLLECTOR: Owner
OWNER_AGENT: Owner
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAINING: Purpose
PURPOSE_EVALUATION: Purpose
STAGE_UNSPECIFIED: Stage
STAGE_UNSCORED: Stage
STAGE_SCORED: Stage
STAGE_EVALUATION: Stage

class PolicyVersion(_message.Message):
    __slots__ = ("lineage", "number")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    number: int
    def __init__(self, lineage: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("start", "length", "source", "turn", "message_index", "char_start", "char_length", "policy_version_index")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHAR_START_FIELD_NUMBER: _ClassVar[int]
    CHAR_LENGTH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_INDEX_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    source: Source
    turn: int
    message_index: int
    char_start: int
    char_length: int
    policy_version_index: int
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ..., source: _Optional[_Union[Source, str]] = ..., turn: _Optional[int] = ..., message_index: _Optional[int] = ..., char_start: _Optional[int] = ..., char_length: _Optional[int] = ..., policy_version_index: _Optional[int] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "data_type", "along", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    ALONG_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: DataType
    along: Along
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[DataType, str]] = ..., along: _Optional[_Union[Along, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("columns", "segments", "policy_versions", "advantage", "fork_cause")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    FORK_CAUSE_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    policy_versions: _containers.RepeatedCompositeFieldContainer[PolicyVersion]
    advantage: float
    fork_cause: ForkCause
    def __init__(self, columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., policy_versions: _Optional[_Iterable[_Union[PolicyVersion, _Mapping]]] = ..., advantage: _Optional[float] = ..., fork_cause: _Optional[_Union[ForkCause, str]] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("name", "value", "weight", "success", "per_token", "feedback", "absent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    weight: float
    success: bool
    per_token: _containers.RepeatedScalarFieldContainer[float]
    feedback: str
    absent: bool
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., weight: _Optional[float] = ..., success: bool = ..., per_token: _Optional[_Iterable[float]] = ..., feedback: _Optional[str] = ..., absent: bool = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("message_start", "num_messages", "rewards", "stop_reason", "generate_s", "step_s", "num_tool_calls")
    MESSAGE_START_FIELD_NUMBER: _ClassVar[int]
    NUM_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    message_start: int
    num_messages: int
    rewards: _containers.RepeatedCompositeFieldContainer[Reward]
    stop_reason: StopReason
    generate_s: float
    step_s: float
    num_tool_calls: int
    def __init__(self, message_start: _Optional[int] = ..., num_messages: _Optional[int] = ..., rewards: _Optional[_Iterable[_Union[Reward, _Mapping]]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., generate_s: _Optional[float] = ..., step_s: _Optional[float] = ..., num_tool_calls: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("owner", "reason", "message")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    reason: str
    message: str
    def __init__(self, owner: _Optional[_Union[Owner, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "seed", "repetition_penalty", "constraint", "top_logprobs", "stop_in_reasoning")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    repetition_penalty: float
    constraint: str
    top_logprobs: int
    stop_in_reasoning: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., constraint: _Optional[str] = ..., top_logprobs: _Optional[int] = ..., stop_in_reasoning: bool = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("task_id", "environment", "split", "key", "epoch", "seed", "purpose", "num_trajectories", "sampling", "min_trajectories")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    environment: str
    split: str
    key: str
    epoch: int
    seed: int
    purpose: Purpose
    num_trajectories: int
    sampling: SamplingParams
    min_trajectories: int
    def __init__(self, task_id: _Optional[str] = ..., environment: _Optional[str] = ..., split: _Optional[str] = ..., key: _Optional[str] = ..., epoch: _Optional[int] = ..., seed: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., num_trajectories: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., min_trajectories: _Optional[int] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("trajectory_id", "group_id", "task_key", "seed", "environment", "environment_version", "history", "turns", "sequences", "failures", "sampling", "tokenizer_digest", "template_digest", "terminated", "truncated", "done_reason", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    DONE_REASON_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    group_id: str
    task_key: str
    seed: int
    environment: str
    environment_version: str
    history: _chat_pb2.History
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    sampling: SamplingParams
    tokenizer_digest: str
    template_digest: str
    terminated: bool
    truncated: bool
    done_reason: DoneReason
    labels: _containers.ScalarMap[str, str]
    def __init__(self, trajectory_id: _Optional[str] = ..., group_id: _Optional[str] = ..., task_key: _Optional[str] = ..., seed: _Optional[int] = ..., environment: _Optional[str] = ..., environment_version: _Optional[str] = ..., history: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., terminated: bool = ..., truncated: bool = ..., done_reason: _Optional[_Union[DoneReason, str]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group_id", "task", "trajectories")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    task: Task
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    def __init__(self, group_id: _Optional[str] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ...) -> None: ...
