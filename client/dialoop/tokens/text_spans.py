"""Where the contents of messages lie in a rendered conversation.

    <|im_start|>tool | 7        | <|im_end|><|im_start|>assistant
    TEMPLATE         | TOOL, 2  | TEMPLATE

Contents are found by rendering once more with unique marks in their place, never by searching for
what they say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from dialoop.chat import History, Message
from dialoop.errors import DialoopError
from dialoop.sequences import Source

# Noncharacters: no text that is meant for interchange holds them.
_MARK = "\ufdd4{}\ufdd5"
ANCHOR = "\ufdd4anchor\ufdd5"
"""Stands for a content whose surroundings the caller wants."""


class Render(Protocol):
    """A template with its options."""

    def __call__(self, history: History, *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of rendered text, and who wrote it.

    char_start: where in its message's content it begins; None when it shows the content otherwise.
    is_literal: what looks like a special token in it is only text.
    """

    text: str
    source: Source
    message_index: int | None = None
    char_start: int | None = None
    is_literal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A text of a message, and the mark in its place."""

    index: int
    char_start: int
    text: str
    mark: str


def cut(
    text: str, history: History, start: int, render: Render, *, source: Source | None = None
) -> tuple[Piece, ...] | None:
    """Cut the text that follows the content of message `start - 1` (0: all the text).

    A content's source is `source`, or by default its role's. None when the template does more with
    contents than to show some part of them.
    """
    # The last messages alone mostly render to the same text, and cheaper; `_fit` checks that.
    for first in dict.fromkeys((max(0, start - 2), 0)):
        marked = _render_marked(history, first, start, render)
        pieces = None if marked is None else _fit(text, history, *marked, source)
        if pieces is not None:
            return pieces
    return None


def uncut(
    text: str, history: History, start: int, *, source: Source | None = None
) -> tuple[Piece, ...]:
    """Return the text as one piece, of whoever wrote the first message in it."""
    owner = source or (source_of(history[start]) if start < len(history) else Source.TEMPLATE)
    return (Piece(text=text, source=owner),)


def after(pieces: Iterable[Piece], num_chars: int) -> Iterator[Piece]:
    """Yield the pieces without their first `num_chars` characters."""
    for piece in pieces:
        num_dropped = min(num_chars, len(piece.text))
        num_chars -= num_dropped
        start = None if piece.char_start is None else piece.char_start + num_dropped
        yield (
            replace(piece, text=piece.text[num_dropped:], char_start=start)
            if num_dropped
            else piece
        )


def closing(history: History, render: Render) -> str | None:
    """Return what the template writes after an assistant's message that answers `history`."""
    answered = history.append(Message(role="assistant", content=ANCHOR))
    try:
        _, _, text = render(answered, add_generation_prompt=False).rpartition(ANCHOR)
    except DialoopError:
        return None
    return text


def source_of(message: Message) -> Source:
    """Return who writes messages of this role during an episode."""
    return Source.TOOL if message.role == "tool" else Source.ENVIRONMENT


def _render_marked(
    history: History, first: int, start: int, render: Render
) -> tuple[list[str], list[_Slot]] | None:
    """Return the template's text around the contents after message `start - 1`, and those."""
    messages = list(history[first:])
    if start:
        messages[start - 1 - first] = Message(role=history[start - 1].role, content=ANCHOR)
    slots: list[_Slot] = []
    for index in range(start, len(history)):
        message_slots = list(_slots(history[index], index))
        messages[index - first] = _replace_texts(
            history[index], [slot.mark for slot in message_slots]
        )
        slots += message_slots
    try:
        rest = render(History(tuple(messages)))
    except DialoopError:
        return None
    if start:
        if rest.count(ANCHOR) != 1:
            return None
        rest = rest.partition(ANCHOR)[2]
    glues: list[str] = []
    shown: list[_Slot] = []
    for slot in slots:
        glue, mark, after_mark = rest.partition(slot.mark)
        if mark:
            glues.append(glue)
            shown.append(slot)
            rest = after_mark
    return [*glues, rest], shown


def _slots(message: Message, index: int) -> Iterator[_Slot]:
    if isinstance(message.content, str):
        texts = [message.content]
    else:
        texts = [part.text or "" for part in message.content]
    position = 0
    for number, text in enumerate(texts):
        if text:
            mark = _MARK.format(f"{index}.{number}")
            yield _Slot(index=index, char_start=position, text=text, mark=mark)
        position += len(text)


def _replace_texts(message: Message, marks: list[str]) -> Message:
    """Return the message with marks in the place of its texts."""
    if isinstance(message.content, str):
        return replace(message, content=marks[0]) if marks else message
    left = iter(marks)
    parts = tuple(replace(p, text=next(left)) if p.text else p for p in message.content)
    return replace(message, content=parts)


def _fit(
    text: str, history: History, glues: list[str], slots: list[_Slot], source: Source | None
) -> tuple[Piece, ...] | None:
    """Cut the text where the template's own text ends; return None where that does not add up."""
    if not text.startswith(glues[0]):
        return None
    pieces = [Piece(text=glues[0], source=Source.TEMPLATE)]
    position = len(glues[0])
    for number, slot in enumerate(slots):
        glue, is_last = glues[number + 1], number + 1 == len(slots)
        end = _end_of(text, position, slot.text, glue, is_last)
        shown = text[position : max(end, 0)]
        start = slot.text.find(shown)
        if end < position or (start < 0 and shown != _escape(slot.text)):
            return None
        pieces.append(
            Piece(
                text=shown,
                source=source or source_of(history[slot.index]),
                message_index=slot.index,
                char_start=None if start < 0 else slot.char_start + start,
            )
        )
        pieces.append(Piece(text=glue, source=Source.TEMPLATE))
        position = end + len(glue)
    return tuple(_join(pieces)) if position == len(text) else None


def _join(pieces: list[Piece]) -> list[Piece]:
    """Drop empty pieces, and join parts of one content that touch."""
    joined: list[Piece] = []
    for piece in (piece for piece in pieces if piece.text):
        last = joined[-1] if joined else None
        if last is not None and _touch(last, piece):
            joined[-1] = replace(last, text=last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def _touch(first: Piece, second: Piece) -> bool:
    if first.message_index is None or first.char_start is None:
        return False
    end = first.char_start + len(first.text)
    return (first.message_index, end) == (second.message_index, second.char_start)


def _end_of(text: str, position: int, content: str, glue: str, is_last: bool) -> int:
    """Return where the shown content ends and the template's text goes on; -1 where it does not."""
    if text.startswith(content + glue, position):
        return position + len(content)
    if is_last:
        return len(text) - len(glue) if text.endswith(glue) else -1
    return text.find(glue, position)


def _escape(content: str) -> str:
    """Return the content as templates show a tool's text in JSON."""
    return json.dumps(content, ensure_ascii=False)[1:-1]
