from dialoop.v1 import chat_pb2 as _chat_pb2
from dialoop.v1 import scope_pb2 as _scope_pb2
from dialoop.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TemplateParser(_message.Message):
    __slots__ = ("message_pattern", "roles", "end_markers", "tool_call_start", "tool_call_end", "tool_response_start", "tool_response_end", "reasoning_start", "reasoning_end")
    class RolesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    END_MARKERS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_START_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_END_FIELD_NUMBER: _ClassVar[int]
    TOOL_RESPONSE_START_FIELD_NUMBER: _ClassVar[int]
    TOOL_RESPONSE_END_FIELD_NUMBER: _ClassVar[int]
    REASONING_START_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    message_pattern: str
    roles: _containers.ScalarMap[str, str]
    end_markers: _containers.RepeatedScalarFieldContainer[str]
    tool_call_start: str
    tool_call_end: str
    tool_response_start: str
    tool_response_end: str
    reasoning_start: str
    reasoning_end: str
    def __init__(self, message_pattern: _Optional[str] = ..., roles: _Optional[_Mapping[str, str]] = ..., end_markers: _Optional[_Iterable[str]] = ..., tool_call_start: _Optional[str] = ..., tool_call_end: _Optional[str] = ..., tool_response_start: _Optional[str] = ..., tool_response_end: _Optional[str] = ..., reasoning_start: _Optional[str] = ..., reasoning_end: _Optional[str] = ...) -> None: ...

class RegisterTemplateRequest(_message.Message):
    __slots__ = ("name", "source", "parser", "model_family_keywords", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARSER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FAMILY_KEYWORDS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    parser: TemplateParser
    model_family_keywords: _containers.RepeatedScalarFieldContainer[str]
    replace: bool
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., parser: _Optional[_Union[TemplateParser, _Mapping]] = ..., model_family_keywords: _Optional[_Iterable[str]] = ..., replace: bool = ...) -> None: ...

class RegisterTemplateResponse(_message.Message):
    __slots__ = ("template",)
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    template: TemplateInfo
    def __init__(self, template: _Optional[_Union[TemplateInfo, _Mapping]] = ...) -> None: ...

class ListTemplatesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTemplatesResponse(_message.Message):
    __slots__ = ("templates",)
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    templates: _containers.RepeatedCompositeFieldContainer[TemplateInfo]
    def __init__(self, templates: _Optional[_Iterable[_Union[TemplateInfo, _Mapping]]] = ...) -> None: ...

class TemplateInfo(_message.Message):
    __slots__ = ("name", "digest", "version", "invertible", "is_default")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INVERTIBLE_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    version: int
    invertible: bool
    is_default: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., version: _Optional[int] = ..., invertible: bool = ..., is_default: bool = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("history", "add_generation_prompt", "template_name", "continue_final_message", "tools", "template_options_json")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.History
    add_generation_prompt: bool
    template_name: str
    continue_final_message: bool
    tools: _containers.RepeatedCompositeFieldContainer[_chat_pb2.ToolDefinition]
    template_options_json: str
    def __init__(self, history: _Optional[_Union[_chat_pb2.History, _Mapping]] = ..., add_generation_prompt: bool = ..., template_name: _Optional[str] = ..., continue_final_message: bool = ..., tools: _Optional[_Iterable[_Union[_chat_pb2.ToolDefinition, _Mapping]]] = ..., template_options_json: _Optional[str] = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("text", "sequence", "assistant_mask", "warnings")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ASSISTANT_MASK_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    text: str
    sequence: _trajectory_pb2.Sequence
    assistant_mask: _containers.RepeatedScalarFieldContainer[bool]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., sequence: _Optional[_Union[_trajectory_pb2.Sequence, _Mapping]] = ..., assistant_mask: _Optional[_Iterable[bool]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class ParseRequest(_message.Message):
    __slots__ = ("template_name", "text", "token_ids", "keep_default_system")
    TEMPLATE_NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_DEFAULT_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    template_name: str
    text: str
    token_ids: _chat_pb2.TokenIds
    keep_default_system: bool
    def __init__(self, template_name: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_chat_pb2.TokenIds, _Mapping]] = ..., keep_default_system: bool = ...) -> None: ...

class ParseResponse(_message.Message):
    __slots__ = ("history",)
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    history: _chat_pb2.History
    def __init__(self, history: _Optional[_Union[_chat_pb2.History, _Mapping]] = ...) -> None: ...
