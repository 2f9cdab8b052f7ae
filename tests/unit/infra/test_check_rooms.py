"""Each rule of the house is broken on a small tree of its own, and found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
ROOM = '"""Values. Tokens enter, and text leaves."""\n'
LONG = "# a line\n" * 60


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_rooms", ROOT / "infra/check_rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


check_rooms = load_script()


def keys(root: Path, files: dict[str, str]) -> set[str]:
    """Write the files, in rooms that say enough, and return the keys of what is found."""
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for folder in path.relative_to(root).parents:
            if folder.parts[:2] in {("client", "dialoop"), ("services", "dialoop_services")}:
                init = root / folder / "__init__.py"
                if not init.exists():
                    init.write_text(ROOM, encoding="utf-8")
    return {finding.key for finding in check_rooms.check(root)}


def test_a_tidy_house_has_no_findings(tmp_path: Path) -> None:
    files = {
        "client/dialoop/chat.py": "import dialoop.tokens.texts\n" + LONG,
        "client/dialoop/tokens/texts.py": "class Texts:\n    pass\n" + LONG,
        "tests/unit/test_chat.py": "def test_chat(history): ...\n",
    }
    assert keys(tmp_path, files) == set()


def test_a_folder_of_more_than_twenty_modules_is_found(tmp_path: Path) -> None:
    files = {f"tests/unit/test_{index}.py": "" for index in range(20)}
    files["tests/unit/__init__.py"] = ""
    assert keys(tmp_path, files) == set()
    assert keys(tmp_path, {"tests/unit/test_20.py": ""}) == {"folder tests/unit"}


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    body = "    pass\n"
    files = {
        "benchmarks/long.py": "# a line\n" * 701,
        "benchmarks/fits.py": "# a line\n" * 600,
        "infra/functions.py": f"async def long():\n{body * 60}def fits():\n{body * 59}",
        "client/dialoop/v1/generated_pb2.py": "# a line\n" * 701,
    }
    assert keys(tmp_path, files) == {"file benchmarks/long.py", "function infra/functions.py:long"}


@pytest.mark.parametrize("text", ["", '"""Values."""\n', '"""Reads a.b and writes c.d."""\n'])
def test_a_room_that_says_too_little_is_found(tmp_path: Path, text: str) -> None:
    files = {"services/dialoop_learning/rl/__init__.py": text}
    assert keys(tmp_path, files) == {"room services/dialoop_learning/rl"}


def test_a_room_without_an_init_is_found(tmp_path: Path) -> None:
    keys(tmp_path, {"client/dialoop/wire/records.py": ""})
    (tmp_path / "client/dialoop/wire/__init__.py").unlink()
    assert keys(tmp_path, {}) == {"room client/dialoop/wire"}


@pytest.mark.parametrize(
    "back",
    [
        "from dialoop.chat import Message\n",
        "from ..chat import Message\n",
        "from dialoop import chat\n",
        "if TYPE_CHECKING:\n    import dialoop.chat\n",
        "def read():\n    from dialoop.chat import Message\n",
        "def read():\n    import_module('dialoop.chat')\n",
        "HOMES = {'Message': 'dialoop.chat:Message'}\nimportlib.import_module(HOMES['Message'])\n",
    ],
)
def test_a_cycle_is_found_however_it_is_imported(tmp_path: Path, back: str) -> None:
    files = {
        "client/dialoop/chat.py": "from dialoop.tokens.ids import Ids\n" + LONG,
        "client/dialoop/tokens/ids.py": "import dialoop.tokens.texts\n" + LONG,
        "client/dialoop/tokens/texts.py": back + LONG,
        "client/dialoop/apart.py": "import dialoop.chat\n",
    }
    assert keys(tmp_path, files) == {
        "cycle dialoop.chat",
        "cycle dialoop.tokens.ids",
        "cycle dialoop.tokens.texts",
    }


def test_a_name_of_a_package_above_is_found_where_it_is_imported_as_a_string(
    tmp_path: Path,
) -> None:
    up = "JOBS = 'dialoop_ops.jobs:Job'\nimport_module('dialoop_learning.optim')\n"
    files = {
        "services/dialoop_services/rest/app.py": up + LONG,
        # Said in an error, and imported by nobody.
        "services/dialoop_services/rest/problems.py": "JOBS = 'dialoop_ops.jobs'\n" + LONG,
        "client/dialoop/extras.py": "import_module('dialoop_extras.compat')\n" + LONG,
        "services/dialoop_ops/cli.py": "import_module('dialoop.chat')\n" + LONG,
    }
    assert {key for key in keys(tmp_path, files) if not key.startswith("room")} == {
        "up services/dialoop_services/rest/app.py:dialoop_ops.jobs",
        "up client/dialoop/extras.py:dialoop_extras.compat",
    }


def test_a_short_module_with_one_importer_is_found(tmp_path: Path) -> None:
    files = {
        "client/dialoop/one.py": "import dialoop.short, dialoop.shared, dialoop.long\n" + LONG,
        "client/dialoop/two.py": "import dialoop.shared, dialoop.room\n" + LONG,
        "client/dialoop/short.py": "",
        "client/dialoop/shared.py": "",
        "client/dialoop/long.py": LONG,
        "client/dialoop/room/__init__.py": ROOM + "from dialoop.room.face import Face\n",
        "client/dialoop/room/face.py": "",
        "tests/test_short.py": "import dialoop.short\n",  # a test is no second user
    }
    assert keys(tmp_path, files) == {"small dialoop.short"}


def test_a_class_name_defined_twice_is_found(tmp_path: Path) -> None:
    text = "class Limits: ...\nclass _Parts: ...\n"
    files = {
        "client/dialoop/sessions.py": text,
        "services/dialoop_services/queue.py": text + "class Outer:\n    class Inner: ...\n",
        "services/dialoop_services/store.py": "class Outer2:\n    class Inner: ...\n",
        "tests/unit/test_limits.py": text,
    }
    assert keys(tmp_path, files) == {"class Limits"}


def test_a_table_excuses_findings_and_holds_nothing_else(tmp_path: Path) -> None:
    keys(tmp_path, {"client/dialoop/wire/__init__.py": ""})
    findings = check_rooms.check(tmp_path)
    entry = "room client/dialoop/wire"
    (line,) = check_rooms.complaints(findings, [{}])
    assert line.startswith(entry)
    assert check_rooms.complaints(findings, [{entry: "being moved"}]) == []
    (line,) = check_rooms.complaints([], [{}, {entry: "being moved"}])
    assert line.startswith(f"{entry} is fine by now")
