"""Text of messages that looks like special tokens, kept from becoming special tokens."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.chat import History, Message
from dialoop.errors import DialoopError, Unsupported
from dialoop.reasons import Reason
from dialoop.tokens.text_spans import Piece, Render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dialoop.sequences import Source
    from dialoop.tokens.tokenizer import Tokenizer

# Noncharacters: no text that is meant for interchange holds them.
_MARK = re.compile("\ufdd6([0-9]+)\ufdd7")


def spells_special(history: History, tokenizer: Tokenizer) -> bool:
    """Return whether any text of these messages looks like a special token."""
    return any(tokenizer.spells_special(text) for message in history for text in _texts(message))


def only_in_contents(history: History, tokenizer: Tokenizer) -> bool:
    """Return whether no text but the messages' contents looks like a special token."""
    bare = History(tuple(replace(message, content="") for message in history))
    return not spells_special(bare, tokenizer)


def mark_literal_contents(pieces: tuple[Piece, ...], tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """Return the same pieces; contents that look like a special token become literal."""
    return tuple(
        replace(p, is_literal=p.message_index is not None and tokenizer.spells_special(p.text))
        for p in pieces
    )


def pieces_with_literals(
    whole: str, history: History, render: Render, tokenizer: Tokenizer, source: Source
) -> tuple[Piece, ...]:
    """Cut the rendered text into pieces; special tokens that messages spell become literal.

    Raises Unsupported (TEMPLATE_UNSUPPORTED) when the template does more with it than to show it.
    """
    spelled: list[str] = []

    def safe(text: str) -> str:
        for start, end in reversed(tokenizer.special_spans(text)):
            spelled.append(text[start:end])
            text = f"{text[:start]}\ufdd6{len(spelled) - 1}\ufdd7{text[end:]}"
        return text

    marked = History(tuple(_map_texts(message, safe) for message in history))
    try:
        parts = _MARK.split(render(marked))
    except DialoopError:
        parts = []
    texts = [_text_at(spelled, int(p)) if i % 2 else p for i, p in enumerate(parts)]
    if "".join(texts) != whole:
        raise Unsupported(
            "A message spells a special token, and this template does more than show it.",
            reason=Reason.TEMPLATE_UNSUPPORTED,
            remedy="Leave the special token's text out of the message.",
        )
    return tuple(
        Piece(text=text, source=source, is_literal=i % 2 == 1) for i, text in enumerate(texts)
    )


def _text_at(spelled: list[str], number: int) -> str:
    return spelled[number] if number < len(spelled) else ""


def _texts(message: Message) -> Iterator[str]:
    """Yield every text of a message that a template may show."""
    seen: list[str] = []

    def keep(text: str) -> str:
        seen.append(text)
        return text

    _map_texts(message, keep)
    yield from seen


def _map_texts(message: Message, change: Callable[[str], str]) -> Message:
    content = message.content
    if not isinstance(content, str):
        content = tuple(replace(p, text=change(p.text)) if p.text else p for p in content)
    return replace(
        message,
        role=change(message.role),
        content=change(content) if isinstance(content, str) else content,
        reasoning=change(message.reasoning),
        name=change(message.name),
        tool_call_id=change(message.tool_call_id),
        tool_responses=tuple(change(text) for text in message.tool_responses),
        tool_calls=tuple(
            replace(
                call,
                name=change(call.name),
                id=change(call.id),
                arguments_json=change(_unescape(call.arguments_json)),
            )
            for call in message.tool_calls
        ),
    )


def _unescape(arguments_json: str) -> str:
    """Return arguments without escapes that hide what they spell, as templates show them."""
    if "\\u" not in arguments_json:
        return arguments_json
    try:
        return json.dumps(json.loads(arguments_json), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments_json
