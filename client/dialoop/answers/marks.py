"""What in an answer is a mark: token ids become text in which a mark cannot be mistaken.

A mark that is one token of the tokenizer stands as one lone surrogate, which no decoded text has.
The same characters spelled by several tokens stay text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dialoop.tokens.tokenizer import RunningText

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dialoop.tokens.tokenizer import Tokenizer

_FIRST = 0xDC80


class Spelling:
    """How marks are written in the text that a reader gets; `single` are those of one token."""

    def __init__(self, single: Iterable[str] = ()) -> None:
        self._characters = {mark: chr(_FIRST + i) for i, mark in enumerate(single)}
        self._texts = str.maketrans({c: mark for mark, c in self._characters.items()})
        self._single = _any_of(self._characters)

    def spelled(self, text: str) -> str:
        """Return the text with each of its marks of one token as a reader gets it."""
        if not self._characters:
            return text
        return self._single.sub(lambda match: self._characters[match[0]], text)

    def plain(self, text: str) -> str:
        """Return what the policy wrote."""
        return text.translate(self._texts) if self._characters and not text.isascii() else text

    def has_single(self, text: str) -> bool:
        """Return whether a mark of one token stands in the text of a token."""
        return bool(self._characters) and self._single.search(text) is not None

    def pattern(self, texts: Iterable[str]) -> re.Pattern[str]:
        """Return what finds the first of these texts, the longest where two begin together."""
        return _any_of(self.spelled(text) for text in texts)

    def beginnings(self, texts: Iterable[str]) -> Beginnings:
        """Return what tells whether more text could make one of these texts."""
        return Beginnings(tuple(self.spelled(text) for text in texts))


class Beginnings:
    """The proper beginnings of some texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._all = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._longest = max(map(len, self._all), default=0)
        self._last = frozenset(beginning[-1] for beginning in self._all)

    def length_at_end(self, text: str, start: int) -> int:
        """Return how many of the last characters from `start` on may begin one of the texts."""
        if not text or text[-1] not in self._last:
            return 0
        length = min(self._longest, len(text) - start)
        while length > 0 and text[len(text) - length :] not in self._all:
            length -= 1
        return max(length, 0)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(dict.fromkeys(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class TokenText:
    """The text of a stream of tokens, with its marks as `Spelling` has them.

    A token that ends the turn is held back until another follows: the last one is no text, unless
    it is one of the marks.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._facts = _facts_of(tokenizer, tuple(marks))
        self.spelling = self._facts.spelling
        self._running = RunningText(tokenizer)
        self._ends = frozenset(tokenizer.end_of_turn_ids)
        self._end: int | None = None

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens add."""
        texts: list[str] = []
        run: list[int] = []
        for token in token_ids:
            if self._end is not None:
                self._take(self._end, run, texts)
            self._end = token if token in self._ends else None
            if self._end is None:
                self._take(token, run, texts)
        if run:
            texts.append(self._running.add(run))
        return "".join(texts)

    def finish(self) -> str:
        """Return the rest: broken characters, and the end of the turn where it is a mark."""
        texts: list[str] = []
        if self._end is not None and self._holds_mark(self._end):
            self._take(self._end, [], texts)
        self._end = None
        return "".join((*texts, self._running.rest()))

    def _take(self, token: int, run: list[int], texts: list[str]) -> None:
        """Add a token to the run of those without marks; one with a mark ends the run."""
        run.append(token)
        if not self._holds_mark(token):
            return
        text, own = self._running.add(run), self._tokenizer.decode([token])
        run.clear()
        before = text.removesuffix(own)
        texts.append(before + self.spelling.spelled(text[len(before) :]))

    def _holds_mark(self, token: int) -> bool:
        """Return whether the token's own text holds a mark of one token."""
        known = self._facts.with_mark.get(token)
        if known is None:
            known = self.spelling.has_single(self._tokenizer.decode([token]))
            self._facts.with_mark[token] = known
        return known


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of a tokenizer's tokens for some marks."""

    spelling: Spelling
    with_mark: dict[int, bool] = field(default_factory=dict)


_FACTS: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], _Facts]] = WeakKeyDictionary()


def _facts_of(tokenizer: Tokenizer, marks: tuple[str, ...]) -> _Facts:
    by_marks = _FACTS.setdefault(tokenizer, {})
    if marks not in by_marks:
        single = (mark for mark in marks if tokenizer.single_token(mark) is not None)
        by_marks[marks] = _Facts(spelling_of(tuple(single)))
    return by_marks[marks]


@lru_cache(maxsize=256)
def spelling_of(single: tuple[str, ...]) -> Spelling:
    """Return the spelling with these marks of one token."""
    return Spelling(single)
