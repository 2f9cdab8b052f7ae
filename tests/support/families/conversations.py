"""Random conversations of a seed, with what a family's template can show.

`conversation_of(family, seed)` gives messages and tools, the same for the same seed; `chats_for`
writes them as the dicts that the family's template wants from transformers.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dialoop.chat import Message, ToolCall, ToolDefinition
from dialoop.messages import with_call_ids

from tests.support.families import Family, Reads

_PIECES = (
    *("What is 3+4?", "the result is 7.", "a", "  two spaces", "tab\there", "line\nbreak", "\n\n"),
    *(
        "Grüße, 世界 👩‍💻",
        "e\u0301 and é",
        "ﬁ ½",
        '{"a": [1, 2]}',
        "{{ x }}",
        "{% if %}",
        "<b>&amp;",
    ),
    *(
        'it\'s "quoted"',
        "back\\slash",
        "```json\n{}\n```",
        "]}",
        "[f(a=1)]",
        "None",
        "1e-7",
        "x" * 40,
    ),
)
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</s", "<|im")
_NAMES = ("search", "get_weather", "run2", "fetch_url")
_KEYS = ("city", "n", "options", "naïve", "q", "deep")
_SCALARS = (0, -3, 10**12, 2.5, 1e-7, True, False, None, "")
_ID = string.ascii_letters + string.digits
_ID_LENGTH = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, and the tools on offer; None where there are none."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] | None


def conversation_of(family: Family, seed: int) -> Conversation:
    """Return one to three questions, each with up to two rounds of calls, cut at a random end."""
    pick = random.Random(f"{family.name} {seed}")
    texts = _Texts(pick, family.tags)
    has_calls = family.reads.calls and pick.random() < 0.6
    has_tools = family.reads.tools and (has_calls or pick.random() < 0.3)
    messages: list[Message] = []
    if pick.random() < 0.5:
        messages.append(Message(role="system", content=texts.some()))
    first = len(messages)
    for _ in range(pick.randint(1, 3)):
        messages += _question(pick, texts)
        for _ in range(pick.randint(0, 2) if has_calls else 0):
            messages += _round_of_calls(pick, texts, family.reads)
        if pick.random() < 0.95:
            messages.append(_answer(pick, texts))
    end = pick.randint(first + 1, len(messages)) if pick.random() < 0.5 else len(messages)
    tools = tuple(_tool(pick, name) for name in _NAMES[: pick.randint(1, 3)])
    return Conversation(messages=tuple(messages[:end]), tools=tools if has_tools else None)


class _Texts:
    """Texts of pieces, among them tags of templates that are not the family's special tokens."""

    def __init__(self, pick: random.Random, tags: Iterable[str]) -> None:
        self._pick = pick
        self._tags = (*_TAGS, *tags)

    def some(self) -> str:
        """Return a text that is not empty; blanks may begin and end it."""
        pieces = self._pick.choices(_PIECES, k=self._pick.randint(1, 4))
        if self._pick.random() < 0.15:
            pieces.insert(self._pick.randrange(len(pieces) + 1), self._pick.choice(self._tags))
        return self._pick.choice((" ", "", "\n")).join(pieces)

    def maybe(self, chance: float) -> str:
        """Return a text, or an empty one."""
        return self.some() if self._pick.random() < chance else ""


def _question(pick: random.Random, texts: _Texts) -> list[Message]:
    """Return a user's message; now and then two, which some templates refuse."""
    num = 2 if pick.random() < 0.05 else 1
    return [Message(role="user", content=texts.maybe(0.97)) for _ in range(num)]


def _answer(pick: random.Random, texts: _Texts) -> Message:
    return Message(role="assistant", content=texts.maybe(0.95), reasoning=texts.maybe(0.4))


def _round_of_calls(pick: random.Random, texts: _Texts, reads: Reads) -> list[Message]:
    num = pick.choice((1, 1, 1, 2, 3)) if reads.parallel else 1
    calls = tuple(
        ToolCall(
            name=pick.choice(_NAMES),
            arguments_json=json.dumps(
                _object(pick, texts, depth=2), ensure_ascii=pick.random() < 0.5
            ),
            id="".join(pick.choices(_ID, k=_ID_LENGTH)),
        )
        for _ in range(num)
    )
    said = Message(
        role="assistant",
        content=texts.maybe(0.4),
        reasoning=texts.maybe(0.4),
        tool_calls=calls,
    )
    names = pick.random() < 0.3
    answers = [
        Message(
            role="tool",
            content=texts.maybe(0.95),
            tool_call_id=call.id,
            name=call.name if names else "",
        )
        for call in calls
    ]
    return [said, *answers]


def _object(pick: random.Random, texts: _Texts, depth: int) -> dict[str, Any]:
    keys = pick.sample(_KEYS, pick.choice((0, 1, 1, 2, 3)))
    return {key: _value(pick, texts, depth) for key in keys}


def _value(pick: random.Random, texts: _Texts, depth: int) -> Any:
    kind = pick.choice(
        ("text", "text", "scalar", "list", "object") if depth else ("text", "scalar")
    )
    if kind == "text":
        return texts.some()
    if kind == "scalar":
        return pick.choice(_SCALARS)
    if kind == "list":
        return [_value(pick, texts, depth - 1) for _ in range(pick.randint(0, 3))]
    return _object(pick, texts, depth - 1)


def _tool(pick: random.Random, name: str) -> ToolDefinition:
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string", "description": 'Größe, e.g. "7"'},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "integer"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "properties": {"x": {"type": "number"}}},
    )
    keys = pick.sample(("city", "n", "options", "q"), pick.randint(0, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {k: pick.choice(kinds) for k in keys}}
    if keys and pick.random() < 0.7:
        schema["required"] = keys[:1]
    description = pick.choice(("Look it up.", "Zählt: 世界", 'Has "quotes"'))
    return ToolDefinition(name=name, description=description, parameters_json=json.dumps(schema))


def chats_for(messages: Iterable[Message], reads: Reads) -> list[dict[str, Any]]:
    """Return the dicts in the form that the template reads."""
    return with_call_ids([_chat(message, reads) for message in messages], reads.call_ids)


def _chat(message: Message, reads: Reads) -> dict[str, Any]:
    content: Any = message.content
    if message.tool_calls and not content:
        content = reads.content_of_calls
    chat: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning and reads.reasoning == "content":
        if content is not None:  # else a thought would cost the calls
            chat["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{content}"
    elif message.reasoning and reads.reasoning:
        chat[reads.reasoning] = message.reasoning
    if message.tool_calls:
        chat["tool_calls"] = [_call(call, reads) for call in message.tool_calls]
    for key in ("tool_call_id", "name"):
        if value := getattr(message, key):
            chat[key] = value
    return chat


def _call(call: ToolCall, reads: Reads) -> dict[str, Any]:
    text = call.arguments_json
    function = {
        "name": call.name,
        "arguments": text if reads.arguments == "text" else json.loads(text),
    }
    return {"id": call.id, "type": "function", "function": function}


def tool_dict(tool: ToolDefinition) -> dict[str, Any]:
    """Return a tool as chat APIs write it."""
    parameters = json.loads(tool.parameters_json)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
