r"""The ways in which a policy writes tool calls with arguments.

BlockCalls     <tool>search\n{"query": "owls"}</tool>
XmlCalls       <tool name="search" tag="a">{"query": "owls"}</tool>
JsonCalls      {"message": "I look.", "tools": [{"tool": "search", "args": {"query": "owls"}}]}
NativeCalls    Message.tool_calls, or what the model's family writes, as
               <tool_call>{"name": "search", "arguments": {"query": "owls"}}</tool_call>

Each returns the calls of one message in order of appearance. A call that cannot be read is among
them with its `problem`, so that the policy gets an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dialoop.answers import GRAMMARS, AnswerForm, WrittenCall, read_text
from dialoop.chat import Message, ToolDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """ParsedCall(name="search", arguments={"query": "owls"}); `problem` says what is wrong."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    problem: str = ""


class ToolSyntax(Protocol):
    """Finds the calls in a policy's message.

    It may have `write(name, arguments_json)`, which returns a call as a text; `dialoop env check`
    calls the tools so, and by `Message.tool_calls` without it.
    """

    def calls(self, message: Message) -> list[ParsedCall]:
        """Return all calls of the message, in order."""


@dataclass(frozen=True, slots=True)
class BlockCalls:
    """Calls with the name on the first line of a block and JSON arguments below it."""

    tag: str = "tool"

    def calls(self, message: Message) -> list[ParsedCall]:
        """Return one call per block."""
        tag = re.escape(self.tag)
        spans = re.findall(rf"<{tag}>(.*?)</{tag}>", message.text, re.DOTALL)
        return [_block(span) for span in spans]

    def write(self, name: str, arguments_json: str) -> str:
        """Return a call as a text."""
        return f"<{self.tag}>{name}\n{arguments_json}</{self.tag}>"


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Calls with the name in an attribute, and perhaps a `tag` that the answer repeats.

    Text that is not JSON becomes the only argument, `raw`.
    """

    tag: str = "tool"

    def calls(self, message: Message) -> list[ParsedCall]:
        """Return one call per element."""
        tag = re.escape(self.tag)
        pattern = rf"<{tag}\s+([^>]*?)>(.*?)</{tag}>"
        elements = re.findall(pattern, message.text, re.DOTALL)
        return [_element(attributes, body) for attributes, body in elements]

    def write(self, name: str, arguments_json: str) -> str:
        """Return a call as a text."""
        return f'<{self.tag} name="{name}">{arguments_json}</{self.tag}>'


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls in the list `tools` of a message that is one JSON object."""

    def calls(self, message: Message) -> list[ParsedCall]:
        """Return one call per entry of `tools`; none when the message is not such an object."""
        try:
            content = json.loads(message.text)
        except (ValueError, RecursionError):
            return []
        entries = content.get("tools") if isinstance(content, dict) else None
        return [_entry(entry) for entry in entries] if isinstance(entries, list) else []

    def write(self, name: str, arguments_json: str) -> str:
        """Return a call as a text."""
        return json.dumps({"tools": [{"name": name, "arguments": json.loads(arguments_json)}]})


_LENIENT = AnswerForm(reasoning=("<think>", "</think>"), calls="hermes", is_lenient=True)


@dataclass(frozen=True, slots=True)
class NativeCalls:
    """A chat model's native calls, parsed by the engine or in the form of its template.

    form: how the model writes its answers; a call in a thought is none. Without it an environment
    of a job reads them as the job's model writes them, and one without a model as Hermes does.
    tools: their schemas give arguments a type where the form writes them as plain text.
    """

    form: AnswerForm | None = None
    tools: tuple[ToolDefinition, ...] = ()

    def calls(self, message: Message) -> list[ParsedCall]:
        """Return the message's tool_calls if it has any, else the calls in its text."""
        if message.tool_calls:
            return [_read(c.name, c.arguments_json or "{}", c.id) for c in message.tool_calls]
        form, text = self.form or _LENIENT, message.text
        if form.reasoning is not None:
            start, end = form.reasoning
            thought, mark, _ = text.partition(end)
            # A mark within a call ends no thought that the prompt began.
            begun = bool(mark) and start not in thought and not _is_in_call(thought, form.calls)
            form = replace(form, starts_in_reasoning=begun)
        return [_parsed(call) for call in read_text(text, form, self.tools).calls]


def bound_to(syntax: ToolSyntax, form: AnswerForm) -> ToolSyntax:
    """Return native calls without a form of their own in this one, and others as they are."""
    if not isinstance(syntax, NativeCalls) or syntax.form is not None:
        return syntax
    reasoning = form.reasoning or _LENIENT.reasoning
    return replace(syntax, form=replace(form, reasoning=reasoning, is_lenient=True))


def _is_in_call(text: str, grammar: str) -> bool:
    """Return whether the text ends within a call: it opens more of them than it closes."""
    shapes = [shape for shape in GRAMMARS[grammar].shapes if shape.closings]
    openings = {mark.strip() for shape in shapes for mark in shape.openings}
    closings = {mark.strip() for shape in shapes for mark in shape.closings}
    return sum(map(text.count, openings)) > sum(map(text.count, closings))


def _parsed(call: WrittenCall) -> ParsedCall:
    if call.problem:
        return ParsedCall(name=call.name, id=call.id, problem=call.problem)
    return _read(call.name, call.arguments_json, call.id)


def _block(span: str) -> ParsedCall:
    name, _, arguments = span.strip().partition("\n")
    return _read(name.strip(), arguments.strip() or "{}")


def _element(attributes: str, body: str) -> ParsedCall:
    values = dict(re.findall(r"""(\w+)\s*=\s*["']([^"']*)["']""", attributes))
    name, tag = values.get("name", ""), values.get("tag", "")
    call = _read(name, body.strip() or "{}", tag)
    if call.problem and name:
        return ParsedCall(name=name, arguments={"raw": body.strip()}, id=tag)
    return call


def _entry(entry: Any) -> ParsedCall:
    if not isinstance(entry, dict):
        return ParsedCall(name="", problem="a call must be a JSON object.")
    name = entry.get("name", entry.get("tool", ""))
    arguments = entry.get("arguments", entry.get("args", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
        return _read(str(name), arguments, str(entry.get("tag", entry.get("id", ""))))
    return _call(str(name), arguments, str(entry.get("tag", entry.get("id", ""))))


def _read(name: str, text: str, call_id: str = "") -> ParsedCall:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return ParsedCall(name=name, id=call_id, problem="the arguments are not JSON.")
    return _call(name, arguments, call_id)


def _call(name: str, arguments: Any, call_id: str) -> ParsedCall:
    if not name:
        return ParsedCall(name="", id=call_id, problem="the call names no tool.")
    if not isinstance(arguments, dict):
        return ParsedCall(name=name, id=call_id, problem="the arguments must be a JSON object.")
    return ParsedCall(name=name, arguments=arguments, id=call_id)
