from dialoop.v1 import inference_service_pb2 as _inference_service_pb2
from dialoop.v1 import scope_pb2 as _scope_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_STARTING: _ClassVar[Phase]
    PHASE_WARM_START: _ClassVar[Phase]
    PHASE_TRAINING: _ClassVar[Phase]
    PHASE_EVALUATING: _ClassVar[Phase]
    PHASE_PAUSED: _ClassVar[Phase]
    PHASE_DONE: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_STARTING: Phase
PHASE_WARM_START: Phase
PHASE_TRAINING: Phase
PHASE_EVALUATING: Phase
PHASE_PAUSED: Phase
PHASE_DONE: Phase
PHASE_FAILED: Phase

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("phase", "policy_version", "num_train_steps", "max_train_steps", "num_warm_start_steps", "max_warm_start_steps", "metrics", "failure", "num_parameters", "alarms")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_TRAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_WARM_START_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_WARM_START_STEPS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    policy_version: _trajectory_pb2.PolicyVersion
    num_train_steps: int
    max_train_steps: int
    num_warm_start_steps: int
    max_warm_start_steps: int
    metrics: _containers.ScalarMap[str, float]
    failure: str
    num_parameters: int
    alarms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., num_train_steps: _Optional[int] = ..., max_train_steps: _Optional[int] = ..., num_warm_start_steps: _Optional[int] = ..., max_warm_start_steps: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., failure: _Optional[str] = ..., num_parameters: _Optional[int] = ..., alarms: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPolicyResponse(_message.Message):
    __slots__ = ("policy_version", "weights")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    policy_version: _trajectory_pb2.PolicyVersion
    weights: WeightsLocation
    def __init__(self, policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., weights: _Optional[_Union[WeightsLocation, _Mapping]] = ...) -> None: ...

class WeightsLocation(_message.Message):
    __slots__ = ("path", "sha256", "num_bytes", "kind", "base_digest")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    path: str
    sha256: str
    num_bytes: int
    kind: _inference_service_pb2.WeightsKind
    base_digest: str
    def __init__(self, path: _Optional[str] = ..., sha256: _Optional[str] = ..., num_bytes: _Optional[int] = ..., kind: _Optional[_Union[_inference_service_pb2.WeightsKind, str]] = ..., base_digest: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("policy_version", "publish_s", "max_logprob_difference")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_S_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    policy_version: _trajectory_pb2.PolicyVersion
    publish_s: float
    max_logprob_difference: float
    def __init__(self, policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., publish_s: _Optional[float] = ..., max_logprob_difference: _Optional[float] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("path", "num_train_steps")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    path: str
    num_train_steps: int
    def __init__(self, path: _Optional[str] = ..., num_train_steps: _Optional[int] = ...) -> None: ...

class TrainerServicePauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServicePauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServiceResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServiceResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("environment", "split", "max_tasks", "sampling", "num_trajectories", "label")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    MAX_TASKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    environment: str
    split: str
    max_tasks: int
    sampling: _trajectory_pb2.SamplingParams
    num_trajectories: int
    label: str
    def __init__(self, environment: _Optional[str] = ..., split: _Optional[str] = ..., max_tasks: _Optional[int] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ..., num_trajectories: _Optional[int] = ..., label: _Optional[str] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("mean_reward", "tool_call_rate", "num_trajectories", "num_failed", "oldest_policy_version", "newest_policy_version", "accuracy", "share")
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_RATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    mean_reward: float
    tool_call_rate: float
    num_trajectories: int
    num_failed: int
    oldest_policy_version: _trajectory_pb2.PolicyVersion
    newest_policy_version: _trajectory_pb2.PolicyVersion
    accuracy: float
    share: float
    def __init__(self, mean_reward: _Optional[float] = ..., tool_call_rate: _Optional[float] = ..., num_trajectories: _Optional[int] = ..., num_failed: _Optional[int] = ..., oldest_policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., newest_policy_version: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., accuracy: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...
