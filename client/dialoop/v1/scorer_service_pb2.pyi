from dialoop.v1 import chat_pb2 as _chat_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScorerServiceLogProbRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedCompositeFieldContainer[_chat_pb2.TokenIds]
    def __init__(self, token_ids: _Optional[_Iterable[_Union[_chat_pb2.TokenIds, _Mapping]]] = ...) -> None: ...

class ScorerServiceLogProbResponse(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_chat_pb2.LogProbValues]
    def __init__(self, logprobs: _Optional[_Iterable[_Union[_chat_pb2.LogProbValues, _Mapping]]] = ...) -> None: ...

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
