"""A calculator for + - * / and parentheses: a small parser, never `eval`.

Calculator()("35+40")          # "75"
Calculator()("(1.5+2)*3")      # "10.5"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from dialoop.environments.tools.text_tools import ToolInputError

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()]))", re.ASCII)


@dataclass(frozen=True, slots=True)
class Calculator:
    """Exact arithmetic. A malformed expression raises ToolInputError."""

    name: str = "Calculator"
    max_characters: int = 100

    def __call__(self, query: str) -> str:
        """Return the value, integers without a decimal point: "75", "10.5", "0.3333333333"."""
        if len(query) > self.max_characters:
            raise ToolInputError("the expression is too long.")
        parser = _Parser(_tokens(query))
        value = parser.sum()
        parser.require_end()
        return _format(value)


def _tokens(query: str) -> list[str]:
    tokens, position = [], 0
    text = query.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ToolInputError(
                "the expression holds something else than numbers and + - * / ( )."
            )
        tokens.append(match.group(1) or match.group(2))
        position = match.end()
    return tokens


class _Parser:
    """A recursive descent parser: sums of products of signed atoms."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    def sum(self) -> Fraction:
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def require_end(self) -> None:
        if self._position < len(self._tokens):
            raise ToolInputError("the expression is not complete.")

    def _product(self) -> Fraction:
        value = self._factor()
        while (sign := self._take("*", "/")) is not None:
            factor = self._factor()
            if sign == "/" and not factor:
                raise ToolInputError("division by zero.")
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        sign = self._take("+", "-")
        if sign is None:
            return self._atom()
        return self._factor() if sign == "+" else -self._factor()

    def _atom(self) -> Fraction:
        if self._take("(") is not None:
            value = self.sum()
            if self._take(")") is None:
                raise ToolInputError("a parenthesis is not closed.")
            return value
        if self._position == len(self._tokens) or self._tokens[self._position] in "+-*/()":
            raise ToolInputError("the expression is not complete.")
        self._position += 1
        return Fraction(self._tokens[self._position - 1])

    def _take(self, *wanted: str) -> str | None:
        if self._position < len(self._tokens) and self._tokens[self._position] in wanted:
            self._position += 1
            return self._tokens[self._position - 1]
        return None


def _format(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.10g}"
    except OverflowError:
        raise ToolInputError("the result is too large.") from None
