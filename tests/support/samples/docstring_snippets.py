"""The snippets in a package's public docstrings: found by reading the files, run one by one.

A snippet is a paragraph of a docstring that is Python with a call, an assignment or a definition.
A comment that is a Python expression, up to a colon or whole, says what its line gives, or the line
above it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any

_CODE = (ast.Call, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


ROOT = Path(__file__).parents[3]
OF_SERVICES = re.compile(
    r"dialoop_(learning|services)\b|dialoop_ops\.(stack|console|launch|conformance\.inference)\b"
    r"|dialoop_extras\.(source_names|collates|seed_interface|importers|rest|services)\b"
)
"""Modules whose snippets need torch or a service: test_service_snippets.py runs them."""


def snippets(*, of_services: bool) -> dict[str, str]:
    """Return the snippets of each public module, class and function, by its dotted name."""
    codes_by_place: dict[str, str] = {}
    for file in sorted((*ROOT.glob("client/dialoop*/**/*.py"), *ROOT.glob("services/**/*.py"))):
        parts = file.relative_to(ROOT).with_suffix("").parts[1:]
        module = ".".join(part for part in parts if part != "__init__")
        is_private = any(part[0] == "_" and part != "__main__" for part in module.split("."))
        if is_private or ".v1" in module or bool(OF_SERVICES.match(module)) != of_services:
            continue
        for place, docstring in _docstrings(ast.parse(file.read_text("utf-8")), module):
            if codes := list(_snippets(docstring)):
                codes_by_place[place] = "\n".join(codes)
    return codes_by_place


def _docstrings(node: ast.Module | ast.ClassDef, place: str) -> Iterator[tuple[str, str]]:
    yield place, ast.get_docstring(node) or ""
    for member in node.body:
        if not isinstance(member, _DEFINITIONS) or member.name[0] == "_":
            continue
        if isinstance(member, ast.ClassDef):
            yield from _docstrings(member, f"{place}.{member.name}")
        else:
            yield f"{place}.{member.name}", ast.get_docstring(member) or ""


def _snippets(docstring: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        code = textwrap.dedent(paragraph)
        try:
            nodes = list(ast.walk(ast.parse(code)))
        except SyntaxError:
            continue
        if any(isinstance(node, _CODE) for node in nodes):
            yield code


def module_of(place: str) -> str:
    """Return the module that a dotted name is in."""
    parts = place.split(".")

    def is_module(number: int) -> bool:
        paths = [ROOT.joinpath(source, *parts[:number]) for source in ("client", "services")]
        return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)

    return ".".join(parts[: len(list(takewhile(is_module, range(1, len(parts) + 1))))])


async def run_snippet(place: str, code: str, names: dict[str, Any]) -> None:
    """Run a snippet's statements in turn; a line that says another value is an AssertionError."""
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        is_value = isinstance(statement, ast.Expr)
        value = eval(_compile(statement, place), names)
        if inspect.iscoroutine(value):
            value = await value
        end = statement.end_lineno or 1
        line, below = lines[end - 1], [text for text in lines[end : end + 1] if text[:2] == "# "]
        if is_value and ("# " in line or below):
            comment = line.partition("# ")[2] or below[0][2:]
            for expected in _expectations(comment, names):
                assert is_same(value, expected), f"{place}: {line} gives {value!r}"


def _compile(statement: ast.stmt, place: str) -> CodeType:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if isinstance(statement, ast.Expr):
        return compile(ast.Expression(statement.value), place, "eval", flags=flags)
    return compile(ast.Module([statement], []), place, "exec", flags=flags)


def _expectations(comment: str, names: dict[str, Any]) -> Iterator[Any]:
    """Yield what a comment says, if it is an expression; a comment in words says nothing."""
    for text in (comment, comment.rpartition(": ")[0], comment.partition(": ")[0]):
        try:
            yield eval(text, dict(names))
            return
        except (SyntaxError, NameError, AttributeError, TypeError):
            continue


def is_same(value: Any, expected: Any) -> bool:
    """Say whether a value is the one in a comment, where numbers are rounded to four digits."""
    if isinstance(expected, float):
        return bool(abs(value - expected) < 1e-4)
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        pairs = list(zip(value, expected, strict=False))
        return len(value) == len(expected) and all(is_same(*pair) for pair in pairs)
    if isinstance(expected, Exception):
        return repr(value) == repr(expected)
    return bool(value == expected)
