from dialoop.v1 import chat_pb2 as _chat_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("history", "context", "num_context_messages", "sampling", "turn", "num_samples")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.ChatHistory
    context: _trajectory_pb2.Sequence
    num_context_messages: int
    sampling: _trajectory_pb2.SamplingParams
    turn: int
    num_samples: int
    def __init__(self, history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., context: _Optional[_Union[_trajectory_pb2.Sequence, _Mapping]] = ..., num_context_messages: _Optional[int] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., turn: _Optional[int] = ..., num_samples: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("history", "sequence", "stop_reason", "stop_string")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.ChatHistory
    sequence: _trajectory_pb2.Sequence
    stop_reason: _trajectory_pb2.StopReason
    stop_string: str
    def __init__(self, history: _Optional[_Union[_chat_pb2.ChatHistory, _Mapping]] = ..., sequence: _Optional[_Union[_trajectory_pb2.Sequence, _Mapping]] = ..., stop_reason: _Optional[_Union[_trajectory_pb2.StopReason, str]] = ..., stop_string: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("samples", "tokenizer_digest", "template_digest", "sampling", "queue_s", "generate_s")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    tokenizer_digest: str
    template_digest: str
    sampling: _trajectory_pb2.SamplingParams
    queue_s: float
    generate_s: float
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., queue_s: _Optional[float] = ..., generate_s: _Optional[float] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("token_ids", "inference_logprobs", "policy_version", "text", "completed")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    inference_logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version: _trajectory_pb2.PolicyVersion
    text: str
    completed: GenerateResponse
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., inference_logprobs: _Optional[_Iterable[float]] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., text: _Optional[str] = ..., completed: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class LogProbRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedCompositeFieldContainer[_chat_pb2.TokenIds]
    def __init__(self, token_ids: _Optional[_Iterable[_Union[_chat_pb2.TokenIds, _Mapping]]] = ...) -> None: ...

class LogProbResponse(_message.Message):
    __slots__ = ("logprobs", "policy_version")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_chat_pb2.LogProbValues]
    policy_version: _trajectory_pb2.PolicyVersion
    def __init__(self, logprobs: _Optional[_Iterable[_Union[_chat_pb2.LogProbValues, _Mapping]]] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("policy_version", "engine", "engine_version", "tokenizer_digest", "template_digest", "max_model_len", "ready", "reason", "num_sampled_tokens", "num_requests_running", "num_parameters")
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
    def __init__(self, policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., template_digest: _Optional[str] = ..., max_model_len: _Optional[int] = ..., ready: bool = ..., reason: _Optional[str] = ..., num_sampled_tokens: _Optional[int] = ..., num_requests_running: _Optional[int] = ..., num_parameters: _Optional[int] = ...) -> None: ...

class WeightsManifest(_message.Message):
    __slots__ = ("policy_version", "sha256", "num_bytes", "path")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    policy_version: _trajectory_pb2.PolicyVersion
    sha256: str
    num_bytes: int
    path: str
    def __init__(self, policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., sha256: _Optional[str] = ..., num_bytes: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("manifest", "chunk")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightsManifest
    chunk: bytes
    def __init__(self, manifest: _Optional[_Union[WeightsManifest, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

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
