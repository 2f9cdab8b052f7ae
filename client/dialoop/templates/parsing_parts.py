"""What stands inside a message's text: reasoning, tool calls, tool responses."""

from __future__ import annotations

import json

from dialoop.chat import ToolCall


def split_reasoning(content: str, start: str, end: str) -> tuple[str, str]:
    """Reasoning and the content after it; no reasoning where the two marks are not there."""
    if not content.startswith(start):
        return "", content
    reasoning, found, rest = content[len(start) :].partition(end)
    return (reasoning, rest) if found and reasoning else ("", content)


def split_calls(content: str, start: str, end: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The content and the tool calls that end it; what is no call of a tool stays content."""
    calls: list[ToolCall] = []
    while content.endswith(end):
        begin = content.rfind(start)
        call = None if begin < 0 else _call(content[begin + len(start) : -len(end)])
        if call is None:
            break
        calls.insert(0, call)
        content = content[:begin]
    return content, tuple(calls)


def split_responses(content: str, start: str, end: str) -> tuple[str, ...] | None:
    """The answers of tools that the content consists of; None when it is something else."""
    if not content.startswith(start):
        return None
    return tuple(content[len(start) :].removesuffix(end).split(end + start))


def _call(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        return None
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return ToolCall(name=name, arguments_json=arguments)
    prefix = f'{{"name": "{name}", "arguments": '
    written = text[len(prefix) : -1] if text.startswith(prefix) and text.endswith("}") else ""
    return ToolCall(name=name, arguments_json=written or json.dumps(arguments, ensure_ascii=False))
