"""Count a checkout's code by package: lines that are not blank, comment or docstring.

    .venv/bin/python infra/count_code.py [CHECKOUT] [--json]

Packages are the folders `dialoop*` of `client/` and `services/`, two or five of them; `house` is
all of them but extras. Modules made from protos (`dialoop/v1`) are left out, blocking twins are
counted. A test belongs to extras when it lies in `tests/extras` or names them. Lua is counted
without blanks and comments, docs in words.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

LEFT_OUT = "dialoop/v1/"
BESIDE = ("client/examples", "benchmarks", "infra")
GENERATED_PAGES = frozenset({"reasons"})
"""Pages of docs/ that a script of infra/ writes whole."""
_NO_CODE = frozenset(
    getattr(tokenize, kind)
    for kind in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
)


def code_lines(source: str) -> int:
    """Return how many lines hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    # A string that is a statement by itself documents what stands around or before it.
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def lua_lines(source: str) -> int:
    """Return how many lines of Lua are neither blank nor a comment."""
    without_blocks = re.sub(r"--\[\[.*?\]\]", "", source, flags=re.DOTALL)
    lines = (line.strip() for line in without_blocks.splitlines())
    return sum(bool(line) and not line.startswith("--") for line in lines)


def count(checkout: Path) -> dict[str, dict[str, int]]:
    """Return lines of code, of Lua, beside the packages, and words of docs."""
    packages = {
        folder.name: _python(_files(folder, "**/*.py"))
        for source in ("client", "services")
        for folder in sorted((checkout / source).glob("dialoop*"))
        if (folder / "__init__.py").is_file()
    }
    if not packages:
        raise SystemExit(f"No package is in {checkout}: name a checkout of this repository.")
    extras = packages.get("dialoop_extras", 0)
    tests = _files(checkout / "tests", "**/*.py")
    folder = checkout / "tests" / "extras"
    of_extras = [
        test
        for test in tests
        if test.is_relative_to(folder) or "dialoop_extras" in test.read_text("utf-8")
    ]
    pages = {
        page.stem: len(page.read_text("utf-8").split()) for page in (checkout / "docs").glob("*.md")
    }
    by_hand = [words for name, words in pages.items() if name not in GENERATED_PAGES]
    lua = _files(checkout, "services/**/*.lua")
    return {
        "code": packages
        | {"house": sum(packages.values()) - extras, "all": sum(packages.values())},
        "lua": {"all": sum(lua_lines(script.read_text("utf-8")) for script in lua)},
        "beside": {
            "tests": _python(tests) - (num_of_extras := _python(of_extras)),
            "tests of extras": num_of_extras,
            **{place: _python(_files(checkout / place, "**/*.py")) for place in BESIDE},
        },
        "docs": {
            "pages": len(by_hand),
            "words": sum(by_hand),
            "generated pages": len(pages) - len(by_hand),
            "generated words": sum(pages.values()) - sum(by_hand),
        },
    }


def _python(files: Iterable[Path]) -> int:
    return sum(code_lines(file.read_text("utf-8")) for file in files)


def _files(folder: Path, pattern: str) -> list[Path]:
    return [f for f in sorted(folder.glob(pattern)) if LEFT_OUT not in f.as_posix()]


def main() -> None:
    """Print the count of a checkout, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts = count(options.checkout)
    if options.json:
        sys.stdout.write(json.dumps(counts, indent=2) + "\n")
        return
    for kind, of_it in counts.items():
        for name, number in of_it.items():
            sys.stdout.write(f"{kind:<7}{name:<20}{number:>8,}\n")


if __name__ == "__main__":
    main()
