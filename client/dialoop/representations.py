"""Messages and records as one line, as coloured text and as HTML, for consoles and notebooks.

cut("What is 3+4, and why?", 12)      # "What is 3..."
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"(?:^|[._-])(?:token|secret|pass(?:word|wd|phrase)?|credentials?|authorization|"
    r"(?:(?:api|access|secret|private|auth)[_-]?)key)$",
    re.IGNORECASE,
)
_USER_OF_ADDRESS = re.compile(r"(?<=[a-z]:)//[^/@\s]+@")
_LENGTH = 60
_MOST = 6
_COLOURS = {"assistant": "green", "tool": "magenta", "system": "cyan"}


def cut(text: str, length: int = _LENGTH) -> str:
    """Return at most `length` characters, the last three of them dots if the text was longer."""
    if len(text) <= length:
        return text
    return text[: length - 3] + "..." if length > 3 else text[:length]


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which HIDDEN replaces each text whose key says that it is a secret.

    So it does for what addresses hold of a name and a password.

    without_secrets({"options": {"api_key": "k", "url": "http://me:k@host"}})
    # {"options": {"api_key": "(hidden)", "url": "http://(hidden)@host"}}
    """
    return {key: _without_secrets(value, key) for key, value in values.items()}


def _without_secrets(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_without_secrets(item, key) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if _SECRET.search(key) else _USER_OF_ADDRESS.sub(f"//{HIDDEN}@", value)


def fields_line(name: str, fields: Mapping[str, Any]) -> str:
    """Return `Name(field=value, ...)` on one line, with long texts cut."""
    texts = (f"{key}={cut(repr(value))}" for key, value in fields.items())
    return f"{name}({', '.join(texts)})"


def messages_line(messages: Iterable[Any]) -> str:
    """Return "user 'What is 3+4?', assistant '7'", without the middle of a long conversation."""
    lines = [f"{message.role} {cut(content_of(message), 40)!r}" for message in messages]
    if len(lines) > _MOST:
        lines[_MOST // 2 : -_MOST // 2] = [f"... {len(lines) - _MOST} more ..."]
    return ", ".join(lines)


def content_of(message: Any) -> str:
    """Return a message's text, with its calls and what is not text by name."""
    content = message.content
    parts = [content] if isinstance(content, str) else [p.text or f"<{p.type}>" for p in content]
    parts += [f"<call {call.name}({call.arguments_json})>" for call in message.tool_calls]
    return "".join([*parts, *message.tool_responses])


def messages_text(messages: Iterable[Any]) -> Any:
    """Return the messages as rich.text.Text, a line each, coloured by role."""
    from rich.text import Text

    text = Text()
    for message in messages:
        text.append(f"{message.role}: ", style="dim")
        text.append(f"{content_of(message)}\n", style=_COLOURS.get(message.role, "blue"))
    return text


def messages_html(messages: Iterable[Any]) -> str:
    """Return the messages as an HTML table of roles and contents."""
    rows = (
        f'<tr><td style="text-align:left;vertical-align:top"><b>{escape(message.role)}</b></td>'
        f'<td style="text-align:left;white-space:pre-wrap">{escape(content_of(message))}</td></tr>'
        for message in messages
    )
    return f"<table>{''.join(rows)}</table>"


def record_html(line: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a record's line above a table of its parts."""
    cells = (
        "<tr>" + "".join(f'<td style="text-align:left">{escape(c)}</td>' for c in row) + "</tr>"
        for row in rows
    )
    return f"<p>{escape(line)}</p><table>{''.join(cells)}</table>"
