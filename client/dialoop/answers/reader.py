"""The one reader of answers: a thought, content, and the calls in the form of a model's family.

    form = AnswerForm(reasoning=("<think>", "</think>"), calls="hermes")
    read_text('<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>', form)
    # Reading(reasoning="hm", calls=(WrittenCall(name="f"),))

A running answer is read token by token. What was given out does not change any more, and what may
still become a mark waits. Text that does not parse as a call stays content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dialoop.answers.grammars import (
    CHANNEL,
    GRAMMARS,
    MESSAGE,
    MESSAGE_ENDS,
    START,
    BodyContext,
    CallGrammar,
    CallShape,
    read_channel_call,
)
from dialoop.answers.grammars import WrittenCall as WrittenCall
from dialoop.answers.marks import Spelling, TokenText, spelling_of
from dialoop.answers.scanning import Scanner, Stops, Tape, json_scanner
from dialoop.errors import InvalidInput

if TYPE_CHECKING:
    from dialoop.messages import ToolDefinition
    from dialoop.tokens.tokenizer import Tokenizer

_Steps = Generator[None, None, None]
_NO_CALLS = CallGrammar(name="")
_MAX_BLANKS = 16
_MAX_HEADER = 1000
_MAX_HEAD = 256
_MAX_SEPARATOR = 3
_RECIPIENT = re.compile(r"\bto=([^\s<\udc80-\udcff]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How a model's answers are written.

    reasoning: the texts around a thought. calls: a name of GRAMMARS, or "". reads_calls: whether
    calls are looked for, as where tools were offered. starts_in_reasoning: the prompt has opened
    the thought already. is_lenient: also takes JSON calls with other keys, and with arguments that
    are JSON within a string.
    """

    reasoning: tuple[str, str] | None = None
    calls: str = ""
    reads_calls: bool = True
    starts_in_reasoning: bool = False
    is_lenient: bool = False

    def __post_init__(self) -> None:
        if self.calls and self.calls not in GRAMMARS:
            raise InvalidInput(
                f"There is no grammar of calls named '{self.calls}'.",
                remedy=f"Choose one of {', '.join(GRAMMARS)}.",
            )

    @property
    def has_thoughts(self) -> bool:
        """Return whether an answer may have a thought."""
        return self.reasoning is not None or _has_channels(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An answer, or the part of a running one that will not change any more.

    A call with a `problem` is among the calls, and its text is part of the content too.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[WrittenCall, ...] = ()


class AnswerReader:
    """Reads one answer as its tokens come; a token costs the same however long the answer is.

    cut: texts of which the first one ends the answer, and is not part of it. cuts_thoughts: they
    are looked for in its thoughts too.
    """

    def __init__(
        self,
        form: AnswerForm,
        tokenizer: Tokenizer,
        tools: Sequence[ToolDefinition] = (),
        *,
        cut: Sequence[str] = (),
        cuts_thoughts: bool = False,
    ) -> None:
        self._text = TokenText(tokenizer, _marks_of(form))
        self._cut = _Cut(cut, self._text.spelling, is_on=cuts_thoughts) if any(cut) else None
        self._machine = _Machine(form, self._text.spelling, tools, self._cut)

    def add(self, token_ids: Iterable[int]) -> None:
        """Read more tokens."""
        text = self._text.add(token_ids)
        if text:
            self._machine.add(text)

    @property
    def stop_string(self) -> str | None:
        """Return the text of `cut` that ended the answer; None where none did so far."""
        return None if self._cut is None else self._cut.found

    @property
    def reading(self) -> Reading:
        """Return what will not change any more."""
        return self._machine.reading

    def take(self) -> Reading:
        """Return what will not change any more and was not taken yet."""
        return self._machine.take()

    def finish(self) -> Reading:
        """Return the whole answer; nothing is added after that."""
        self._machine.finish(self._text.finish())
        return self._machine.reading


def read_text(text: str, form: AnswerForm, tools: Sequence[ToolDefinition] = ()) -> Reading:
    """Return the parts of an answer of which only the text is there; marks are what is spelled."""
    machine = _Machine(form, spelling_of(()), tools)
    machine.finish(text)
    return machine.reading


def grammar_of(written: str) -> str:
    """Return the grammar that finds the call in what a template wrote of one, or ""."""
    for grammar in GRAMMARS:
        calls = read_text(written, AnswerForm(calls=grammar)).calls
        if any(not call.problem for call in calls):
            return grammar
    return ""


class _Cut:
    """Ends a text before the first of some strings, in whatever tokens it stands.

    They are looked for while it is on.
    """

    def __init__(self, strings: Sequence[str], spelling: Spelling, *, is_on: bool) -> None:
        self._spelling = spelling
        plain = spelling_of(())
        self._pattern = plain.pattern(filter(None, strings))
        self._beginnings = plain.beginnings(strings)
        self._held = ""
        self.is_on = is_on
        self._until: Stops | None = None
        self.found: str | None = None

    def begin(self, text: str, until: Stops | None) -> str:
        """Go on; what follows is looked at up to the first of these stops."""
        self.is_on, self._until = True, until
        return self.add(text)

    def add(self, text: str) -> str:
        """Return what is no part of such a string."""
        if self.found is not None:
            return ""
        if not self.is_on:
            return text
        text = self._held + text
        end = self._until.pattern.search(text) if self._until else None
        plain = self._spelling.plain(text if end is None else text[: end.start()])
        match = self._pattern.search(plain)
        if match is not None:
            self.found, self._held = match[0], ""
            return self._first(text, match.start())
        if end is not None:
            self.is_on, self._held = False, ""
            return text
        given = self._first(text, len(plain) - self._beginnings.length_at_end(plain, 0))
        if self._until:
            held = self._until.beginnings.length_at_end(text, 0)
            given = given[: len(text) - held]
        self._held = text[len(given) :]
        return given

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, length: int) -> str:
        """Return the beginning that spells so many characters; a cut mark stands as its text."""
        if length >= len(text) and self._spelling.plain(text) == text[:length]:
            return text[:length]
        given: list[str] = []
        for character in text:
            own = self._spelling.plain(character)
            if len(own) > length:
                if self.found is not None:
                    given.append(own[:length])
                break
            given.append(character)
            length -= len(own)
        return "".join(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """A shape with what finds the end of its calls."""

    shape: CallShape
    scan: Scanner
    stops: Stops
    closing: re.Pattern[str]
    head: tuple[re.Pattern[str], re.Pattern[str]] | None


class _Language:
    """What a form is made of, in a spelling."""

    def __init__(self, form: AnswerForm, spelling: Spelling) -> None:
        self.spelling = spelling
        grammar = GRAMMARS[form.calls] if form.calls and form.reads_calls else _NO_CALLS
        openings = [text for shape in grammar.shapes for text in shape.openings]
        marked = [t for shape in grammar.shapes if shape.head is None for t in shape.openings]
        texts = (*openings, *grammar.beside)
        self.anything = spelling.pattern(texts)
        self.beginnings = spelling.beginnings(texts)
        self.beside = frozenset(map(spelling.spelled, grammar.beside))
        self.by_opening = {
            spelling.spelled(text): opening
            for shape in grammar.shapes
            for opening in (self._opening(shape, marked),)
            for text in shape.openings
        }
        self.has_channels = _has_channels(form)
        self.thought = tuple(map(spelling.spelled, form.reasoning or ()))
        self.thought_end = spelling.beginnings(form.reasoning[1:] if form.reasoning else ())
        ends = (*MESSAGE_ENDS, START, CHANNEL)
        self.message_stops = Stops(
            pattern=spelling.pattern(ends), beginnings=spelling.beginnings(ends)
        )
        self.message_scan = json_scanner(self.message_stops)
        self.headers = tuple(map(spelling.spelled, (START, CHANNEL)))
        self.message = spelling.spelled(MESSAGE)

    def _opening(self, shape: CallShape, openings: Sequence[str]) -> _Opening:
        others = [text for text in openings if not text.startswith(shape.closings)]
        texts = (*shape.closings, *others) if shape.closings else ()
        stops = Stops(
            pattern=self.spelling.pattern(texts), beginnings=self.spelling.beginnings(texts)
        )
        head = (re.compile(shape.head[0]), re.compile(shape.head[1])) if shape.head else None
        return _Opening(
            shape=shape,
            scan=shape.scanner(self.spelling, stops),
            stops=stops,
            closing=self.spelling.pattern(shape.closings),
            head=head,
        )


@lru_cache(maxsize=256)
def _language_of(reasoning: tuple[str, str] | None, calls: str, spelling: Spelling) -> _Language:
    return _Language(AnswerForm(reasoning=reasoning, calls=calls), spelling)


def _has_channels(form: AnswerForm) -> bool:
    if form.calls and GRAMMARS[form.calls].has_channels:
        return True
    return form.reasoning is not None and CHANNEL in form.reasoning[0]


def _marks_of(form: AnswerForm) -> tuple[str, ...]:
    """Return all marks of a form."""
    grammar = GRAMMARS.get(form.calls, _NO_CALLS)
    if _has_channels(form):
        grammar = GRAMMARS["harmony"]
    return tuple(dict.fromkeys((*grammar.marks, *(form.reasoning or ()))))


class _Given:
    """What an answer has given out so far, and what of it was not taken yet."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[WrittenCall] = []
        self._taken = (0, 0, 0)

    def all(self) -> Reading:
        """Return everything."""
        return Reading(
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            calls=tuple(self.calls),
        )

    def take(self) -> Reading:
        """Return what is new since the last time."""
        content, reasoning, calls = self._taken
        self._taken = (len(self.content), len(self.reasoning), len(self.calls))
        return Reading(
            content="".join(self.content[content:]),
            reasoning="".join(self.reasoning[reasoning:]),
            calls=tuple(self.calls[calls:]),
        )


class _Machine:
    """Reads the text of an answer, with marks as the spelling has them."""

    def __init__(
        self,
        form: AnswerForm,
        spelling: Spelling,
        tools: Sequence[ToolDefinition],
        cut: _Cut | None = None,
    ) -> None:
        self._form = form
        self._cut = cut
        self._language = _language_of(
            form.reasoning, form.calls if form.reads_calls or _has_channels(form) else "", spelling
        )
        self._context = BodyContext(spelling=spelling, tools=tools, is_lenient=form.is_lenient)
        self._tape = Tape()
        self._given = _Given()
        self._num_line_ends = 0
        self._steps = self._run()
        self._is_new = True

    @property
    def reading(self) -> Reading:
        """Return what was given out."""
        return self._given.all()

    def take(self) -> Reading:
        """Return what was given out since the last time."""
        return self._given.take()

    def add(self, text: str) -> None:
        """Read more text."""
        self._tape.add(text if self._cut is None else self._cut.add(text))
        next(self._steps, None)

    def finish(self, text: str) -> None:
        """Read the last text."""
        if self._cut is not None:
            text = self._cut.add(text) + self._cut.finish()
        self._tape.add(text)
        self._tape.is_over = True
        for _ in self._steps:
            pass

    def _run(self) -> _Steps:
        if self._language.has_channels:
            yield from self._channels()
            return
        if self._language.thought:
            yield from self._thought()
        self._leave_thought(None)
        yield from self._content()

    def _leave_thought(self, until: Stops | None) -> None:
        """Look for what cuts the answer from here on."""
        tape, cut = self._tape, self._cut
        if cut is not None and not cut.is_on:
            rest = cut.begin(tape.data[tape.at :], until)
            tape.data = tape.data[: tape.at] + rest + (cut.finish() if tape.is_over else "")

    # Content and calls

    def _content(self) -> _Steps:
        tape, language = self._tape, self._language
        while True:
            match = language.anything.search(tape.data, tape.at)
            if match is None:
                held = language.beginnings.length_at_end(tape.data, tape.at)
                self._give_until(len(tape.data) - (0 if tape.is_over else held))
                if tape.is_over:
                    return
                yield
                continue
            self._give_until(match.start())
            opening = language.by_opening.get(match[0])
            if opening is not None:
                yield from self._call(opening, match[0])
            elif self._given.calls and not self._given.calls[-1].problem:
                tape.at = match.end()
            else:
                self._give_until(match.end())

    def _call(self, opening: _Opening, text: str) -> _Steps:
        """Read what begins with an opening, as a call or as content."""
        tape = self._tape
        tape.begin_region()
        if opening.head is None:
            tape.at += len(text)
            yield from self._closed_call(opening, len(text))
        else:
            yield from self._bare_call(opening, text)
        tape.end_region()

    def _closed_call(self, opening: _Opening, start: int) -> _Steps:
        tape = self._tape
        found = yield from opening.scan(tape)
        if not found and not (yield from self._first_stop(opening, start)):
            return
        if self._restarts(opening):
            return
        calls = self._read(opening, start)
        if any(call.problem for call in calls):
            yield from self._first_stop(opening, start)
            if self._restarts(opening):
                return
            calls = self._read(opening, start)
        closing = opening.closing.match(tape.data, tape.at)
        assert closing is not None  # a stop is a closing or the opening of another call
        tape.at = closing.end()
        self._give_calls(calls)

    def _first_stop(self, opening: _Opening, start: int) -> Generator[None, None, bool]:
        """Go to the first stop behind the opening, literals or not; else all is content."""
        tape = self._tape
        match = opening.stops.pattern.search(tape.region, start)
        if match is not None:
            tape.rewind(match.start())
        elif not (yield from opening.stops.find(tape)):
            self._give_region()
            return False
        return True

    def _restarts(self, opening: _Opening) -> bool:
        """Return whether another call opens here: what stands before it is content."""
        if opening.closing.match(self._tape.data, self._tape.at) is not None:
            return False
        self._give_region()
        return True

    def _read(self, opening: _Opening, start: int) -> list[WrittenCall]:
        return opening.shape.read(self._tape.region[start:], self._context)

    def _bare_call(self, opening: _Opening, text: str) -> _Steps:
        """Read a call without marks; it begins a line, or stands where the content begins."""
        tape, start = self._tape, len(text) - text.endswith(("{", "["))
        assert opening.head is not None
        whole, beginning = opening.head
        is_at_line = text[0] == "\n" or len(self._language.spelling.plain(text[0])) > 1
        while self._is_new or is_at_line or len(text) > _MAX_SEPARATOR:
            body = tape.at + start
            if whole.match(tape.data, body) is not None:
                tape.at = body
                if (yield from opening.scan(tape)):
                    self._give_calls(self._read(opening, start))
                else:
                    self._give_region()
                return
            is_short = len(tape.data) - body < _MAX_HEAD
            if tape.is_over or not is_short or not beginning.fullmatch(tape.data, body):
                break
            yield
        tape.at += len(text)
        self._give_region()

    def _give_calls(self, calls: list[WrittenCall]) -> None:
        """Give out the calls of a region; where they have a problem its text is content."""
        if any(call.problem for call in calls):
            self._give_region()
        else:
            self._is_new = True
        self._given.calls.extend(calls)

    def _give_region(self) -> None:
        self._give(self._tape.region)

    def _give_until(self, end: int) -> None:
        tape = self._tape
        if end > tape.at:
            self._give(tape.data[tape.at : end])
            tape.at = end

    def _give(self, text: str) -> None:
        if text:
            self._given.content.append(self._language.spelling.plain(text))
            self._is_new = False

    # Reasoning

    def _thought(self) -> _Steps:
        """Read the thought that begins the answer, and the line ends after it."""
        tape, (start, end) = self._tape, self._language.thought
        while not self._form.starts_in_reasoning:
            beginning = tape.data[: _MAX_BLANKS + 1]
            blanks = len(beginning) - len(beginning.lstrip())
            if tape.data.startswith(start, blanks):
                tape.at = blanks + len(start)
                break
            if tape.is_over or blanks > _MAX_BLANKS or not start.startswith(tape.data[blanks:]):
                return
            yield
        while True:
            found = tape.data.find(end, tape.at)
            if found >= 0:
                self._think_until(found)
                tape.at = found + len(end)
                break
            held = self._language.thought_end.length_at_end(tape.data, tape.at)
            self._think_until(len(tape.data) - (0 if tape.is_over else held))
            if tape.is_over:
                return
            yield
        yield from self._skip_line_ends()

    def _skip_line_ends(self) -> _Steps:
        tape = self._tape
        while True:
            while tape.data.startswith("\n", tape.at):
                tape.at += 1
            if tape.is_over or tape.at < len(tape.data):
                return
            yield

    def _think_until(self, end: int) -> None:
        """Give out reasoning, without the line ends at its beginning and its end."""
        tape = self._tape
        text = tape.data[tape.at : end]
        tape.at = end
        if not self._given.reasoning:
            text = text.lstrip("\n")
        thought = text.rstrip("\n")
        if thought:
            thought = self._language.spelling.plain(thought)
            self._given.reasoning.append("\n" * self._num_line_ends + thought)
            self._num_line_ends = 0
        if self._given.reasoning:
            self._num_line_ends += len(text) - len(text.rstrip("\n"))

    # Channels

    def _channels(self) -> _Steps:
        """Read messages: a header, the mark of a message, and a body."""
        tape = self._tape
        if self._form.starts_in_reasoning:
            yield from self._channel_text(self._think_until)
        while not tape.is_over or tape.at < len(tape.data):
            tape.begin_region()
            header = yield from self._header()
            recipient = _RECIPIENT.search(header or "")
            channel = (header or "").partition(self._language.headers[1])[2].strip()
            thinks = recipient is None and channel.startswith("analysis")
            if not thinks:
                self._leave_thought(self._language.message_stops)
            if recipient is not None:
                yield from self._channel_call(self._language.spelling.plain(recipient[1]))
                tape.end_region()
                continue
            tape.end_region()
            if header is None:
                self._give_until(min(tape.at + 1, len(tape.data)))
                yield from self._channel_text(self._give_until)
            elif thinks:
                self._num_line_ends = 1 if self._given.reasoning else 0
                yield from self._channel_text(self._think_until)
            else:
                if self._given.content:
                    self._give("\n")
                yield from self._channel_text(self._give_until)

    def _header(self) -> Generator[None, None, str | None]:
        """Take what stands before a message's body; None where no header stands."""
        tape, language = self._tape, self._language
        while True:
            window = tape.data[tape.at : tape.at + _MAX_HEADER]
            words, beginnings = window.lstrip(), (*language.headers, "to=")
            end = window.find(language.message)
            begins = words.startswith(beginnings)
            if end >= 0 and begins:
                tape.at += end + len(language.message)
                return window[:end]
            is_short = len(window) < _MAX_HEADER and not tape.is_over
            may_begin = begins or any(text.startswith(words) for text in beginnings)
            if not is_short or not may_begin:
                return None
            yield

    def _channel_text(self, give_until: Callable[[int], None]) -> _Steps:
        """Give out a message's body as it comes, and take its end."""
        tape, stops = self._tape, self._language.message_stops
        while (match := stops.pattern.search(tape.data, tape.at)) is None:
            held = stops.beginnings.length_at_end(tape.data, tape.at)
            give_until(len(tape.data) - (0 if tape.is_over else held))
            if tape.is_over:
                return
            yield
        give_until(match.start())
        self._take_end()

    def _take_end(self) -> None:
        """Take the end of a message; the beginning of the next one stays."""
        match = self._language.message_stops.pattern.match(self._tape.data, self._tape.at)
        if match is not None and match[0] not in self._language.headers:
            self._tape.at = match.end()

    def _channel_call(self, recipient: str) -> _Steps:
        """Read a message to a tool; its end may be missing, where its object is whole."""
        tape, language, start = self._tape, self._language, len(self._tape.region)
        if not (yield from language.message_scan(tape)):
            match = language.message_stops.pattern.search(tape.region, start)
            if match is not None:
                tape.rewind(match.start())
            else:
                yield from language.message_stops.find(tape)
        call = read_channel_call(recipient, tape.region[start:], self._context)
        self._take_end()
        if not self._form.reads_calls:
            self._give_region()
            return
        self._give_calls([call])
