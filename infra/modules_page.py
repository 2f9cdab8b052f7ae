"""Write docs/modules.md: every room and module of the product with the first line of its docstring.

.venv/bin/python infra/modules_page.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
# Generated code and the blocking twins have no idea of their own.
LEFT_OUT = ("client/dialoop/v1", "client/dialoop/clients/blocking")
HEAD = """# Every module, a line each

A **room** is a folder that holds one idea. Below, each room of the SDK and of the services with its
modules. [Where things are](where.md) answers questions; this page is for searching by a word.

`infra/modules_page.py` writes this page from the modules' docstrings.
"""


def page() -> str:
    """Return the page's text."""
    packages = [*ROOT.glob("client/dialoop*"), *ROOT.glob("services/dialoop*")]
    rooms = [room for package in sorted(packages) for room in _rooms(package)]
    return "\n".join((HEAD, *rooms))


def _rooms(package: Path) -> Iterator[str]:
    for init in sorted(package.rglob("__init__.py"), key=lambda path: path.parent.as_posix()):
        folder = init.parent.relative_to(ROOT).as_posix()
        if folder.startswith(LEFT_OUT):
            continue
        rows = [
            f"| `{module.name}` | {_first_line(module)} |"
            for module in sorted(init.parent.glob("*.py"))
            if module != init
        ]
        table = "\n".join(("| module | what it does |", "|---|---|", *rows)) if rows else ""
        yield "\n\n".join(filter(None, (f"## `{folder}/`", _first_line(init), table))) + "\n"


def _first_line(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
