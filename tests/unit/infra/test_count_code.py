"""A line counts when it holds code; packages of both layouts are told apart."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra import count_code

SOURCE = '''"""A module.

It does things.
"""

import os  # one


class Thing:
    """A thing."""

    name: str = "a"
    """Its name,
    and no code."""

    def text(self) -> str:
        # why
        return """two

lines"""


CALL = print(
    os,
)
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    # import, class, name, def, the return's three lines, and the call's three
    assert count_code.code_lines(SOURCE) == 10
    assert count_code.code_lines('"""Only a docstring."""\n# and a comment\n') == 0


def test_comments_of_lua_are_no_code() -> None:
    assert count_code.lua_lines("-- a\nlocal x = 1 -- b\n\n--[[ c\nd ]]\nreturn x\n") == 2


def write(root: Path, files: dict[str, str]) -> Path:
    for place, text in files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(text, "utf-8")
    return root


def test_each_package_is_counted_and_the_house_is_all_but_extras(tmp_path: Path) -> None:
    checkout = write(
        tmp_path,
        {
            "client/dialoop/__init__.py": "a = 1\n",
            "client/dialoop/v1/chat_pb2.py": "generated = 1\n",
            "client/dialoop/clients/blocking.py": "b = 1\n",
            "client/dialoop_extras/__init__.py": "a = 1\nb = 2\nc = 3\n",
            "client/examples/loop.py": "a = 1\n",
            "services/dialoop_ops/__init__.py": "a = 1\n",
            "services/dialoop_services/__init__.py": "",
            "services/dialoop_services/replay/scripts/x.lua": "return 1\n",
            "tests/unit/test_chat.py": "import dialoop\n",
            "tests/unit/test_compat.py": "import dialoop_extras\nx = 1\n",
            "tests/extras/unit/test_door.py": "x = 1\n",
            "docs/reasons.md": "one two\n",
            "docs/chat.md": "one two three\n",
        },
    )
    counts = count_code.count(checkout)
    assert counts["code"] == {
        "dialoop": 2,
        "dialoop_extras": 3,
        "dialoop_ops": 1,
        "dialoop_services": 0,
        "house": 3,
        "all": 6,
    }
    assert counts["lua"] == {"all": 1}
    assert counts["beside"]["tests"] == 1
    assert counts["beside"]["tests of extras"] == 3
    assert counts["beside"]["client/examples"] == 1
    assert counts["docs"] == {
        "pages": 1,
        "words": 3,
        "generated pages": 1,
        "generated words": 2,
    }


def test_generated_pages_are_those_that_a_script_writes() -> None:
    scripts = Path(count_code.__file__).parent.glob("*.py")
    heads = [script.read_text("utf-8").splitlines()[0] for script in scripts]
    written = [re.search(r'^"""Write docs/([\w-]+)\.md ', head) for head in heads]
    assert {page[1] for page in written if page} == count_code.GENERATED_PAGES


def test_the_script_prints_a_table_or_json(tmp_path: Path) -> None:
    write(tmp_path, {"client/dialoop/__init__.py": "a = 1\n"})
    command = [sys.executable, count_code.__file__, str(tmp_path)]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ["code", "house", "1"] in [line.split() for line in table.splitlines()]
    as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(as_json.stdout)["code"]["house"] == 1


def test_a_folder_without_packages_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No package is in"):
        count_code.count(tmp_path)
