"""Where a template writes each text of each message: content, reasoning, calls, names, answers.

    places = find_places(template, history, text)
    [text[p.start : p.end] for p in places if p.slot.field == "reasoning"]

The conversation is rendered once more with a mark for each text. What stands between the marks is
the template's own, and the text is cut where that stands in it. A text is never searched for what
it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dialoop.messages import Message, ToolCall
    from dialoop.templates.chat_template import ChatTemplate

# Noncharacters: no text that is meant for interchange holds them, and no tokenizer's vocabulary.
_MARK = "\ufdd0{}\ufdd1"
_MARKS = re.compile("\ufdd0([0-9]+)\ufdd1")
# How a template shows a text: as it is, trimmed, or within JSON.
_SHAPES: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A text of a message.

    field: content, reasoning, name, tool_call_id, tool_responses, call.name, call.id or
    call.arguments. char_start: where in the field it begins.
    """

    index: int
    field: str
    text: str
    char_start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a text stands, as a half-open range of characters; `is_first` of several places."""

    slot: Slot
    start: int
    end: int
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """What a template writes around texts: glue, slot, glue, ..., glue."""

    glues: tuple[str, ...]
    slots: tuple[Slot, ...]


def skeleton_of(
    template: ChatTemplate, history: Sequence[Message], **options: Any
) -> Skeleton | None:
    """Render marks in the place of the messages' texts; None where the template refuses them."""
    slots: list[Slot] = []
    thought = template.form.thought
    marked = [_marked(message, index, slots, thought) for index, message in enumerate(history)]
    try:
        parts = _MARKS.split(template.render(marked, **options))
    except DialoopError:
        return None
    numbers = [int(number) for number in parts[1::2]]
    return Skeleton(glues=tuple(parts[::2]), slots=tuple(slots[number] for number in numbers))


def find_places(
    template: ChatTemplate, history: Sequence[Message], text: str, **options: Any
) -> tuple[Place, ...] | None:
    """Return where the texts stand in `text`, which is `history` rendered with `options`.

    None where the template does more with them than to show, trim or leave out.
    """
    skeleton = skeleton_of(template, history, **options)
    return None if skeleton is None else fit(skeleton, text)


def fit(skeleton: Skeleton, text: str) -> tuple[Place, ...] | None:
    """Return where the slots stand in the text; None where the text is not glue, slot, glue, ..."""
    glues, position = skeleton.glues, len(skeleton.glues[0])
    if not text.startswith(glues[0]):
        return None
    places: list[Place] = []
    seen: set[int] = set()
    for slot, glue in zip(skeleton.slots, glues[1:], strict=True):
        is_last = len(places) + 1 == len(skeleton.slots)
        for shape in dict.fromkeys(make(slot.text) for make in _SHAPES):
            end = position + len(shape)
            is_here = text.startswith(shape + glue, position)
            if is_here and (not is_last or end + len(glue) == len(text)):
                break
        else:
            return None
        is_first = id(slot) not in seen
        seen.add(id(slot))
        places.append(Place(slot=slot, start=position, end=end, is_first=is_first))
        position = end + len(glue)
    return tuple(places) if position == len(text) else None


def _marked(message: Message, index: int, slots: list[Slot], thought: tuple[str, str]) -> Message:
    """Return the message with marks for its texts, which are added to `slots`."""

    def mark(field: str, text: str, char_start: int = 0) -> str:
        if not text:
            return text
        slots.append(Slot(index=index, field=field, text=text, char_start=char_start))
        return _MARK.format(len(slots) - 1)

    content: Any = message.content
    if isinstance(content, str):
        content = "".join(_mark_parts(content, thought, mark))
    else:
        position, parts = 0, []
        for part in content:
            text = part.text or ""
            parts.append(replace(part, text=mark("content", text, position)) if text else part)
            position += len(text)
        content = tuple(parts)
    has_text = content or message.reasoning or message.tool_calls or message.tool_responses
    if not has_text:  # an empty message has a place all the same
        slots.append(Slot(index=index, field="content", text=""))
        content = _MARK.format(len(slots) - 1)
    return replace(
        message,
        content=content,
        reasoning=mark("reasoning", message.reasoning),
        name=mark("name", message.name),
        tool_call_id=mark("tool_call_id", message.tool_call_id),
        tool_responses=tuple(mark("tool_responses", text) for text in message.tool_responses),
        tool_calls=tuple(_marked_call(call, mark) for call in message.tool_calls),
    )


def _mark_parts(
    content: str, thought: tuple[str, str], mark: Callable[[str, str, int], str]
) -> Iterator[str]:
    """Yield the content in marks; a thought's own marks in it stay, as templates look for them."""
    marks = [re.escape(text) for text in thought if text]
    position = 0
    for part in re.split(f"({'|'.join(marks)})", content) if marks else [content]:
        yield part if part in thought else mark("content", part, position)
        position += len(part)


def _marked_call(call: ToolCall, mark: Callable[..., str]) -> ToolCall:
    try:
        arguments = json.loads(call.arguments_json)
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        marked = json.dumps(_mark_strings(arguments, mark), ensure_ascii=False)
    else:
        marked = mark("call.arguments", call.arguments_json)
    return replace(
        call, name=mark("call.name", call.name), id=mark("call.id", call.id), arguments_json=marked
    )


def _mark_strings(value: Any, mark: Callable[..., str]) -> Any:
    """Return the value with a mark for each text in it; keys and numbers stay."""
    if isinstance(value, dict):
        return {key: _mark_strings(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark_strings(item, mark) for item in value]
    return mark("call.arguments", value) if isinstance(value, str) else value
