from dialoop.v1 import chat_pb2 as _chat_pb2
from dialoop.v1 import scope_pb2 as _scope_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MASK_SCOPE_UNSPECIFIED: _ClassVar[MaskScope]
    MASK_SCOPE_ALL: _ClassVar[MaskScope]
    MASK_SCOPE_FINAL: _ClassVar[MaskScope]
MASK_SCOPE_UNSPECIFIED: MaskScope
MASK_SCOPE_ALL: MaskScope
MASK_SCOPE_FINAL: MaskScope

class RunTextRequest(_message.Message):
    __slots__ = ("environment", "queries", "extra_json", "sampling", "compat")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    COMPAT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    queries: _containers.RepeatedScalarFieldContainer[str]
    extra_json: str
    sampling: _trajectory_pb2.SamplingParams
    compat: str
    def __init__(self, environment: _Optional[str] = ..., queries: _Optional[_Iterable[str]] = ..., extra_json: _Optional[str] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., compat: _Optional[str] = ...) -> None: ...

class RunTextResponse(_message.Message):
    __slots__ = ("histories",)
    HISTORIES_FIELD_NUMBER: _ClassVar[int]
    histories: _containers.RepeatedCompositeFieldContainer[TextHistory]
    def __init__(self, histories: _Optional[_Iterable[_Union[TextHistory, _Mapping]]] = ...) -> None: ...

class TextHistory(_message.Message):
    __slots__ = ("segments", "completed", "truncated", "reward", "failures", "text", "query_token_ids", "response_token_ids", "response_mask")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_MASK_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[TextSegment]
    completed: bool
    truncated: bool
    reward: float
    failures: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Failure]
    text: str
    query_token_ids: _containers.RepeatedScalarFieldContainer[int]
    response_token_ids: _containers.RepeatedScalarFieldContainer[int]
    response_mask: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[_Union[TextSegment, _Mapping]]] = ..., completed: bool = ..., truncated: bool = ..., reward: _Optional[float] = ..., failures: _Optional[_Iterable[_Union[_trajectory_pb2.Failure, _Mapping]]] = ..., text: _Optional[str] = ..., query_token_ids: _Optional[_Iterable[int]] = ..., response_token_ids: _Optional[_Iterable[int]] = ..., response_mask: _Optional[_Iterable[int]] = ...) -> None: ...

class TextSegment(_message.Message):
    __slots__ = ("text", "token_ids", "source", "turn", "inference_logprobs", "policy_runs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_RUNS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    source: _trajectory_pb2.Source
    turn: int
    inference_logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_runs: _containers.RepeatedCompositeFieldContainer[PolicyRun]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[_trajectory_pb2.Source, str]] = ..., turn: _Optional[int] = ..., inference_logprobs: _Optional[_Iterable[float]] = ..., policy_runs: _Optional[_Iterable[_Union[PolicyRun, _Mapping]]] = ...) -> None: ...

class PolicyRun(_message.Message):
    __slots__ = ("length", "policy_version")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    length: int
    policy_version: _trajectory_pb2.PolicyVersion
    def __init__(self, length: _Optional[int] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class RunTrialRequest(_message.Message):
    __slots__ = ("environment", "inputs", "episodes_per_trial", "free_shots", "mask_scope", "seed", "sampling")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_PER_TRIAL_FIELD_NUMBER: _ClassVar[int]
    FREE_SHOTS_FIELD_NUMBER: _ClassVar[int]
    MASK_SCOPE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    environment: str
    inputs: _containers.RepeatedCompositeFieldContainer[TrialInput]
    episodes_per_trial: int
    free_shots: int
    mask_scope: MaskScope
    seed: int
    sampling: _trajectory_pb2.SamplingParams
    def __init__(self, environment: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[TrialInput, _Mapping]]] = ..., episodes_per_trial: _Optional[int] = ..., free_shots: _Optional[int] = ..., mask_scope: _Optional[_Union[MaskScope, str]] = ..., seed: _Optional[int] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class TrialInput(_message.Message):
    __slots__ = ("data",)
    class DataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: _containers.ScalarMap[str, str]
    def __init__(self, data: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RunTrialResponse(_message.Message):
    __slots__ = ("trials",)
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    trials: _containers.RepeatedCompositeFieldContainer[Trial]
    def __init__(self, trials: _Optional[_Iterable[_Union[Trial, _Mapping]]] = ...) -> None: ...

class Trial(_message.Message):
    __slots__ = ("session_id", "episodes", "reward", "full_token_ids", "full_attention_mask", "completion_only_mask", "final_completion_messages")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FULL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FULL_ATTENTION_MASK_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_ONLY_MASK_FIELD_NUMBER: _ClassVar[int]
    FINAL_COMPLETION_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    episodes: _containers.RepeatedCompositeFieldContainer[TrialEpisode]
    reward: float
    full_token_ids: _containers.RepeatedScalarFieldContainer[int]
    full_attention_mask: _containers.RepeatedScalarFieldContainer[int]
    completion_only_mask: _containers.RepeatedScalarFieldContainer[int]
    final_completion_messages: _containers.RepeatedCompositeFieldContainer[_chat_pb2.Message]
    def __init__(self, session_id: _Optional[str] = ..., episodes: _Optional[_Iterable[_Union[TrialEpisode, _Mapping]]] = ..., reward: _Optional[float] = ..., full_token_ids: _Optional[_Iterable[int]] = ..., full_attention_mask: _Optional[_Iterable[int]] = ..., completion_only_mask: _Optional[_Iterable[int]] = ..., final_completion_messages: _Optional[_Iterable[_Union[_chat_pb2.Message, _Mapping]]] = ...) -> None: ...

class TrialEpisode(_message.Message):
    __slots__ = ("steps", "messages", "reward", "terminated", "is_free_shot", "failures")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    IS_FREE_SHOT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[TrialStep]
    messages: _chat_pb2.History
    reward: float
    terminated: bool
    is_free_shot: bool
    failures: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Failure]
    def __init__(self, steps: _Optional[_Iterable[_Union[TrialStep, _Mapping]]] = ..., messages: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., reward: _Optional[float] = ..., terminated: bool = ..., is_free_shot: bool = ..., failures: _Optional[_Iterable[_Union[_trajectory_pb2.Failure, _Mapping]]] = ...) -> None: ...

class TrialStep(_message.Message):
    __slots__ = ("prompt", "prompt_token_ids", "action", "action_token_ids", "inference_logprobs", "policy_runs", "reward", "info")
    class InfoEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_RUNS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    action: str
    action_token_ids: _containers.RepeatedScalarFieldContainer[int]
    inference_logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_runs: _containers.RepeatedCompositeFieldContainer[PolicyRun]
    reward: float
    info: _containers.ScalarMap[str, str]
    def __init__(self, prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., action: _Optional[str] = ..., action_token_ids: _Optional[_Iterable[int]] = ..., inference_logprobs: _Optional[_Iterable[float]] = ..., policy_runs: _Optional[_Iterable[_Union[PolicyRun, _Mapping]]] = ..., reward: _Optional[float] = ..., info: _Optional[_Mapping[str, str]] = ...) -> None: ...
