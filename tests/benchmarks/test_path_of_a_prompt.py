"""The path's script records what is entered in its window, and counts both layouts by one rule."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import path_of_a_prompt
from benchmarks.path_of_a_prompt import LEFT_OUT, summary
from benchmarks.servers import call_tracer

MODULE = """
def early(): return [late for late in ()]

def late():
    return early

class Thing:
    async def meet(self): pass

def never(): pass
"""
PROGRAM = """
import asyncio, sys, threading, time
from pathlib import Path
sys.path.insert(0, "CHECKOUT/client/dialoop")
import entered_module as entered
window = Path("FOLDER/window")
entered.early()
window.touch()
time.sleep(.2)
thread = threading.Thread(target=entered.late)
thread.start(); thread.join()
asyncio.run(entered.Thing().meet())
window.unlink()
while not any(Path("FOLDER").glob("*.json")): time.sleep(.02)
"""


def test_the_tracer_writes_the_functions_that_were_entered_in_its_window(tmp_path: Path) -> None:
    checkout, folder = tmp_path / "checkout", tmp_path / "folder"
    (checkout / "client/dialoop").mkdir(parents=True)
    folder.mkdir()
    (checkout / "client/dialoop/entered_module.py").write_text(MODULE, "utf-8")
    shutil.copy(call_tracer.__file__, folder / "sitecustomize.py")
    program = PROGRAM.replace("CHECKOUT", str(checkout)).replace("FOLDER", str(folder))
    variables = {
        "PYTHONPATH": str(folder),
        "PATH_ROOT": str(checkout),
        "PATH_FOLDER": str(folder),
    }
    subprocess.run([sys.executable, "-c", program], env=variables, check=True, timeout=60)
    (report,) = (json.loads(path.read_text("utf-8")) for path in folder.glob("*.json"))
    assert report["entered"] == {
        "client/dialoop/entered_module.py": {"late:4": 2, "Thing.meet:8": 1}
    }


def test_modules_of_all_processes_but_the_stack_are_counted_once(tmp_path: Path) -> None:
    module = tmp_path / "client/dialoop/chat.py"
    module.parent.mkdir(parents=True)
    module.write_text("a\nb\n", "utf-8")
    of_it = {"client/dialoop/chat.py": {"f:1": 2}, "benchmarks/servers/models.py": {"g:1": 1}}
    reports: list[dict[str, Any]] = [
        {"main": "services/dialoop_services/trainer/__main__.py", "entered": of_it},
        {"main": "services/dialoop_services/scorer/__main__.py", "entered": of_it},
        {"main": "services/dialoop_ops/stack/__main__.py", "entered": {"services/x.py": {}}},
    ]
    counted = summary(tmp_path, path_of_a_prompt._merge(reports))
    assert (counted["num_modules"], counted["num_lines"], counted["num_functions"]) == (1, 2, 1)
    assert counted["modules"]["client/dialoop/chat.py"]["processes"] == ["scorer", "trainer"]


def test_a_path_without_a_module_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"No module of .* was entered"):
        summary(tmp_path, {})
    left_out = {"client/dialoop/v1/a_pb2.py": {"functions": {"f:1": 1}, "processes": {"trainer"}}}
    with pytest.raises(SystemExit, match=r"No module of .* was entered"):
        summary(tmp_path, left_out)


OF_TWO_PACKAGES = "services/dialoop_services"


@pytest.mark.parametrize(
    ("moved", "to"),
    [
        ("stack/launch/plan.py", "services/dialoop_ops/launch/plan.py"),
        ("stack/job.py", "services/dialoop_ops/stack/job.py"),
        ("config/from_trl.py", "client/dialoop_extras/importers/from_trl.py"),
        ("rest/padded.py", "client/dialoop_extras/rest/padded.py"),
        ("learning/optim.py", "services/dialoop_learning/optim.py"),
        ("rl/advantages.py", "services/dialoop_learning/rl/advantages.py"),
    ],
)
def test_a_module_that_moved_is_counted_or_left_out_as_before(moved: str, to: str) -> None:
    def reasons(module: str) -> list[str]:
        return [why for why, pattern in LEFT_OUT.items() if re.search(pattern, f"/{module}")]

    assert reasons(f"{OF_TWO_PACKAGES}/{moved}") == reasons(to)


@pytest.mark.parametrize(
    ("folder", "package"),
    [
        ("services/dialoop_ops/stack", "dialoop_ops"),
        (f"{OF_TWO_PACKAGES}/stack", "dialoop_services"),
        ("services/stack", "services"),
    ],
)
def test_the_stack_of_each_layout_is_found(tmp_path: Path, folder: str, package: str) -> None:
    (tmp_path / "services/dialoop_services").mkdir(parents=True)
    (tmp_path / folder).mkdir(parents=True)
    root, name = path_of_a_prompt.stack_of(tmp_path)
    assert (root / name / "stack", name) == (tmp_path / folder, package)


def test_a_folder_without_a_stack_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No stack is in"):
        path_of_a_prompt.stack_of(tmp_path)
