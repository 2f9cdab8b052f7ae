"""Messages and histories to protobuf and back."""

from __future__ import annotations

from dialoop.chat import ChatHistory, ContentPart, History, Message, ToolCall, ToolDefinition
from dialoop.environments.modes import Text, Tokens
from dialoop.v1 import chat_pb2

_PART_FIELDS = (
    "text",
    "url",
    "data",
    "mime_type",
    "name",
    "size",
    "function_name",
    "function_arguments_json",
)

_OPTIONAL = ("reasoning", "tool_call_id", "name")
_VIEWS = ("prompt", "response", "full")


def message_to_proto(message: Message) -> chat_pb2.Message:
    """One message."""
    # Most messages are a role and a text: a field that is not there costs nothing.
    proto = chat_pb2.Message(role=message.role)
    if message.tool_calls:
        proto.tool_calls.extend(
            chat_pb2.ToolCall(id=c.id, name=c.name, arguments_json=c.arguments_json)
            for c in message.tool_calls
        )
    if message.tool_responses:
        proto.tool_responses.extend(message.tool_responses)
    for name in _OPTIONAL:
        if value := getattr(message, name):
            setattr(proto, name, value)
    if not message.is_complete:
        proto.is_complete = False
    if isinstance(message.content, str):
        proto.content = message.content
    else:
        proto.parts.parts.extend(_part_to_proto(part) for part in message.content)
    return proto


def _part_to_proto(part: ContentPart) -> chat_pb2.ContentPart:
    given = {name: getattr(part, name) for name in _PART_FIELDS if getattr(part, name) is not None}
    return chat_pb2.ContentPart(type=part.type, **given)


def message_from_proto(proto: chat_pb2.Message) -> Message:
    """One message; an absent `is_complete` is true."""
    content: str | tuple[ContentPart, ...] = proto.content
    if proto.WhichOneof("body") == "parts":
        content = tuple(_part_from_proto(part) for part in proto.parts.parts)
    return Message(
        role=proto.role,
        content=content,
        is_complete=proto.is_complete if proto.HasField("is_complete") else True,
        tool_calls=tuple(
            ToolCall(id=c.id, name=c.name, arguments_json=c.arguments_json)
            for c in proto.tool_calls
        ),
        tool_responses=tuple(proto.tool_responses),
        reasoning=proto.reasoning,
        tool_call_id=proto.tool_call_id,
        name=proto.name,
    )


def _part_from_proto(proto: chat_pb2.ContentPart) -> ContentPart:
    given = {name: getattr(proto, name) for name in _PART_FIELDS if proto.HasField(name)}
    return ContentPart(type=proto.type, **given)


def history_to_proto(history: History) -> chat_pb2.History:
    """A history."""
    return chat_pb2.History(messages=[message_to_proto(m) for m in history])


def history_from_proto(proto: chat_pb2.History) -> History:
    """A history; a message without a role is an error."""
    return History(tuple(message_from_proto(m) for m in proto.messages))


def chat_history_to_proto(chat: ChatHistory) -> chat_pb2.ChatHistory:
    """Prompt, response and full, each only when present."""
    return chat_pb2.ChatHistory(
        prompt=None if chat.prompt is None else history_to_proto(chat.prompt),
        response=None if chat.response is None else history_to_proto(chat.response),
        full=None if chat.full is None else history_to_proto(chat.full),
    )


def chat_history_from_proto(proto: chat_pb2.ChatHistory) -> ChatHistory:
    """Prompt, response and full; raises InvalidHistory when they contradict each other."""
    return ChatHistory(
        prompt=history_from_proto(proto.prompt) if proto.HasField("prompt") else None,
        response=history_from_proto(proto.response) if proto.HasField("response") else None,
        full=history_from_proto(proto.full) if proto.HasField("full") else None,
    )


def tool_to_proto(tool: ToolDefinition) -> chat_pb2.ToolDefinition:
    """A tool's definition."""
    return chat_pb2.ToolDefinition(
        name=tool.name, description=tool.description, parameters_json=tool.parameters_json
    )


def tool_from_proto(proto: chat_pb2.ToolDefinition) -> ToolDefinition:
    """A tool's definition."""
    return ToolDefinition(
        name=proto.name,
        description=proto.description,
        parameters_json=proto.parameters_json or "{}",
    )


def text_to_proto(text: Text) -> chat_pb2.Text:
    """Prompt, response and full as text, each only when present."""
    return chat_pb2.Text(prompt=text.prompt, response=text.response, full=text.full)


def text_from_proto(proto: chat_pb2.Text) -> Text:
    """Prompt, response and full as text; raises InvalidHistory when they contradict each other."""
    return Text(**{name: getattr(proto, name) for name in _VIEWS if proto.HasField(name)})


def tokens_to_proto(tokens: Tokens) -> chat_pb2.Tokens:
    """Prompt, response and full as ids, each only when present."""
    given = {name: getattr(tokens, name) for name in _VIEWS}
    return chat_pb2.Tokens(
        **{k: chat_pb2.TokenIds(values=v) for k, v in given.items() if v is not None}
    )


def tokens_from_proto(proto: chat_pb2.Tokens) -> Tokens:
    """Prompt, response and full as ids; raises InvalidHistory when they contradict each other."""
    return Tokens(
        **{name: tuple(getattr(proto, name).values) for name in _VIEWS if proto.HasField(name)}
    )
