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

class UpdateMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_MODE_UNSPECIFIED: _ClassVar[UpdateMode]
    UPDATE_MODE_RECOMPUTE: _ClassVar[UpdateMode]
    UPDATE_MODE_KEEP_KV: _ClassVar[UpdateMode]
    UPDATE_MODE_WAIT: _ClassVar[UpdateMode]

class WeightsKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_KIND_UNSPECIFIED: _ClassVar[WeightsKind]
    WEIGHTS_KIND_WHOLE: _ClassVar[WeightsKind]
    WEIGHTS_KIND_ADAPTER: _ClassVar[WeightsKind]
    WEIGHTS_KIND_DELTA: _ClassVar[WeightsKind]
UPDATE_MODE_UNSPECIFIED: UpdateMode
UPDATE_MODE_RECOMPUTE: UpdateMode
UPDATE_MODE_KEEP_KV: UpdateMode
UPDATE_MODE_WAIT: UpdateMode
WEIGHTS_KIND_UNSPECIFIED: WeightsKind
WEIGHTS_KIND_WHOLE: WeightsKind
WEIGHTS_KIND_ADAPTER: WeightsKind
WEIGHTS_KIND_DELTA: WeightsKind

class GenerateRequest(_message.Message):
    __slots__ = ("history", "context", "num_context_messages", "sampling", "turn", "num_samples", "text", "token_ids", "adapter", "template_name", "tools", "template_options_json", "truncate_prompt", "skip_special_tokens", "partial_answer", "add_special_tokens")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_NAME_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_ANSWER_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.ChatHistory
    context: _trajectory_pb2.Sequence
    num_context_messages: int
    sampling: _trajectory_pb2.SamplingParams
    turn: int
    num_samples: int
    text: str
    token_ids: _chat_pb2.TokenIds
    adapter: str
    template_name: str
    tools: _containers.RepeatedCompositeFieldContainer[_chat_pb2.ToolDefinition]
    template_options_json: str
    truncate_prompt: bool
    skip_special_tokens: bool
    partial_answer: _trajectory_pb2.Sequence
    add_special_tokens: bool
    def __init__(self, history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., context: _Optional[_Union[_trajectory_pb2.Sequence, _Mapping]] = ..., num_context_messages: _Optional[int] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., turn: _Optional[int] = ..., num_samples: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_chat_pb2.TokenIds, _Mapping]] = ..., adapter: _Optional[str] = ..., template_name: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[_chat_pb2.ToolDefinition, _Mapping]]] = ..., template_options_json: _Optional[str] = ..., truncate_prompt: bool = ..., skip_special_tokens: bool = ..., partial_answer: _Optional[_Union[_trajectory_pb2.Sequence, _Mapping]] = ..., add_special_tokens: bool = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("history", "sequence", "stop_reason", "stop_string", "text", "prompt_id", "sample_index", "top_logprobs", "model_digest")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.ChatHistory
    sequence: _trajectory_pb2.Sequence
    stop_reason: _trajectory_pb2.StopReason
    stop_string: str
    text: _chat_pb2.Text
    prompt_id: str
    sample_index: int
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    model_digest: str
    def __init__(self, history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., sequence: _Optional[_Union[_trajectory_pb2.Sequence, _Mapping]] = ..., stop_reason: _Optional[_Union[_trajectory_pb2.StopReason, str]] = ..., stop_string: _Optional[str] = ..., text: _Optional[_Union[_chat_pb2.Text, _Mapping]] = ..., prompt_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., model_digest: _Optional[str] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("samples", "tokenizer_digest", "template_digest", "sampling", "queue_s", "generate_s", "update_mode", "num_truncated_tokens", "warnings", "distribution")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRUNCATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    tokenizer_digest: str
    template_digest: str
    sampling: _trajectory_pb2.SamplingParams
    queue_s: float
    generate_s: float
    update_mode: UpdateMode
    num_truncated_tokens: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    distribution: _chat_pb2.Distribution
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., queue_s: _Optional[float] = ..., generate_s: _Optional[float] = ..., update_mode: _Optional[_Union[UpdateMode, str]] = ..., num_truncated_tokens: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., distribution: _Optional[_Union[_chat_pb2.Distribution, str]] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("request", "chunk_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    chunk_tokens: int
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("token_ids", "inference_logprobs", "policy_version", "text", "completed", "top_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    inference_logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version: _trajectory_pb2.PolicyVersion
    text: str
    completed: GenerateResponse
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., inference_logprobs: _Optional[_Iterable[float]] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., text: _Optional[str] = ..., completed: _Optional[_Union[GenerateResponse, _Mapping]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ...) -> None: ...

class LogProbRequest(_message.Message):
    __slots__ = ("token_ids", "histories", "texts", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HISTORIES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedCompositeFieldContainer[_chat_pb2.TokenIds]
    histories: _containers.RepeatedCompositeFieldContainer[_chat_pb2.ChatHistory]
    texts: _containers.RepeatedScalarFieldContainer[str]
    adapter: str
    def __init__(self, token_ids: _Optional[_Iterable[_Union[_chat_pb2.TokenIds, _Mapping]]] = ..., histories: _Optional[_Iterable[_Union[_chat_pb2.ChatHistory, _Mapping]]] = ..., texts: _Optional[_Iterable[str]] = ..., adapter: _Optional[str] = ...) -> None: ...

class LogProbResponse(_message.Message):
    __slots__ = ("logprobs", "policy_version", "sequences", "warnings", "distribution", "model_digest")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_chat_pb2.LogProbValues]
    policy_version: _trajectory_pb2.PolicyVersion
    sequences: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Sequence]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    distribution: _chat_pb2.Distribution
    model_digest: str
    def __init__(self, logprobs: _Optional[_Iterable[_Union[_chat_pb2.LogProbValues, _Mapping]]] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[_trajectory_pb2.Sequence, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., distribution: _Optional[_Union[_chat_pb2.Distribution, str]] = ..., model_digest: _Optional[str] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy_version", "engine", "engine_version", "tokenizer_digest", "template_digest", "max_model_len", "ready", "reason", "num_sampled_tokens", "num_requests_running", "num_parameters", "adapters", "data_planes", "model_digest")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANES_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    policy_version: _trajectory_pb2.PolicyVersion
    engine: str
    engine_version: str
    tokenizer_digest: str
    template_digest: str
    max_model_len: int
    ready: bool
    reason: str
    num_sampled_tokens: int
    num_requests_running: int
    num_parameters: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    data_planes: _containers.RepeatedScalarFieldContainer[str]
    model_digest: str
    def __init__(self, policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., ready: bool = ..., reason: _Optional[str] = ..., num_sampled_tokens: _Optional[int] = ..., num_requests_running: _Optional[int] = ..., num_parameters: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., data_planes: _Optional[_Iterable[str]] = ..., model_digest: _Optional[str] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "policy_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy_version: _trajectory_pb2.PolicyVersion
    def __init__(self, name: _Optional[str] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class WeightsManifest(_message.Message):
    __slots__ = ("policy_version", "sha256", "num_bytes", "path", "update_mode", "adapter", "adapter_config_json", "probes", "max_logprob_difference", "data_plane", "kind", "base_digest")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MODE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    policy_version: _trajectory_pb2.PolicyVersion
    sha256: str
    num_bytes: int
    path: str
    update_mode: UpdateMode
    adapter: str
    adapter_config_json: str
    probes: _containers.RepeatedCompositeFieldContainer[Probe]
    max_logprob_difference: float
    data_plane: str
    kind: WeightsKind
    base_digest: str
    def __init__(self, policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., sha256: _Optional[str] = ..., num_bytes: _Optional[int] = ..., path: _Optional[str] = ..., update_mode: _Optional[_Union[UpdateMode, str]] = ..., adapter: _Optional[str] = ..., adapter_config_json: _Optional[str] = ..., probes: _Optional[_Iterable[_Union[Probe, _Mapping]]] = ..., max_logprob_difference: _Optional[float] = ..., data_plane: _Optional[str] = ..., kind: _Optional[_Union[WeightsKind, str]] = ..., base_digest: _Optional[str] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _chat_pb2.TokenIds
    logprobs: _chat_pb2.LogProbValues
    def __init__(self, token_ids: _Optional[_Union[_chat_pb2.TokenIds, _Mapping]] = ..., logprobs: _Optional[_Union[_chat_pb2.LogProbValues, _Mapping]] = ...) -> None: ...

class TransferStep(_message.Message):
    __slots__ = ("phase", "info_json", "tensors")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[TransferStep.Phase]
        PHASE_INIT: _ClassVar[TransferStep.Phase]
        PHASE_START: _ClassVar[TransferStep.Phase]
        PHASE_UPDATE: _ClassVar[TransferStep.Phase]
        PHASE_FINISH: _ClassVar[TransferStep.Phase]
    PHASE_UNSPECIFIED: TransferStep.Phase
    PHASE_INIT: TransferStep.Phase
    PHASE_START: TransferStep.Phase
    PHASE_UPDATE: TransferStep.Phase
    PHASE_FINISH: TransferStep.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    phase: TransferStep.Phase
    info_json: str
    tensors: _containers.RepeatedCompositeFieldContainer[SharedTensor]
    def __init__(self, phase: _Optional[_Union[TransferStep.Phase, str]] = ..., info_json: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[SharedTensor, _Mapping]]] = ...) -> None: ...

class SharedTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "device", "memory_handle", "memory_offset", "counter_name", "counter_offset", "event_handle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_HANDLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNTER_NAME_FIELD_NUMBER: _ClassVar[int]
    COUNTER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    device: str
    memory_handle: bytes
    memory_offset: int
    counter_name: str
    counter_offset: int
    event_handle: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., device: _Optional[str] = ..., memory_handle: _Optional[bytes] = ..., memory_offset: _Optional[int] = ..., counter_name: _Optional[str] = ..., counter_offset: _Optional[int] = ..., event_handle: _Optional[bytes] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("manifest", "chunk", "transfer", "end")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightsManifest
    chunk: bytes
    transfer: TransferStep
    end: _stream_pb2.StreamEnd
    def __init__(self, manifest: _Optional[_Union[WeightsManifest, _Mapping]] = ..., chunk: _Optional[bytes] = ..., transfer: _Optional[_Union[TransferStep, _Mapping]] = ..., end: _Optional[_Union[_stream_pb2.StreamEnd, _Mapping]] = ...) -> None: ...

class LoadWeightsResponse(_message.Message):
    __slots__ = ("policy_version", "pause_s", "load_s")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    policy_version: _trajectory_pb2.PolicyVersion
    pause_s: float
    load_s: float
    def __init__(self, policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., pause_s: _Optional[float] = ..., load_s: _Optional[float] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("drain_s",)
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    drain_s: float
    def __init__(self, drain_s: _Optional[float] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("unloaded",)
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    unloaded: bool
    def __init__(self, unloaded: bool = ...) -> None: ...

class CreateRecordingRequest(_message.Message):
    __slots__ = ("recording_id", "group_id", "task", "sampling", "time_to_live_s")
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_S_FIELD_NUMBER: _ClassVar[int]
    recording_id: str
    group_id: str
    task: _trajectory_pb2.Task
    sampling: _trajectory_pb2.SamplingParams
    time_to_live_s: float
    def __init__(self, recording_id: _Optional[str] = ..., group_id: _Optional[str] = ..., task: _Optional[_Union[_trajectory_pb2.Task, _Mapping]] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., time_to_live_s: _Optional[float] = ...) -> None: ...

class CreateRecordingResponse(_message.Message):
    __slots__ = ("base_path", "time_to_live_s", "recording_id", "key")
    BASE_PATH_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_S_FIELD_NUMBER: _ClassVar[int]
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    base_path: str
    time_to_live_s: float
    recording_id: str
    key: str
    def __init__(self, base_path: _Optional[str] = ..., time_to_live_s: _Optional[float] = ..., recording_id: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class GetRecordingRequest(_message.Message):
    __slots__ = ("recording_id",)
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    recording_id: str
    def __init__(self, recording_id: _Optional[str] = ...) -> None: ...

class GetRecordingResponse(_message.Message):
    __slots__ = ("recording_id", "calls", "closed")
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    recording_id: str
    calls: _containers.RepeatedCompositeFieldContainer[RecordedCall]
    closed: bool
    def __init__(self, recording_id: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[RecordedCall, _Mapping]]] = ..., closed: bool = ...) -> None: ...

class RecordedCall(_message.Message):
    __slots__ = ("call_id", "prompt", "samples", "sampling", "sequence_indices", "failure")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDICES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    prompt: _chat_pb2.History
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    sampling: _trajectory_pb2.SamplingParams
    sequence_indices: _containers.RepeatedScalarFieldContainer[int]
    failure: _trajectory_pb2.Failure
    def __init__(self, call_id: _Optional[str] = ..., prompt: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., sequence_indices: _Optional[_Iterable[int]] = ..., failure: _Optional[_Union[_trajectory_pb2.Failure, _Mapping]] = ...) -> None: ...

class CloseRecordingRequest(_message.Message):
    __slots__ = ("recording_id", "rewards", "failures", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    recording_id: str
    rewards: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Reward]
    failures: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Failure]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, recording_id: _Optional[str] = ..., rewards: _Optional[_Iterable[_Union[_trajectory_pb2.Reward, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_trajectory_pb2.Failure, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CloseRecordingResponse(_message.Message):
    __slots__ = ("trajectory",)
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    trajectory: _trajectory_pb2.Trajectory
    def __init__(self, trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ...) -> None: ...
