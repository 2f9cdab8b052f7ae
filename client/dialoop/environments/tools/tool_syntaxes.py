r"""The ways in which a policy writes down tool calls with arguments.

BlockCalls     <tool>search\n{"query": "owls"}</tool>
XmlCalls       <tool name="search" tag="a">{"query": "owls"}</tool>
JsonCalls      {"message": "I look.", "tools": [{"tool": "search", "args": {"query": "owls"}}]}
NativeCalls    Message.tool_calls, or <tool_call>{"name": "search", "arguments": {...}}</tool_call>

Each finds the calls of one message, in order of appearance. A call that cannot be read is found too
and carries why: it is answered, never raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dialoop.chat import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCall:
    """AskedCall(name="search", arguments={"query": "owls"}); `problem` says what is wrong."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    problem: str = ""


class ToolSyntax(Protocol):
    """Finds the calls in a policy's message."""

    def calls(self, message: Message) -> list[AskedCall]:
        """All calls, in order; none when the message has none."""
        ...


@dataclass(frozen=True, slots=True)
class BlockCalls:
    """The name on the first line of a block, JSON arguments below it."""

    tag: str = "tool"

    def calls(self, message: Message) -> list[AskedCall]:
        """One per block."""
        tag = re.escape(self.tag)
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", message.text, re.DOTALL)
        return [_block(span) for span in found]


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """The name in an attribute, and perhaps a `tag` that comes back with the answer.

    Text that is no JSON becomes the one argument `raw`.
    """

    tag: str = "tool"

    def calls(self, message: Message) -> list[AskedCall]:
        """One per element."""
        tag = re.escape(self.tag)
        pattern = rf"<{tag}\s+([^>]*?)>(.*?)</{tag}>"
        return [_element(*found) for found in re.findall(pattern, message.text, re.DOTALL)]


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """The whole message is one JSON object with a list `tools`."""

    def calls(self, message: Message) -> list[AskedCall]:
        """One per entry of `tools`; none when the message is no such object."""
        try:
            said = json.loads(message.text)
        except (ValueError, RecursionError):
            return []
        entries = said.get("tools") if isinstance(said, dict) else None
        return [_entry(entry) for entry in entries] if isinstance(entries, list) else []


@dataclass(frozen=True, slots=True)
class NativeCalls:
    """A chat model's own calls: parsed by the engine, or in the tags of its template."""

    tag: str = "tool_call"

    def calls(self, message: Message) -> list[AskedCall]:
        """The message's tool_calls if it has any, else those in its text."""
        if message.tool_calls:
            return [_read(c.name, c.arguments_json or "{}", c.id) for c in message.tool_calls]
        tag = re.escape(self.tag)
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", message.text, re.DOTALL)
        return [_object(span) for span in found]


def _block(span: str) -> AskedCall:
    name, _, arguments = span.strip().partition("\n")
    return _read(name.strip(), arguments.strip() or "{}")


def _element(attributes: str, body: str) -> AskedCall:
    given = dict(re.findall(r"""(\w+)\s*=\s*["']([^"']*)["']""", attributes))
    name, tag = given.get("name", ""), given.get("tag", "")
    asked = _read(name, body.strip() or "{}", tag)
    if asked.problem and name:
        return AskedCall(name=name, arguments={"raw": body.strip()}, id=tag)
    return asked


def _object(span: str) -> AskedCall:
    try:
        said = json.loads(span)
    except (ValueError, RecursionError):
        return AskedCall(name="", problem="the call is no JSON.")
    return _entry(said)


def _entry(said: Any) -> AskedCall:
    if not isinstance(said, dict):
        return AskedCall(name="", problem="a call must be a JSON object.")
    name = said.get("name", said.get("tool", ""))
    arguments = said.get("arguments", said.get("args", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
        return _read(str(name), arguments, str(said.get("tag", said.get("id", ""))))
    return _asked(str(name), arguments, str(said.get("tag", said.get("id", ""))))


def _read(name: str, text: str, call_id: str = "") -> AskedCall:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return AskedCall(name=name, id=call_id, problem="the arguments are no JSON.")
    return _asked(name, arguments, call_id)


def _asked(name: str, arguments: Any, call_id: str) -> AskedCall:
    if not name:
        return AskedCall(name="", id=call_id, problem="the call names no tool.")
    if not isinstance(arguments, dict):
        return AskedCall(name=name, id=call_id, problem="the arguments must be a JSON object.")
    return AskedCall(name=name, arguments=arguments, id=call_id)
