"""Fail when a Python file has more than 600 lines or a function more than 60."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
FOLDERS = ("client/dialoop", "services", "tests", "benchmarks", "infra")
GENERATED = Path("client/dialoop/v1")


def complaints(path: Path) -> list[str]:
    """One line for the file and for each function that is too long."""
    text = path.read_text("utf-8")
    num_lines = text.count("\n")
    found = []
    if num_lines > MAX_FILE_LINES:
        found.append(f"{path}: {num_lines} lines, more than {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                where = f"{path}:{node.lineno}"
                found.append(f"{where}: {node.name} has {length} lines, over {MAX_FUNCTION_LINES}")
    return found


def main() -> int:
    """Check all our files from the repository's root; 1 when one is too long."""
    files = (path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py")))
    found = [line for path in files if GENERATED not in path.parents for line in complaints(path)]
    sys.stderr.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
