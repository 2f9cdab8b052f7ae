from dialoop.v1 import chat_pb2 as _chat_pb2
from dialoop.v1 import scope_pb2 as _scope_pb2
from dialoop.v1 import stream_pb2 as _stream_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InputMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INPUT_MODE_UNSPECIFIED: _ClassVar[InputMode]
    INPUT_MODE_HISTORY: _ClassVar[InputMode]
    INPUT_MODE_TEXT: _ClassVar[InputMode]
    INPUT_MODE_TOKENS: _ClassVar[InputMode]

class RewardShape(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REWARD_SHAPE_UNSPECIFIED: _ClassVar[RewardShape]
    REWARD_SHAPE_SPARSE: _ClassVar[RewardShape]
    REWARD_SHAPE_TURN: _ClassVar[RewardShape]
    REWARD_SHAPE_DENSE: _ClassVar[RewardShape]

class Redo(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDO_UNSPECIFIED: _ClassVar[Redo]
    REDO_NEVER: _ClassVar[Redo]
    REDO_SAFE: _ClassVar[Redo]
    REDO_SNAPSHOT: _ClassVar[Redo]
INPUT_MODE_UNSPECIFIED: InputMode
INPUT_MODE_HISTORY: InputMode
INPUT_MODE_TEXT: InputMode
INPUT_MODE_TOKENS: InputMode
REWARD_SHAPE_UNSPECIFIED: RewardShape
REWARD_SHAPE_SPARSE: RewardShape
REWARD_SHAPE_TURN: RewardShape
REWARD_SHAPE_DENSE: RewardShape
REDO_UNSPECIFIED: Redo
REDO_NEVER: Redo
REDO_SAFE: Redo
REDO_SNAPSHOT: Redo

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("environments",)
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentInfo]
    def __init__(self, environments: _Optional[_Iterable[_Union[EnvironmentInfo, _Mapping]]] = ...) -> None: ...

class GetEnvironmentRequest(_message.Message):
    __slots__ = ("environment",)
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    def __init__(self, environment: _Optional[str] = ...) -> None: ...

class GetEnvironmentResponse(_message.Message):
    __slots__ = ("environment",)
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    environment: EnvironmentInfo
    def __init__(self, environment: _Optional[_Union[EnvironmentInfo, _Mapping]] = ...) -> None: ...

class EnvironmentInfo(_message.Message):
    __slots__ = ("name", "version", "description", "splits", "max_turns", "stop", "tools", "reward_names", "spec")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    REWARD_NAMES_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    description: str
    splits: _containers.RepeatedCompositeFieldContainer[SplitInfo]
    max_turns: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    tools: _containers.RepeatedScalarFieldContainer[str]
    reward_names: _containers.RepeatedScalarFieldContainer[str]
    spec: EnvironmentSpec
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., description: _Optional[str] = ..., splits: _Optional[_Iterable[_Union[SplitInfo, _Mapping]]] = ..., max_turns: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., tools: _Optional[_Iterable[str]] = ..., reward_names: _Optional[_Iterable[str]] = ..., spec: _Optional[_Union[EnvironmentSpec, _Mapping]] = ...) -> None: ...

class FieldSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class EnvironmentSpec(_message.Message):
    __slots__ = ("input_mode", "reward_shape", "observation", "action", "reward", "policy_role", "data_key", "tool_definitions", "is_stateless", "facts", "redo")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INPUT_MODE_FIELD_NUMBER: _ClassVar[int]
    REWARD_SHAPE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    POLICY_ROLE_FIELD_NUMBER: _ClassVar[int]
    DATA_KEY_FIELD_NUMBER: _ClassVar[int]
    TOOL_DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    IS_STATELESS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    REDO_FIELD_NUMBER: _ClassVar[int]
    input_mode: InputMode
    reward_shape: RewardShape
    observation: _containers.RepeatedCompositeFieldContainer[FieldSpec]
    action: _containers.RepeatedCompositeFieldContainer[FieldSpec]
    reward: _containers.RepeatedCompositeFieldContainer[FieldSpec]
    policy_role: str
    data_key: str
    tool_definitions: _containers.RepeatedCompositeFieldContainer[_chat_pb2.ToolDefinition]
    is_stateless: bool
    facts: _containers.ScalarMap[str, str]
    redo: Redo
    def __init__(self, input_mode: _Optional[_Union[InputMode, str]] = ..., reward_shape: _Optional[_Union[RewardShape, str]] = ..., observation: _Optional[_Iterable[_Union[FieldSpec, _Mapping]]] = ..., action: _Optional[_Iterable[_Union[FieldSpec, _Mapping]]] = ..., reward: _Optional[_Iterable[_Union[FieldSpec, _Mapping]]] = ..., policy_role: _Optional[str] = ..., data_key: _Optional[str] = ..., tool_definitions: _Optional[_Iterable[_Union[_chat_pb2.ToolDefinition, _Mapping]]] = ..., is_stateless: bool = ..., facts: _Optional[_Mapping[str, str]] = ..., redo: _Optional[_Union[Redo, str]] = ...) -> None: ...

class SplitInfo(_message.Message):
    __slots__ = ("name", "num_tasks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tasks: int
    def __init__(self, name: _Optional[str] = ..., num_tasks: _Optional[int] = ...) -> None: ...

class ListTasksRequest(_message.Message):
    __slots__ = ("environment", "split", "page_size", "page_token", "one_epoch", "shuffle_seed")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ONE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_SEED_FIELD_NUMBER: _ClassVar[int]
    environment: str
    split: str
    page_size: int
    page_token: str
    one_epoch: bool
    shuffle_seed: int
    def __init__(self, environment: _Optional[str] = ..., split: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., one_epoch: bool = ..., shuffle_seed: _Optional[int] = ...) -> None: ...

class TaskRef(_message.Message):
    __slots__ = ("key", "epoch", "seed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    key: str
    epoch: int
    seed: int
    def __init__(self, key: _Optional[str] = ..., epoch: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class ListTasksResponse(_message.Message):
    __slots__ = ("tasks", "next_page_token")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskRef]
    next_page_token: str
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskRef, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("session_id", "environment", "ttl_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    environment: str
    ttl_s: float
    def __init__(self, session_id: _Optional[str] = ..., environment: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session_id", "ttl_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ttl_s: float
    def __init__(self, session_id: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session_id", "episode", "split", "task_key", "seed", "query", "messages", "data", "resumed")
    class DataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    TASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    episode: int
    split: str
    task_key: str
    seed: int
    query: str
    messages: _chat_pb2.History
    data: _containers.ScalarMap[str, str]
    resumed: Resumed
    def __init__(self, session_id: _Optional[str] = ..., episode: _Optional[int] = ..., split: _Optional[str] = ..., task_key: _Optional[str] = ..., seed: _Optional[int] = ..., query: _Optional[str] = ..., messages: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., data: _Optional[_Mapping[str, str]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("snapshot", "messages", "step_index")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    snapshot: bytes
    messages: _chat_pb2.History
    step_index: int
    def __init__(self, snapshot: _Optional[bytes] = ..., messages: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., step_index: _Optional[int] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("history", "info", "environment_version", "text", "tokens", "warnings", "tools")
    class InfoEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.ChatHistory
    info: _containers.ScalarMap[str, str]
    environment_version: str
    text: _chat_pb2.Text
    tokens: _chat_pb2.Tokens
    warnings: _containers.RepeatedScalarFieldContainer[str]
    tools: _containers.RepeatedCompositeFieldContainer[_chat_pb2.ToolDefinition]
    def __init__(self, history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., info: _Optional[_Mapping[str, str]] = ..., environment_version: _Optional[str] = ..., text: _Optional[_Union[_chat_pb2.Text, _Mapping]] = ..., tokens: _Optional[_Union[_chat_pb2.Tokens, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., tools: _Optional[_Iterable[_Union[_chat_pb2.ToolDefinition, _Mapping]]] = ...) -> None: ...

class Added(_message.Message):
    __slots__ = ("messages", "text", "token_ids")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[_chat_pb2.Message]
    text: str
    token_ids: _chat_pb2.TokenIds
    def __init__(self, messages: _Optional[_Iterable[_Union[_chat_pb2.Message, _Mapping]]] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_chat_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session_id", "episode", "step_index", "history", "text", "tokens", "whole_prompt")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    episode: int
    step_index: int
    history: _chat_pb2.ChatHistory
    text: _chat_pb2.Text
    tokens: _chat_pb2.Tokens
    whole_prompt: bool
    def __init__(self, session_id: _Optional[str] = ..., episode: _Optional[int] = ..., step_index: _Optional[int] = ..., history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., text: _Optional[_Union[_chat_pb2.Text, _Mapping]] = ..., tokens: _Optional[_Union[_chat_pb2.Tokens, _Mapping]] = ..., whole_prompt: bool = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("history", "rewards", "terminated", "truncated", "done_reason", "failures", "num_tool_calls", "replayed", "info", "text", "tokens", "warnings", "added", "snapshot")
    class InfoEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    DONE_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.ChatHistory
    rewards: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Reward]
    terminated: bool
    truncated: bool
    done_reason: _trajectory_pb2.DoneReason
    failures: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Failure]
    num_tool_calls: int
    replayed: bool
    info: _containers.ScalarMap[str, str]
    text: _chat_pb2.Text
    tokens: _chat_pb2.Tokens
    warnings: _containers.RepeatedScalarFieldContainer[str]
    added: Added
    snapshot: bytes
    def __init__(self, history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., rewards: _Optional[_Iterable[_Union[_trajectory_pb2.Reward, _Mapping]]] = ..., terminated: bool = ..., truncated: bool = ..., done_reason: _Optional[_Union[_trajectory_pb2.DoneReason, str]] = ..., failures: _Optional[_Iterable[_Union[_trajectory_pb2.Failure, _Mapping]]] = ..., num_tool_calls: _Optional[int] = ..., replayed: bool = ..., info: _Optional[_Mapping[str, str]] = ..., text: _Optional[_Union[_chat_pb2.Text, _Mapping]] = ..., tokens: _Optional[_Union[_chat_pb2.Tokens, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., added: _Optional[_Union[Added, _Mapping]] = ..., snapshot: _Optional[bytes] = ...) -> None: ...

class TaskChoice(_message.Message):
    __slots__ = ("split", "task_key", "seed", "query", "messages", "data")
    class DataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    TASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    split: str
    task_key: str
    seed: int
    query: str
    messages: _chat_pb2.History
    data: _containers.ScalarMap[str, str]
    def __init__(self, split: _Optional[str] = ..., task_key: _Optional[str] = ..., seed: _Optional[int] = ..., query: _Optional[str] = ..., messages: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., data: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StepHistoryRequest(_message.Message):
    __slots__ = ("environment", "task", "history", "whole_prompt")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    WHOLE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    task: TaskChoice
    history: _chat_pb2.ChatHistory
    whole_prompt: bool
    def __init__(self, environment: _Optional[str] = ..., task: _Optional[_Union[TaskChoice, _Mapping]] = ..., history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., whole_prompt: bool = ...) -> None: ...

class StepHistoryResponse(_message.Message):
    __slots__ = ("step", "warnings")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    step: StepResponse
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[_Union[StepResponse, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateGroupRequest(_message.Message):
    __slots__ = ("group_id", "environment", "num_sessions", "task", "ttl_s")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    environment: str
    num_sessions: int
    task: TaskChoice
    ttl_s: float
    def __init__(self, group_id: _Optional[str] = ..., environment: _Optional[str] = ..., num_sessions: _Optional[int] = ..., task: _Optional[_Union[TaskChoice, _Mapping]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class CreateGroupResponse(_message.Message):
    __slots__ = ("session_ids", "resets", "ttl_s", "warnings")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    RESETS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    resets: _containers.RepeatedCompositeFieldContainer[ResetResponse]
    ttl_s: float
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., resets: _Optional[_Iterable[_Union[ResetResponse, _Mapping]]] = ..., ttl_s: _Optional[float] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class StepAndResetRequest(_message.Message):
    __slots__ = ("step", "next_split", "next_task_key", "next_seed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_SPLIT_FIELD_NUMBER: _ClassVar[int]
    NEXT_TASK_KEY_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEED_FIELD_NUMBER: _ClassVar[int]
    step: StepRequest
    next_split: str
    next_task_key: str
    next_seed: int
    def __init__(self, step: _Optional[_Union[StepRequest, _Mapping]] = ..., next_split: _Optional[str] = ..., next_task_key: _Optional[str] = ..., next_seed: _Optional[int] = ...) -> None: ...

class StepAndResetResponse(_message.Message):
    __slots__ = ("step", "reset", "warnings")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    step: StepResponse
    reset: ResetResponse
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[_Union[StepResponse, _Mapping]] = ..., reset: _Optional[_Union[ResetResponse, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("code", "reason", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class BatchResetRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ResetRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[ResetRequest, _Mapping]]] = ...) -> None: ...

class BatchResetResponse(_message.Message):
    __slots__ = ("items", "warnings")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchResetItem]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchResetItem, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class BatchResetItem(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: ResetResponse
    error: ItemError
    def __init__(self, response: _Optional[_Union[ResetResponse, _Mapping]] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class BatchStepRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[StepRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[StepRequest, _Mapping]]] = ...) -> None: ...

class BatchStepResponse(_message.Message):
    __slots__ = ("items", "warnings")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchStepItem]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchStepItem, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class BatchStepItem(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: StepResponse
    error: ItemError
    def __init__(self, response: _Optional[_Union[StepResponse, _Mapping]] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class InteractRequest(_message.Message):
    __slots__ = ("request_id", "create_session", "reset", "step", "close_session", "end")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_SESSION_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    create_session: CreateSessionRequest
    reset: ResetRequest
    step: StepRequest
    close_session: CloseSessionRequest
    end: _stream_pb2.StreamEnd
    def __init__(self, request_id: _Optional[str] = ..., create_session: _Optional[_Union[CreateSessionRequest, _Mapping]] = ..., reset: _Optional[_Union[ResetRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ..., close_session: _Optional[_Union[CloseSessionRequest, _Mapping]] = ..., end: _Optional[_Union[_stream_pb2.StreamEnd, _Mapping]] = ...) -> None: ...

class InteractResponse(_message.Message):
    __slots__ = ("request_id", "create_session", "reset", "step", "close_session", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_SESSION_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    create_session: CreateSessionResponse
    reset: ResetResponse
    step: StepResponse
    close_session: CloseSessionResponse
    error: ItemError
    def __init__(self, request_id: _Optional[str] = ..., create_session: _Optional[_Union[CreateSessionResponse, _Mapping]] = ..., reset: _Optional[_Union[ResetResponse, _Mapping]] = ..., step: _Optional[_Union[StepResponse, _Mapping]] = ..., close_session: _Optional[_Union[CloseSessionResponse, _Mapping]] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session_id", "environment", "episode", "next_step_index", "done", "history", "expires_in_s", "text", "tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    environment: str
    episode: int
    next_step_index: int
    done: bool
    history: _chat_pb2.ChatHistory
    expires_in_s: float
    text: _chat_pb2.Text
    tokens: _chat_pb2.Tokens
    def __init__(self, session_id: _Optional[str] = ..., environment: _Optional[str] = ..., episode: _Optional[int] = ..., next_step_index: _Optional[int] = ..., done: bool = ..., history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., expires_in_s: _Optional[float] = ..., text: _Optional[_Union[_chat_pb2.Text, _Mapping]] = ..., tokens: _Optional[_Union[_chat_pb2.Tokens, _Mapping]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("closed",)
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    closed: bool
    def __init__(self, closed: bool = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("split", "trajectory")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    split: str
    trajectory: _trajectory_pb2.Trajectory
    def __init__(self, split: _Optional[str] = ..., trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("turns",)
    TURNS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[TurnRewards]
    def __init__(self, turns: _Optional[_Iterable[_Union[TurnRewards, _Mapping]]] = ...) -> None: ...

class TurnRewards(_message.Message):
    __slots__ = ("rewards", "failures")
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    rewards: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Reward]
    failures: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Failure]
    def __init__(self, rewards: _Optional[_Iterable[_Union[_trajectory_pb2.Reward, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_trajectory_pb2.Failure, _Mapping]]] = ...) -> None: ...
