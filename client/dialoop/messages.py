"""Messages, tools and their dicts: what chat APIs and chat templates write, and back without loss.

    question = Message(role="user", content="What is 3+4?")
    question.to_chat()               # {"role": "user", "content": "What is 3+4?"}
    Message.from_chat({"role": "assistant", "content": "7"})

All values are immutable.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from dialoop.errors import InvalidHistory, Unsupported
from dialoop.reasons import Reason
from dialoop.representations import fields_line, messages_html, messages_text

PLACEHOLDER_ROLE = "<none>"
"""Role of messages that pad rectangular batches in other libraries; reading drops them."""

_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_HALVES = re.compile("[\ud800-\udfff]")
_TEXT_FIELDS = ("tool_call_id", "name")
_KNOWN = frozenset(
    {"role", "content", "is_complete", "tool_calls", "tool_responses", "reasoning"}
    | {"reasoning_content", "thinking", *_TEXT_FIELDS}
)
_PART_KINDS = {"text": str, "url": str, "mime_type": str, "name": str, "size": int}
_PART_KINDS |= {"function_name": str, "function_arguments_json": str}


CallIds = Literal["own", "short", "named"]
CALL_IDS: tuple[CallIds, ...] = ("own", "short", "named")
_NUM_SHORT = 9
PART_TYPES = ("text", "image", "audio", "video", "file", "function_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    """One part of a multimodal message, as `ContentPart(type="text", text="hi")`."""

    type: str
    text: str | None = None
    url: str | None = None
    data: bytes | None = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_arguments_json: str | None = None

    def __post_init__(self) -> None:
        if self.type not in PART_TYPES:
            near = get_close_matches(str(self.type), PART_TYPES, n=1)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            raise InvalidHistory(
                f"There is no content part of type {self.type!r:.40}.",
                reason=Reason.UNKNOWN_PART_TYPE,
                remedy=f"{hint}Use one of: {', '.join(PART_TYPES)}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call a chat model asks for; `arguments_json` is JSON text: `'{"a": 3}'`."""

    name: str
    arguments_json: str
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """A tool a chat model may call; `parameters_json` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters_json: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: `Message(role="user", content="What is 3+4?")`."""

    role: str
    content: str | tuple[ContentPart, ...] = ""
    is_complete: bool = True
    tool_calls: tuple[ToolCall, ...] = ()
    tool_responses: tuple[str, ...] = ()
    reasoning: str = ""
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        _expect(self.role, str, "role", "a string")
        if not self.role:
            raise InvalidHistory("A message has no role.", remedy="Set role, for example 'user'.")
        if intended := _intended_role(self.role):
            raise InvalidHistory(
                f"There is no role '{self.role}'.",
                reason=Reason.UNKNOWN_ROLE,
                remedy=f"Use '{intended}', or a role of your own that is not so close to it.",
            )
        _expect(self.is_complete, bool, "is_complete", "true or false")
        for name in ("reasoning", *_TEXT_FIELDS):
            _expect(getattr(self, name), str, name, "a string")
        if not isinstance(self.content, str):
            object.__setattr__(self, "content", _content(self.content, "content"))
        for text in (self.content, self.reasoning):
            if isinstance(text, str) and not text.isascii() and (half := _HALVES.search(text)):
                raise InvalidHistory(
                    f"A message has half a character, {half.group()!r}, which no token spells.",
                    reason=Reason.HALF_CHARACTER,
                    remedy='Leave it out: text.encode(errors="replace").decode() puts a ? there.',
                )
        if self.tool_calls != ():
            object.__setattr__(self, "tool_calls", _tool_calls(self.tool_calls, "tool_calls"))
        if self.tool_responses != ():
            responses = _tool_responses(self.tool_responses, "tool_responses")
            object.__setattr__(self, "tool_responses", responses)

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {k: v for k, v in shown.items() if k in ("role", "content") or v != _DEFAULTS[k]}
        return fields_line("Message", changed)

    def __rich__(self) -> Any:
        return messages_text([self])

    def _repr_html_(self) -> str:
        return messages_html([self])

    @property
    def text(self) -> str:
        """Return the content as text; parts that are not text contribute nothing."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)

    @classmethod
    def from_chat(cls, chat: Mapping[str, Any]) -> Message:
        """Make a message from a chat-API dict; InvalidHistory names a wrong or missing field."""
        return message_from_chat(chat)

    def to_chat(self) -> dict[str, Any]:
        """Return the chat-API dict that `from_chat` makes into this message again."""
        return message_to_chat(self)


_DEFAULTS = {field.name: field.default for field in fields(Message)}


def messages_from_chats(chats: Iterable[Any], where: str = "messages") -> tuple[Message, ...]:
    """Read a list of dicts as messages, without placeholders; errors name the index and field."""
    messages = (message_from_chat(chat, f"{where}[{i}]") for i, chat in enumerate(chats))
    return tuple(message for message in messages if message.role != PLACEHOLDER_ROLE)


def message_from_chat(chat: Any, where: str = "message") -> Message:
    """Read a dict as a message; a Message stays as it is."""
    if isinstance(chat, Message):
        return chat
    _expect(chat, Mapping, where, "a message with role and content")
    # Clients write empty fields; a number or false says something.
    unknown = [k for k in chat if k not in _KNOWN and chat[k] not in (None, "", [], (), {})]
    if unknown:
        raise InvalidHistory(
            f"{where} has a field '{unknown[0]}' that a message does not have.",
            reason=Reason.UNKNOWN_FIELD,
            remedy=f"Leave it out, or use one of: {', '.join(sorted(_KNOWN))}.",
        )
    role = _expect(chat.get("role"), str, f"{where}.role", "a string")
    is_complete = chat.get("is_complete")
    thoughts = (chat.get(key) for key in ("reasoning_content", "reasoning", "thinking"))
    reasoning = next((thought for thought in thoughts if thought), None)
    texts = {key: _text(chat.get(key), f"{where}.{key}") for key in _TEXT_FIELDS}
    return Message(
        role=role,
        content=_content(chat.get("content"), f"{where}.content"),
        is_complete=True
        if is_complete is None
        else _expect(is_complete, bool, f"{where}.is_complete", "true or false"),
        tool_calls=_tool_calls(chat.get("tool_calls"), f"{where}.tool_calls"),
        tool_responses=_tool_responses(chat.get("tool_responses"), f"{where}.tool_responses"),
        reasoning=_text(reasoning, f"{where}.reasoning_content"),
        **texts,
    )


def message_to_chat(message: Message) -> dict[str, Any]:
    """Return the dict that `message_from_chat` reads as an equal message, without empty fields."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [_part_to_chat(part) for part in content]
    chat = _as_chat(message, content, [call.arguments_json for call in message.tool_calls])
    return chat if message.is_complete else {**chat, "is_complete": False}


def _as_chat(message: Message, content: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the dict with this content, and the arguments of each tool call."""
    chat: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    if message.tool_calls:
        pairs = zip(message.tool_calls, arguments, strict=True)
        chat["tool_calls"] = [_call_to_chat(call, its) for call, its in pairs]
    if message.tool_responses:
        chat["tool_responses"] = list(message.tool_responses)
    for key in _TEXT_FIELDS:
        if value := getattr(message, key):
            chat[key] = value
    return chat


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """How a chat template wants to be given messages.

    arguments_as_text: a call's arguments as JSON text, and not as an object. no_content: what the
    content is beside calls, where there is no text. reasoning_key: the key of what was thought; ""
    for the content, between the two texts of `thought`. call_ids: see `with_call_ids`.
    """

    arguments_as_text: bool = False
    no_content: str | None = ""
    call_ids: CallIds = "own"
    reasoning_key: str = "reasoning_content"
    thought: tuple[str, str] = ("", "")


def with_call_ids(chats: list[dict[str, Any]], kind: CallIds) -> list[dict[str, Any]]:
    """Return chats whose calls, and the answers to them, have ids as a template wants them.

    "own": as they are. "short": of nine letters and digits (Mistral's). "named": functions.NAME:0,
    functions.NAME:1, ..., which stands for the name (Kimi's).
    """
    if kind == "own":
        return chats
    ids: defaultdict[str, list[str]] = defaultdict(list)
    number = 0
    changed = []
    for chat in chats:
        calls = []
        for call in chat.get("tool_calls") or ():
            old, name = call.get("id", ""), call["function"]["name"]
            new = _short(old) if kind == "short" else f"functions.{name}:{number}"
            ids[old].append(new)
            calls.append({**call, "id": new})
            number += 1
        answered = chat.get("tool_call_id", "")
        own = {"tool_calls": calls} if calls else {}
        waiting = ids[answered] if chat["role"] == "tool" else []
        # Calls that share an id, or have none, are answered in order.
        new = waiting.pop(0) if len(waiting) > 1 else "".join(waiting)
        answer = {"tool_call_id": new} if new else {}
        changed.append({**chat, **own, **answer})
    return changed


def _short(call_id: str) -> str:
    if len(call_id) == _NUM_SHORT and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_NUM_SHORT]


DEFAULT_FORM = MessageForm()
"""What most templates take."""


def chat_for_template(
    message: Message, form: MessageForm = DEFAULT_FORM, *, as_parts: bool = False
) -> dict[str, Any]:
    """Return the dict a chat template reads, in its form; contents are text or parts."""
    content: Any = message.content
    if not isinstance(content, str):
        texts = [_text_of_part(part, message.role) for part in content]
        content = [{"type": "text", "text": text} for text in texts] if as_parts else "".join(texts)
    calls = message.tool_calls
    # R1's template writes no calls beside a content, be it a thought.
    costs_calls = calls and not content and form.no_content is None
    if message.reasoning and not form.reasoning_key and not costs_calls:
        start, end = form.thought
        content = f"{start}\n{message.reasoning}\n{end}\n\n{content}"
    arguments = [c.arguments_json if form.arguments_as_text else _arguments(c) for c in calls]
    chat = _as_chat(message, content, arguments)
    if calls and not content:
        chat["content"] = form.no_content
    thought = chat.pop("reasoning_content", "")
    return {**chat, form.reasoning_key: thought} if thought and form.reasoning_key else chat


def processor_chat(message: Message) -> dict[str, Any]:
    """Return the dict that a multimodal processor of transformers reads: all contents as parts."""
    content = message.content
    parts = (ContentPart(type="text", text=content),) if isinstance(content, str) else content
    chat = message_to_chat(message)
    chat["content"] = [
        {"type": "text", "text": part.text}
        if part.type == "text"
        else {"type": part.type, **({"url": part.url} if part.url else {"base64": _base64(part)})}
        for part in parts
    ]
    return chat


def _base64(part: ContentPart) -> str:
    if part.data is None:
        raise InvalidHistory(
            f"A part of type {part.type} has neither a url nor data.",
            reason=Reason.FIELD_MISSING,
            remedy="Give url, or data as bytes.",
        )
    return base64.b64encode(part.data).decode()


def tool_for_template(tool: ToolDefinition | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as chat templates and chat APIs know it."""
    if not isinstance(tool, ToolDefinition):
        _expect(tool, Mapping, "tools", "a ToolDefinition or a dict")
        return tool
    try:
        parameters = json.loads(tool.parameters_json)
    except (ValueError, RecursionError):  # too deep, or with a number of too many digits
        raise InvalidHistory(
            f"The parameters of tool {tool.name} are not JSON.",
            reason=Reason.TOOL_INVALID,
            remedy="Give parameters_json as the text of a JSON schema.",
        ) from None
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _expect(value: Any, kind: Any, where: str, expected: str) -> Any:
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    actual = "nothing" if value is None else f"{type(value).__name__} {value!r:.40}"
    raise InvalidHistory(
        f"{where}: expected {expected}, found {actual}.",
        reason=Reason.WRONG_TYPE if value is not None else Reason.FIELD_MISSING,
        remedy=f"Give {expected}.",
    )


def _text(value: Any, where: str) -> str:
    return "" if value is None else str(_expect(value, str, where, "a string"))


@lru_cache(maxsize=256)
def _intended_role(role: str) -> str:
    """Return the usual role that a misspelt one stands for; "" for usual roles and one's own."""
    plain = role.strip().lower()
    if role in _USUAL_ROLES or not plain.isalpha():
        return ""
    return next(iter(get_close_matches(plain, _USUAL_ROLES, n=1, cutoff=0.85)), "")


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    return tuple(_tool_call(call, f"{where}[{i}]") for i, call in enumerate(_items(value, where)))


def _tool_responses(value: Any, where: str) -> tuple[str, ...]:
    return tuple(
        _expect(text, str, f"{where}[{i}]", "a string")
        for i, text in enumerate(_items(value, where))
    )


def _items(value: Any, where: str) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, str):
        _expect(value, list, where, "a list")
    items: Sequence[Any] = _expect(value, Sequence, where, "a list")
    return items


def _content(value: Any, where: str) -> str | tuple[ContentPart, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    _expect(value, Sequence, where, "a string or a list of parts")
    return tuple(_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part(part: Any, where: str) -> ContentPart:
    if isinstance(part, ContentPart):
        return part
    _expect(part, Mapping, where, "a content part with a type")
    kind = _expect(part.get("type"), str, f"{where}.type", "a string")
    if kind == "image_url":
        return _image(_expect(part.get("image_url"), Mapping, f"{where}.image_url", "url"), where)
    if kind == "input_audio":
        audio = _expect(part.get("input_audio"), Mapping, f"{where}.input_audio", "data, format")
        data = _bytes(audio.get("data"), f"{where}.input_audio.data")
        form = _expect(audio.get("format"), str, f"{where}.input_audio.format", "a string")
        return ContentPart(type="audio", data=data, mime_type=f"audio/{form}")
    part = _with_arguments_json(part, where)
    names = {field.name for field in fields(ContentPart)}
    unknown = [key for key in part if key not in names]
    if unknown:
        raise InvalidHistory(
            f"{where} of type {kind} has a field '{unknown[0]}' that a part does not have.",
            reason=Reason.UNKNOWN_FIELD,
            remedy=f"Use one of: {', '.join(sorted(names))}.",
        )
    values = {
        key: _expect(part[key], expected, f"{where}.{key}", f"{expected.__name__}")
        for key, expected in _PART_KINDS.items()
        if part.get(key) is not None
    }
    if part.get("data") is not None:
        values["data"] = _bytes(part["data"], f"{where}.data")
    if kind == "text" and "text" not in values:
        _expect(None, str, f"{where}.text", "a string")
    return ContentPart(type=kind, **values)


def _with_arguments_json(part: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the part with its `function_args`, an object or JSON text, under our name."""
    if "function_args" not in part:
        return part
    if part.get("function_arguments_json") is not None:
        raise InvalidHistory(
            f"{where} has function_args and function_arguments_json.",
            reason=Reason.UNKNOWN_FIELD,
            remedy="Give one of them.",
        )
    arguments = part["function_args"]
    if arguments is not None and not isinstance(arguments, str):
        _expect(arguments, Mapping, f"{where}.function_args", "an object or JSON text")
        arguments = json.dumps(dict(arguments))
    others = {key: value for key, value in part.items() if key != "function_args"}
    return {**others, "function_arguments_json": arguments}


def content_part(**fields: Any) -> ContentPart:
    """Make a part from its fields; `function_args` may be an object."""
    return _part(fields, "content")


def _image(image: Mapping[str, Any], where: str) -> ContentPart:
    if image.get("detail", "auto") != "auto":
        raise InvalidHistory(
            f"{where}.image_url.detail is {image['detail']!r:.40}.",
            reason=Reason.UNKNOWN_FIELD,
            remedy="Leave it out: the model's processor decides it.",
        )
    url = _expect(image.get("url"), str, f"{where}.image_url.url", "a string")
    return ContentPart(type="image", url=url)


def _bytes(value: Any, where: str) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(_expect(value, str, where, "base64 text"), validate=True)
    except binascii.Error:
        raise InvalidHistory(
            f"{where}: expected base64 text.", reason=Reason.WRONG_TYPE, remedy="Encode the bytes."
        ) from None


def _part_to_chat(part: ContentPart) -> dict[str, Any]:
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    values = {key: value for key, value in values.items() if value is not None}
    if part.type == "image" and values.keys() == {"type", "url"}:
        return {"type": "image_url", "image_url": {"url": part.url}}
    if part.data is None:
        return values
    values["data"] = base64.b64encode(part.data).decode()
    kind, _, form = (part.mime_type or "").partition("/")
    if part.type == kind == "audio" and values.keys() == {"type", "data", "mime_type"}:
        return {"type": "input_audio", "input_audio": {"data": values["data"], "format": form}}
    return values


def _text_of_part(part: ContentPart, role: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    raise Unsupported(
        f"The {role} message has a part of type {part.type}.",
        reason=Reason.PARTS_UNSUPPORTED,
        remedy="Send text, or give apply_chat_template the model's processor (AutoProcessor) in "
        "place of a tokenizer.",
    )


def _tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    _expect(call, Mapping, where, "a tool call with a function")
    function = call.get("function", call)
    _expect(function, Mapping, f"{where}.function", "name and arguments")
    name = _expect(function.get("name"), str, f"{where}.function.name", "a string")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        _expect(arguments, Mapping, f"{where}.function.arguments", "JSON text or a dict")
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=name, arguments_json=arguments, id=_text(call.get("id"), f"{where}.id"))


def _call_to_chat(call: ToolCall, arguments: Any) -> dict[str, Any]:
    chat = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **chat} if call.id else chat


def _arguments(call: ToolCall) -> Any:
    """Return the object in the JSON text; a text without one stays as the model wrote it."""
    try:
        value = json.loads(call.arguments_json)
        if "\\u" in call.arguments_json:  # half a character is no text, and has no tokens
            plain = _HALVES.sub("\ufffd", json.dumps(value, ensure_ascii=False))
            value = json.loads(plain)
    except (ValueError, RecursionError):  # too deep, or with a number of too many digits
        return call.arguments_json
    return value if isinstance(value, dict) else call.arguments_json
