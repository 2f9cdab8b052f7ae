"""Where a call ends: a tag inside a JSON string or another literal is text.

A scanner is a generator that yields where it needs more text. It looks at each character once, so
that a token costs the same however long the call is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from dialoop.answers.marks import Beginnings

Waiting = Generator[None, None, bool]
"""Yields where it needs more text; at last, whether it found what it looks for."""

_JSON_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*+')
_PYTHON_STRINGS = {
    '"': re.compile(r'(?:[^"\\\n]|\\.)*+'),
    "'": re.compile(r"(?:[^'\\\n]|\\.)*+"),
}
_NO_JSON = re.compile(r"[^\s\w.,:+-]")
_OPENING, _CLOSING = "{[(", "}])"


class Tape:
    """An answer's text as it comes: what is not given out yet, from `at` on.

    A region is the text of a call that may turn out to be none: it can be read again.
    """

    __slots__ = ("_kept", "_start", "absent", "at", "data", "is_over")

    def __init__(self) -> None:
        self.data = ""
        self.at = 0
        self.is_over = False
        self.absent: set[re.Pattern[str]] = set()
        """What the rest of a text that is over does not have, so that nobody looks again."""
        self._start: int | None = None
        self._kept: list[str] = []

    def add(self, text: str) -> None:
        """Append text, and forget what was given out."""
        if self._start is not None:
            if self.at > self._start:
                self._kept.append(self.data[self._start : self.at])
            self._start = 0
        self.data = self.data[self.at :] + text
        self.at = 0

    def begin_region(self) -> None:
        """Keep the text from here on."""
        self._start, self._kept = self.at, []

    @property
    def region(self) -> str:
        """Return the text from the region's beginning to here."""
        return "".join((*self._kept, self.data[self._start : self.at]))

    def rewind(self, length: int) -> None:
        """Go back to so many characters after the region's beginning."""
        if self._kept:
            self.data = "".join((*self._kept, self.data[self._start :]))
            self._start, self._kept = 0, []
        self.at = (self._start or 0) + length

    def end_region(self) -> None:
        """Keep no text any more."""
        self._start, self._kept = None, []


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """What ends a call outside of its literals: its closing, or the opening of another one."""

    pattern: re.Pattern[str]
    beginnings: Beginnings

    def find(self, tape: Tape) -> Waiting:
        """Go to the next stop, wherever it stands; False where there is none."""
        while True:
            match = self.pattern.search(tape.data, tape.at)
            if match is not None:
                tape.at = match.start()
                return True
            if tape.is_over:
                tape.at = len(tape.data)
                return False
            tape.at = len(tape.data) - self.beginnings.length_at_end(tape.data, tape.at)
            yield


Scanner = Callable[[Tape], Waiting]
"""Goes to the end of a call's body; False where the body is broken or the text ends in it."""


def json_scanner(stops: Stops) -> Scanner:
    """Return the scanner of JSON, and of what else stands before the closing."""
    outside = re.compile(f'"|{stops.pattern.pattern}')

    def scan(tape: Tape) -> Waiting:
        before, after_string = "", False
        while True:
            match = outside.search(tape.data, tape.at)
            held = 0 if match else stops.beginnings.length_at_end(tape.data, tape.at)
            end = match.start() if match else len(tape.data) - (0 if tape.is_over else held)
            between = tape.data[tape.at : end].strip()
            tape.at = end
            if between:
                if after_string and between[0] not in ",:}]":
                    return False
                before, after_string = between[-1], False
            if match is None:
                if tape.is_over:
                    return False
                yield
            elif match[0] != '"':
                return True
            elif before not in tuple("{[,:") or after_string:
                return False
            else:
                tape.at = match.end()
                if not (yield from _string(tape, '"', _JSON_STRING)):
                    return False
                after_string = True

    return scan


def json_object_scanner(before: re.Pattern[str] | None = None) -> Scanner:
    """Return the scanner of one JSON object, which ends after its last bracket.

    before: what may stand before it, whole where the scanner begins.
    """
    inner = _balanced(re.compile(r'["{}\[\]]'), {'"': _JSON_STRING}, _NO_JSON)

    def scan(tape: Tape) -> Waiting:
        match = None if before is None else before.match(tape.data, tape.at)
        tape.at = tape.at if match is None else match.end()
        return (yield from inner(tape))

    return scan


def python_scanner() -> Scanner:
    """Return the scanner of one Python list, which ends after its last bracket."""
    return _balanced(re.compile(r"[\"'{}\[\]()]"), _PYTHON_STRINGS, None)


def python_block_scanner(stops: Stops) -> Scanner:
    """Return the scanner of Python up to a closing that no string holds."""
    outside = re.compile(f"[\"']|{stops.pattern.pattern}")

    def scan(tape: Tape) -> Waiting:
        while True:
            match = outside.search(tape.data, tape.at)
            if match is None:
                if tape.is_over:
                    return False
                tape.at = len(tape.data) - stops.beginnings.length_at_end(tape.data, tape.at)
                yield
            elif match[0] in _PYTHON_STRINGS:
                tape.at = match.end()
                if not (yield from _string(tape, match[0], _PYTHON_STRINGS[match[0]])):
                    return False
            else:
                tape.at = match.start()
                return True

    return scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """Literals between tags: what begins one, and what ends it, with the text that has to follow.

    longest: the most characters of such an end. Its group `end` is the end's own; without it a
    match is what cannot stand in a literal.
    """

    start: str
    end: re.Pattern[str]
    longest: int

    def pass_one(self, tape: Tape) -> Waiting:
        """Go behind the end of a literal; False where it has none."""
        if self.end in tape.absent:
            return False
        while (match := self.end.search(tape.data, tape.at)) is None:
            if tape.is_over:
                tape.absent.add(self.end)
                return False
            tape.at = max(tape.at, len(tape.data) - self.longest)
            yield
        is_end = match["end"] is not None
        tape.at = match.end("end") if is_end else match.start()
        return is_end


def literals_scanner(stops: Stops, literals: Literals) -> Scanner:
    """Return the scanner of a body whose literals stand between tags."""
    outside = re.compile(f"(?P<literal>{re.escape(literals.start)})|{stops.pattern.pattern}")
    held = _Held(stops.beginnings, Beginnings((literals.start,)))

    def scan(tape: Tape) -> Waiting:
        while True:
            match = outside.search(tape.data, tape.at)
            if match is None:
                if tape.is_over:
                    return False
                tape.at = len(tape.data) - held.length_at_end(tape.data, tape.at)
                yield
            elif match["literal"] is None:
                tape.at = match.start()
                return True
            else:
                tape.at = match.end()
                if not (yield from literals.pass_one(tape)):
                    return False

    return scan


class _Held:
    """The longer of two held back ends."""

    def __init__(self, *beginnings: Beginnings) -> None:
        self._beginnings = beginnings

    def length_at_end(self, text: str, start: int) -> int:
        return max(part.length_at_end(text, start) for part in self._beginnings)


def _balanced(
    outside: re.Pattern[str],
    strings: dict[str, re.Pattern[str]],
    forbidden: re.Pattern[str] | None,
) -> Scanner:
    def scan(tape: Tape) -> Waiting:
        depth = 0
        while True:
            match = outside.search(tape.data, tape.at)
            end = match.start() if match else len(tape.data)
            if forbidden is not None and forbidden.search(tape.data, tape.at, end):
                return False
            tape.at = match.end() if match else end
            if match is None:
                if tape.is_over:
                    return False
                yield
            elif match[0] in strings:
                if not (yield from _string(tape, match[0], strings[match[0]])):
                    return False
            else:
                depth += 1 if match[0] in _OPENING else -1
                if depth == 0:
                    return True

    return scan


def _string(tape: Tape, quote: str, inside: re.Pattern[str]) -> Waiting:
    """Go behind the quote that ends a string; False where no string has what stands there."""
    while True:
        match = inside.match(tape.data, tape.at)
        assert match is not None  # it matches nothing, too
        tape.at = match.end()
        if tape.data.startswith(quote, tape.at):
            tape.at += 1
            return True
        left = len(tape.data) - tape.at
        if tape.is_over or left > 1 or (left == 1 and tape.data[tape.at] != "\\"):
            return False
        yield
