"""Where a template writes each text of each message: content, reasoning, calls, names, answers.

    places = find_places(template, history, template.render(history))
    [place.slot.field for place in places]

The conversation is rendered once more with a mark for each text. What stands between the marks is
the template's own, and the text is cut where that stands in it. A text is never searched for what
it says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError, InvalidInput, Unsupported
from dialoop.messages import tool_for_template
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dialoop.messages import Message, ToolCall, ToolDefinition
    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.tokens.tokenizer import Tokenizer

_LINKS = frozenset({"call.id", "tool_call_id"})
_MAX_NAMED = 3
_MAX_HIDDEN = 4096
_HIDDEN: dict[str, frozenset[int]] = {}
"""Which marks of a marked conversation a template leaves out, by its shape."""

_IN_QUOTES = str.maketrans({"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r"})
# How a template shows a text: as it is, trimmed, or within JSON or Python.
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
    lambda text: repr(text)[1:-1],
    lambda text: text.translate(_IN_QUOTES),
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
    """What a template writes around texts: glue, slot, glue, ..., glue; and texts it leaves out."""

    glues: tuple[str, ...]
    slots: tuple[Slot, ...]
    hidden: tuple[Slot, ...]


def skeleton_of(
    template: ChatTemplate, history: Sequence[Message], **options: Any
) -> Skeleton | None:
    """Render marks in the place of the messages' texts; None where the template refuses them."""
    template = template.for_tools(options.get("tools"))
    marks = _Marks(template, history, options)
    try:
        parts = marks.pattern.split(template.render(marks.messages(), **options))
    except (DialoopError, RecursionError):  # refused, or nested too deeply
        return None
    numbers = [int(number) for number in parts[1::2]]
    shown = set(numbers)
    return Skeleton(
        glues=tuple(parts[::2]),
        slots=tuple(marks.slots[number] for number in numbers),
        hidden=tuple(slot for number, slot in enumerate(marks.slots) if number not in shown),
    )


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


def require_shown(
    template: ChatTemplate, history: Sequence[Message], *, start: int = 0, **options: Any
) -> None:
    """Raise InvalidInput (TEMPLATE_DROPS_FIELD) where a text of a message is left out of a prompt.

    From message `start` on. These may go: before the last question the assistant's thoughts, and
    what the template shows until the tools have answered alone, which are by design; and what links
    a tool's answer to its call, where the template goes by their order.
    """
    template = template.for_tools(options.get("tools"))
    last_user = max((i for i, m in enumerate(history) if m.role == "user"), default=-1)
    called = {call.name for message in history for call in message.tool_calls}
    lost: dict[str, None] = {}
    for slot in _hidden(template, history, options):
        message = history[slot.index]
        is_link = slot.field in _LINKS or (
            slot.field == "name" and message.role == "tool" and (slot.text in called or not called)
        )
        if slot.index < start or not slot.text.strip() or is_link:
            continue
        if slot.index < last_user and message.role == "assistant":
            later = range(slot.index + 1, len(history))
            then = history[: next(i for i in later if history[i].role != "tool")]
            is_thought = _is_thought(slot, message, template.form.thought)
            if is_thought or slot not in _hidden(template, then, options):
                continue
        lost[f"messages[{slot.index}].{slot.field.replace('call.', 'tool_calls.')}"] = None
    if lost:
        raise InvalidInput(
            f"The chat template leaves out {' and '.join(list(lost)[:_MAX_NAMED])}.",
            reason=Reason.TEMPLATE_DROPS_FIELD,
            remedy="Leave that out of the conversation, put it into a content, or use a template "
            "that shows it.",
        )


def _hidden(
    template: ChatTemplate, history: Sequence[Message], options: Mapping[str, Any]
) -> list[Slot]:
    """Return the texts that are not shown, which depends on the fields and not on what they say."""
    marks = _Marks(template, history, options, marks_numbers=True)
    marked = marks.messages()
    key = _shape(template, marked, options)
    hidden = _HIDDEN.get(key)
    if hidden is None:
        try:
            found = marks.pattern.findall(template.render(marked, **options))
        except (DialoopError, RecursionError):  # the marks are refused: nothing is known
            return []
        hidden = frozenset(range(len(marks.slots))) - frozenset(map(int, found))
        if len(_HIDDEN) >= _MAX_HIDDEN:
            _HIDDEN.clear()  # at once, as other threads look here
        _HIDDEN[key] = hidden
    return [marks.slots[number] for number in sorted(hidden)]


def shape_of(template: ChatTemplate, history: Sequence[Message], **options: Any) -> str:
    """Return a digest that is equal where conversations differ in what their texts say alone."""
    marks = _Marks(template, history, options, marks_numbers=True)
    return _shape(template, marks.messages(), options)


def _shape(template: ChatTemplate, marked: list[Message], options: Mapping[str, Any]) -> str:
    messages = [
        [
            *(m.role, m.text, m.reasoning, m.name, m.tool_call_id, m.tool_responses),
            *(part.type for part in m.content if not isinstance(part, str)),
            *((call.name, call.id, call.arguments_json) for call in m.tool_calls),
        ]
        for m in marked
    ]
    tools = [tool_for_template(tool) for tool in options.get("tools") or ()]
    others = sorted((key, value) for key, value in options.items() if key != "tools")
    text = json.dumps([template.digest, messages, tools, others], default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_thought(slot: Slot, message: Message, marks: tuple[str, str]) -> bool:
    """Return whether a text is a thought, in a field of its own or in the content."""
    start, end = marks
    if slot.field != "content" or not end or end not in message.text:
        return slot.field == "reasoning"
    end_at = message.text.rfind(end)
    start_at = message.text.rfind(start, 0, end_at)  # -1: the opening begins the thought
    return start_at < slot.char_start < end_at


def texts_of(message: Message) -> Iterator[str]:
    """Yield every text of a message."""
    yield from (message.role, message.text, message.reasoning, message.name, message.tool_call_id)
    yield from message.tool_responses
    for call in message.tool_calls:
        yield from (call.id, call.name, call.arguments_json)


def require_plain_tools(
    tools: Iterable[ToolDefinition | Mapping[str, Any]], tokenizer: Tokenizer
) -> None:
    """Raise Unsupported (SPECIAL_TOKEN_SPELLED) where a tool's text spells a special token.

    Each template writes tools in its own way, so such a text cannot be kept plain there.
    """
    for tool in map(tool_for_template, tools):
        for field, text in _texts_in(tool):
            if tokenizer.spells_special(text):
                function = tool.get("function", tool)
                name = function.get("name") if isinstance(function, Mapping) else None
                raise Unsupported(
                    f"{field} of the tool {name!s:.40} spells a special token: {text:.80}",
                    reason=Reason.SPECIAL_TOKEN_SPELLED,
                    remedy="Take that text out, or leave the tool out.",
                )


def _texts_in(tool: Any) -> Iterator[tuple[str, str]]:
    """Yield each text of a tool, keys too, and the field where it stands."""
    rest = [("", tool)]
    while rest:  # no recursion: a stranger's schema may be nested as deep as it likes
        field, value = rest.pop()
        if isinstance(value, str):
            yield field, value
        elif isinstance(value, Mapping):
            yield from ((f"A key of {field}", str(key)) for key in value)
            rest += [(f"{field}.{key}".lstrip("."), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            rest += [(f"{field}[{index}]", item) for index, item in enumerate(value)]


class _Marks:
    """Puts marks in the place of texts, and counts them: words that occur nowhere else.

    They have letters and digits alone, so that every way of quoting leaves them as they are. That
    of an argument which Python puts in double quotes has its apostrophe too.
    """

    def __init__(
        self,
        template: ChatTemplate,
        history: Sequence[Message],
        options: Mapping[str, Any],
        *,
        marks_numbers: bool = False,
    ) -> None:
        self.slots: list[Slot] = []
        self._marks_numbers = marks_numbers
        self._form = template.form
        texts = [text for message in history for text in texts_of(message)]
        used = "\n".join((template.source, repr(options), *texts)).lower()
        self._word = next(w for n in count() if (w := f"qz{n}k") not in used)
        self.pattern = re.compile(rf"{self._word}([0-9]+)(?:\\?')?z", re.IGNORECASE)
        self._history = history
        self._index = 0
        self._ids: dict[str, str] = {}

    def messages(self) -> list[Message]:
        """Return the conversation with marks for its texts."""
        return [self._message(message, index) for index, message in enumerate(self._history)]

    def _message(self, message: Message, index: int) -> Message:
        """Return the message with marks for its texts."""
        self._index = index
        content: Any = message.content
        if isinstance(content, str):
            content = "".join(self._parts(content))
        else:
            position, parts = 0, []
            for part in content:
                text = part.text or ""
                parts.append(replace(part, text=self._mark("content", text, position)))
                position += len(text)
            content = tuple(parts)
        others = message.reasoning or message.tool_calls or message.tool_responses
        if not others and not message.text.strip():
            content = self._add("content", message.text)  # it has a place all the same
        return replace(
            message,
            content=content,
            reasoning=self._mark("reasoning", message.reasoning),
            name=self._mark("name", message.name),
            tool_call_id=self._id("tool_call_id", message.tool_call_id),
            tool_responses=tuple(
                self._mark("tool_responses", text) for text in message.tool_responses
            ),
            tool_calls=tuple(map(self._call, message.tool_calls)),
        )

    def _mark(self, field: str, text: str, char_start: int = 0) -> str:
        return self._add(field, text, char_start) if text.strip() else text

    def _add(self, field: str, text: str, char_start: int = 0) -> str:
        slot = Slot(index=self._index, field=field, text=text, char_start=char_start)
        self.slots.append(slot)
        apostrophe = "'" * (field == "call.arguments" and repr(text).startswith('"'))
        return f"{self._word}{len(self.slots) - 1}{apostrophe}z"

    def _id(self, field: str, text: str) -> str:
        """Return the mark of an id: equal ids have one, since templates look for the call by it."""
        if not text or self._form.call_ids != "own":
            return text
        if text not in self._ids:
            self._ids[text] = self._add(field, text)
        return self._ids[text]

    def _parts(self, content: str) -> Iterator[str]:
        """Yield the content in marks; a thought's own marks stay: templates look for them."""
        thought = tuple(filter(None, self._form.thought))
        position = 0
        pattern = "|".join(map(re.escape, thought))
        for part in re.split(f"({pattern})", content) if thought else [content]:
            yield part if part in thought else self._mark("content", part, position)
            position += len(part)

    def _call(self, call: ToolCall) -> ToolCall:
        marked = None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(call.arguments_json)
            if isinstance(arguments, dict) and not self._form.arguments_as_text:
                marked = json.dumps(self._values(arguments), ensure_ascii=False)
        if marked is None:
            marked = self._mark("call.arguments", call.arguments_json)
        name, call_id = self._mark("call.name", call.name), self._id("call.id", call.id)
        return replace(call, name=name, id=call_id, arguments_json=marked)

    def _values(self, value: Any) -> Any:
        """Return the value with a mark for each text in it, and number if wanted; keys stay."""
        if isinstance(value, dict):
            return {key: self._values(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._values(item) for item in value]
        if isinstance(value, str):
            return self._mark("call.arguments", value)
        if value is not None and self._marks_numbers:
            return self._mark("call.arguments", str(value))
        return value
