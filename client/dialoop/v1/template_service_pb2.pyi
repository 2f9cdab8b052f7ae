from dialoop.v1 import chat_pb2 as _chat_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListTemplatesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTemplatesResponse(_message.Message):
    __slots__ = ("templates",)
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    templates: _containers.RepeatedCompositeFieldContainer[TemplateInfo]
    def __init__(self, templates: _Optional[_Iterable[_Union[TemplateInfo, _Mapping]]] = ...) -> None: ...

class TemplateInfo(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("history", "add_generation_prompt")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.History
    add_generation_prompt: bool
    def __init__(self, history: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., add_generation_prompt: bool = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("text", "sequence")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    text: str
    sequence: _trajectory_pb2.Sequence
    def __init__(self, text: _Optional[str] = ..., sequence: _Optional[_Union[_trajectory_pb2.Sequence, _Mapping]] = ...) -> None: ...
