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

class TokenScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_SCOPE_UNSPECIFIED: _ClassVar[TokenScope]
    TOKEN_SCOPE_ASSISTANT: _ClassVar[TokenScope]
    TOKEN_SCOPE_ALL: _ClassVar[TokenScope]

class KlEstimator(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KL_ESTIMATOR_UNSPECIFIED: _ClassVar[KlEstimator]
    KL_ESTIMATOR_K1: _ClassVar[KlEstimator]
    KL_ESTIMATOR_K2: _ClassVar[KlEstimator]
    KL_ESTIMATOR_K3: _ClassVar[KlEstimator]
TOKEN_SCOPE_UNSPECIFIED: TokenScope
TOKEN_SCOPE_ASSISTANT: TokenScope
TOKEN_SCOPE_ALL: TokenScope
KL_ESTIMATOR_UNSPECIFIED: KlEstimator
KL_ESTIMATOR_K1: KlEstimator
KL_ESTIMATOR_K2: KlEstimator
KL_ESTIMATOR_K3: KlEstimator

class TokenValues(_message.Message):
    __slots__ = ("trajectory_id", "sequence_index", "positions", "values")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    sequence_index: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, trajectory_id: _Optional[str] = ..., sequence_index: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class ScorerServiceLogProbRequest(_message.Message):
    __slots__ = ("token_ids", "trajectories", "mask_scope", "model_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    MASK_SCOPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedCompositeFieldContainer[_chat_pb2.TokenIds]
    trajectories: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    mask_scope: TokenScope
    model_id: str
    def __init__(self, token_ids: _Optional[_Iterable[_Union[_chat_pb2.TokenIds, _Mapping]]] = ..., trajectories: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ..., mask_scope: _Optional[_Union[TokenScope, str]] = ..., model_id: _Optional[str] = ...) -> None: ...

class ScorerServiceLogProbResponse(_message.Message):
    __slots__ = ("logprobs", "sequences")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_chat_pb2.LogProbValues]
    sequences: _containers.RepeatedCompositeFieldContainer[TokenValues]
    def __init__(self, logprobs: _Optional[_Iterable[_Union[_chat_pb2.LogProbValues, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[TokenValues, _Mapping]]] = ...) -> None: ...

class ScorerServiceRetrieveKlRequest(_message.Message):
    __slots__ = ("trajectories", "mask_scope", "model_id", "reference_model_id", "estimator")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    MASK_SCOPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ESTIMATOR_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    mask_scope: TokenScope
    model_id: str
    reference_model_id: str
    estimator: KlEstimator
    def __init__(self, trajectories: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ..., mask_scope: _Optional[_Union[TokenScope, str]] = ..., model_id: _Optional[str] = ..., reference_model_id: _Optional[str] = ..., estimator: _Optional[_Union[KlEstimator, str]] = ...) -> None: ...

class ScorerServiceRetrieveKlResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[TokenValues]
    def __init__(self, sequences: _Optional[_Iterable[_Union[TokenValues, _Mapping]]] = ...) -> None: ...

class ScorerServiceScoreRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: _trajectory_pb2.Group
    def __init__(self, group: _Optional[_Union[_trajectory_pb2.Group, _Mapping]] = ...) -> None: ...

class ScorerServiceScoreResponse(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: _trajectory_pb2.Group
    def __init__(self, group: _Optional[_Union[_trajectory_pb2.Group, _Mapping]] = ...) -> None: ...
