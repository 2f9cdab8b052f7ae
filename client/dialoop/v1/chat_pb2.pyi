from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Distribution(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISTRIBUTION_UNSPECIFIED: _ClassVar[Distribution]
    DISTRIBUTION_RAW: _ClassVar[Distribution]
    DISTRIBUTION_PROCESSED: _ClassVar[Distribution]
DISTRIBUTION_UNSPECIFIED: Distribution
DISTRIBUTION_RAW: Distribution
DISTRIBUTION_PROCESSED: Distribution

class ContentPart(_message.Message):
    __slots__ = ("type", "text", "url", "data", "mime_type", "name", "size", "function_name", "function_arguments_json")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_NAME_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    type: str
    text: str
    url: str
    data: bytes
    mime_type: str
    name: str
    size: int
    function_name: str
    function_arguments_json: str
    def __init__(self, type: _Optional[str] = ..., text: _Optional[str] = ..., url: _Optional[str] = ..., data: _Optional[bytes] = ..., mime_type: _Optional[str] = ..., name: _Optional[str] = ..., size: _Optional[int] = ..., function_name: _Optional[str] = ..., function_arguments_json: _Optional[str] = ...) -> None: ...

class ContentParts(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class ToolDefinition(_message.Message):
    __slots__ = ("name", "description", "parameters_json", "given_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    GIVEN_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    given_json: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ..., given_json: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "parts", "is_complete", "tool_calls", "tool_responses", "reasoning", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_RESPONSES_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    parts: ContentParts
    is_complete: bool
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_responses: _containers.RepeatedScalarFieldContainer[str]
    reasoning: str
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., parts: _Optional[_Union[ContentParts, _Mapping]] = ..., is_complete: bool = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_responses: _Optional[_Iterable[str]] = ..., reasoning: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class ChatHistory(_message.Message):
    __slots__ = ("prompt", "response", "full")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    prompt: History
    response: History
    full: History
    def __init__(self, prompt: _Optional[_Union[History, _Mapping]] = ..., response: _Optional[_Union[History, _Mapping]] = ..., full: _Optional[_Union[History, _Mapping]] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("prompt", "response", "full")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    response: str
    full: str
    def __init__(self, prompt: _Optional[str] = ..., response: _Optional[str] = ..., full: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("prompt", "response", "full")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    prompt: TokenIds
    response: TokenIds
    full: TokenIds
    def __init__(self, prompt: _Optional[_Union[TokenIds, _Mapping]] = ..., response: _Optional[_Union[TokenIds, _Mapping]] = ..., full: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class LogProbValues(_message.Message):
    __slots__ = ("values", "start")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    start: int
    def __init__(self, values: _Optional[_Iterable[float]] = ..., start: _Optional[int] = ...) -> None: ...

class LogProbs(_message.Message):
    __slots__ = ("prompt", "response", "full", "temperature_scaled", "distribution")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_SCALED_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    prompt: LogProbValues
    response: LogProbValues
    full: LogProbValues
    temperature_scaled: bool
    distribution: Distribution
    def __init__(self, prompt: _Optional[_Union[LogProbValues, _Mapping]] = ..., response: _Optional[_Union[LogProbValues, _Mapping]] = ..., full: _Optional[_Union[LogProbValues, _Mapping]] = ..., temperature_scaled: bool = ..., distribution: _Optional[_Union[Distribution, str]] = ...) -> None: ...

class Masks(_message.Message):
    __slots__ = ("all_attention_mask", "all_assistant_mask")
    ALL_ATTENTION_MASK_FIELD_NUMBER: _ClassVar[int]
    ALL_ASSISTANT_MASK_FIELD_NUMBER: _ClassVar[int]
    all_attention_mask: _containers.RepeatedScalarFieldContainer[bool]
    all_assistant_mask: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, all_attention_mask: _Optional[_Iterable[bool]] = ..., all_assistant_mask: _Optional[_Iterable[bool]] = ...) -> None: ...
