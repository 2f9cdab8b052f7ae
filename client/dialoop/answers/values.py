"""JSON and Python literals as a policy writes them, read without trusting them.

Nothing here raises for any text: what cannot be read is None. Text that was JSON keeps its
spelling, so that `1.10` does not become 1.1.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_BLANK = re.compile(r"[ \t\n\r]*")
_DEPTH = 64
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSES = r"(?=\s*(?:[,:)\]}]|\Z))"
_PYTHON_STRING = re.compile(
    r'"((?:[^"\\\n]|\\.)*+)"' + _CLOSES + r"|'((?:[^'\\\n]|\\.)*+)'" + _CLOSES
)
# Some templates write strings without escapes: 'it's'.
_PLAIN_STRING = re.compile(r"'(.*?)'" + _CLOSES, re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\W\d]\w*")
_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_ESCAPED |= {character: character for character in "\\'\""}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonValue:
    """A value and the JSON that spells it."""

    value: Any
    text: str


def read_json(text: str) -> JsonValue | None:
    """Return the one JSON value of the text, with its spelling; None where it is not JSON."""
    try:
        return JsonValue(value=_DECODER.decode(text), text=text.strip(" \t\n\r"))
    except (ValueError, RecursionError):
        return None


def read_members(text: str) -> dict[str, JsonValue] | None:
    """Return the members of a JSON object, each with its spelling; None for anything else."""
    try:
        return _members(text)
    except (ValueError, RecursionError, IndexError):
        return None


def read_elements(text: str) -> list[str] | None:
    """Return how each element of a JSON array is spelled; None for anything else."""
    try:
        return _elements(text)
    except (ValueError, RecursionError, IndexError):
        return None


def as_json(value: Any) -> str:
    """Return compact JSON of a value that was read here; it can be encoded as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if is_encodable(text):
        return text
    return json.dumps(value, separators=(",", ":"))


def is_encodable(text: str) -> bool:
    """Return whether the text has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def argument_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument that stands as plain text, read as one of these types."""
    if types - {"string"}:
        stripped = text.strip()
        read = read_json(_WORDS.get(stripped, stripped))
        if read is not None and _types_of(read.value) & types:
            return read.text
    return as_json(text)


@lru_cache(maxsize=1024)
def argument_types(parameters_json: str) -> Mapping[str, frozenset[str]]:
    """Return the types that a tool's JSON schema gives each argument, where it says any."""
    read = read_json(parameters_json)
    schema = read.value if read is not None and isinstance(read.value, dict) else {}
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: frozenset(_types(part, schema, 0)) for name, part in properties.items()}


def read_python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return name and JSON of each call in `f(a=1)`, `[f(a=1), g()]` or a call a line."""
    try:
        return _Python(text).calls()
    except (ValueError, IndexError):
        return None


def read_bare_object(text: str, quote: str) -> str | None:
    """Return the JSON of Gemma's objects, `{key:<|"|>text<|"|>,number:1}`, for this quote."""
    try:
        reader = _Bare(text, quote)
        value = reader.object(0)
        return as_json(value) if reader.is_at_end else None
    except (ValueError, IndexError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None  # it matches nothing, too
    return match.end()


def _members(text: str) -> dict[str, JsonValue] | None:
    position = _skip(text, 0)
    if text[position] != "{":
        return None
    members: dict[str, JsonValue] = {}
    position = _skip(text, position + 1)
    while text[position] != "}" or members:
        key, position = _DECODER.raw_decode(text, position)
        position = _skip(text, position)
        if not isinstance(key, str) or text[position] != ":":
            return None
        start = _skip(text, position + 1)
        value, end = _DECODER.raw_decode(text, start)
        members[key] = JsonValue(value=value, text=text[start:end])
        position = _skip(text, end)
        if text[position] == "}":
            break
        if text[position] != ",":
            return None
        position = _skip(text, position + 1)
    return members if _skip(text, position + 1) == len(text) else None


def _elements(text: str) -> list[str] | None:
    position = _skip(text, 0)
    if text[position] != "[":
        return None
    elements: list[str] = []
    position = _skip(text, position + 1)
    while text[position] != "]" or elements:
        _, end = _DECODER.raw_decode(text, position)
        elements.append(text[position:end])
        position = _skip(text, end)
        if text[position] == "]":
            break
        if text[position] != ",":
            return None
        position = _skip(text, position + 1)
    return elements if _skip(text, position + 1) == len(text) else None


def _types_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    if isinstance(value, str):
        return frozenset()  # a string argument stands without quotes
    return frozenset({"array" if isinstance(value, list) else "object"})


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    """Return the types that a schema admits, as far as it says."""
    if not isinstance(schema, dict) or depth > _DEPTH // 8:
        return set()
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    found = {name for name in names if isinstance(name, str)}
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else ():
            found |= _types(part, root, depth + 1)
    if not found and isinstance(reference := schema.get("$ref"), str):
        found = _types(_referred(reference, root), root, depth + 1)
    if not found:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        for value in values if isinstance(values, list) else ():
            found |= _types_of(value) or {"string"}
    return found


def _referred(reference: str, root: dict[str, Any]) -> Any:
    part: Any = root
    for name in reference.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, dict) else None
    return part


class _Literals(ABC):
    """Reads literals of a text from left to right; ValueError or IndexError at what is none."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = _skip(text, 0)

    @property
    def is_at_end(self) -> bool:
        """Return whether nothing but blanks is left."""
        return self._at == len(self._text)

    def _takes(self, mark: str) -> bool:
        """Take a mark and the blanks after it; return whether it was there."""
        if not self._text.startswith(mark, self._at):
            return False
        self._at = _skip(self._text, self._at + len(mark))
        return True

    def _need(self, mark: str) -> None:
        if not self._takes(mark):
            raise ValueError(f"{mark} is missing")

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = _skip(self._text, match.end())
        return match[0]

    def _number(self) -> Any:
        spelled = self._match(_NUMBER)
        if spelled is None:
            raise ValueError("no literal")
        try:
            return int(spelled)
        except ValueError:
            return _finite(spelled)

    def _list(self, end: str, depth: int) -> list[Any]:
        values: list[Any] = []
        while not self._takes(end):
            values.append(self._value(depth + 1))
            if not self._takes(","):
                self._need(end)
                break
        return values

    @abstractmethod
    def _value(self, depth: int) -> Any:
        """Return the literal that begins here."""


class _Python(_Literals):
    """Reads Python calls whose arguments are literals with names."""

    def calls(self) -> list[tuple[str, str]]:
        """Return name and JSON of the arguments of each call; they fill the text."""
        found: list[tuple[str, str]] = []
        in_list = self._takes("[")
        while not self.is_at_end:
            found.append(self._call())
            if in_list and self._takes("]"):
                break
            if not self._takes(",") and in_list:
                raise ValueError("no list of calls")
        if not self.is_at_end or not found:
            raise ValueError("no calls alone")
        return found

    def _call(self) -> tuple[str, str]:
        name = self._match(_NAME)
        if name == "print" and self._takes("("):  # Gemma prints what a tool returns
            call = self._call()
            self._need(")")
            return call
        if name is None:
            raise ValueError("no name")
        self._need("(")
        arguments: dict[str, Any] = {}
        while not self._takes(")"):
            key = self._match(_WORD)
            self._need("=")
            arguments[str(key)] = self._value(0)
            if key is None:
                raise ValueError("an argument without a name")
            if not self._takes(","):
                self._need(")")
                break
        return name, as_json(arguments)

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("too deep")
        if self._takes("["):
            return self._list("]", depth)
        if self._takes("("):
            return self._list(")", depth)
        if self._takes("{"):
            return self._dict(depth)
        if (string := self._match(_PYTHON_STRING)) is not None:
            return _ESCAPE.sub(_unescaped, string[1:-1])
        if (string := self._match(_PLAIN_STRING)) is not None:
            return string[1:-1]
        if (word := self._match(_WORD)) is not None:
            return _constant(word)
        return self._number()

    def _dict(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._takes("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("a key that is no string")
            self._need(":")
            values[key] = self._value(depth + 1)
            if not self._takes(","):
                self._need("}")
                break
        return values


class _Bare(_Literals):
    """Reads Gemma's objects: keys without quotes, texts between marks of their own."""

    def __init__(self, text: str, quote: str) -> None:
        super().__init__(text)
        self._quote = quote

    def object(self, depth: int) -> dict[str, Any]:
        """Return the object that begins here."""
        self._need("{")
        values: dict[str, Any] = {}
        while not self._takes("}"):
            key = self._string()
            if key is None:
                end = self._text.index(":", self._at)
                key = self._text[self._at : end].strip()
                self._at = end
            self._need(":")
            values[key] = self._value(depth + 1)
            if not self._takes(","):
                self._need("}")
                break
        return values

    def _string(self) -> str | None:
        if not self._text.startswith(self._quote, self._at):
            return None
        start = self._at + len(self._quote)
        end = self._text.index(self._quote, start)
        self._at = _skip(self._text, end + len(self._quote))
        return self._text[start:end]

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("too deep")
        if (string := self._string()) is not None:
            return string
        if self._text.startswith("{", self._at):
            return self.object(depth)
        if self._takes("["):
            return self._list("]", depth)
        if (word := self._match(_WORD)) is not None:
            return _constant(word)
        return self._number()


def _constant(word: str) -> Any:
    return json.loads(_WORDS.get(word, word), parse_constant=_refuse)


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPED.get(escape, match[0])
