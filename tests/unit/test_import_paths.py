"""`module:attribute` is loaded in one place, and whoever named it wrongly hears what is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from dialoop.agents import load_agent
from dialoop.environments import load_environment
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.import_paths import load_attribute
from dialoop_extras.text_environment.setups import load_text_setup

ROOT = Path(__file__).parents[2]
PRODUCT = [
    path
    for folder in ("client/dialoop*", "services/dialoop*")
    for path in ROOT.glob(f"{folder}/**/*.py")
    if not path.is_relative_to(ROOT / "client/dialoop/v1")
]
# Modules that import what the product itself names: its own modules, or an optional package.
IMPORT_BY_NAME = {
    "client/dialoop/import_paths.py",
    "client/dialoop/__init__.py",
    "services/dialoop_ops/cli/main.py",
    # The SDK can only ask for the services by name: they may not be installed.
    "client/dialoop_extras/compat/arguments.py",
    "client/dialoop_extras/browser.py",
    "client/dialoop/sandbox/confined/forkserver.py",
    "client/dialoop/sandbox/killed.py",
    "services/dialoop_learning/model/fused_head.py",
    "services/dialoop_services/trainer/records/trackers.py",
}
MODULES = {
    "raises_deeper": "def check():\n    raise KeyError('boom')\n\n\ncheck()\n",
    "raises_in_a_library": "import json\n\njson.loads('{')\n",
    "lacks_a_package": "\nimport no_such_package_at_all\n",
    "no_python": "x = 1\ndef (\n",
    "refuses": "from dialoop.errors import Unavailable\nraise Unavailable('later')\n",
    "sound": "import types\nvalue = types.SimpleNamespace(inner=3)\n",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def load(path, **options):
    return load_attribute(path, what="thing", **options)


def test_an_attribute_is_found_also_within_another(modules):
    assert load("sound:value.inner") == 3


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sound", "There is no thing 'sound'."),
        (":value", "There is no thing ':value'."),
        ("no_such_module:x", "cannot be loaded: No module named 'no_such_module'."),
        ("sound:other", "cannot be loaded: module 'sound' has no attribute 'other'."),
    ],
)
def test_a_path_that_leads_nowhere_is_answered_with_what_would(modules, path, text):
    with pytest.raises(InvalidConfig) as caught:
        load(path, reason="THING_NOT_FOUND", built_in=["one", "two"])
    assert path in caught.value.message
    assert caught.value.message.endswith(text)
    assert caught.value.reason == "THING_NOT_FOUND"
    assert caught.value.remedy.startswith("Use one, two or module:attribute;")


@pytest.mark.parametrize(
    ("name", "line", "text"),
    [
        ("raises_deeper", 2, "KeyError: 'boom'"),
        ("raises_in_a_library", 3, "JSONDecodeError: Expecting property name"),
        ("lacks_a_package", 2, "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("no_python", 2, "SyntaxError: invalid syntax"),
    ],
)
def test_an_exception_of_the_module_is_named_by_type_and_line(modules, name, line, text):
    with pytest.raises(InvalidConfig) as caught:
        load(f"{name}:x")
    assert f"{modules / name}.py, line {line}: {text}" in caught.value.message
    assert "PYTHONPATH" not in caught.value.remedy


def test_an_error_of_ours_that_the_module_raises_stays_itself(modules):
    with pytest.raises(Unavailable, match="later"):
        load("refuses:x")


@pytest.mark.parametrize("loader", [load_agent, load_environment, load_text_setup])
def test_every_loader_names_the_line(modules, loader):
    with pytest.raises(InvalidConfig, match=r"raises_deeper\.py, line 2: KeyError"):
        loader("raises_deeper:x")


def test_no_other_module_imports_by_a_name():
    paths = set()
    for path in PRODUCT:
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Attribute, ast.Name))
        }
        if names & {"import_module", "resolve_name", "__import__", "run_path", "run_module"}:
            paths.add(path.relative_to(ROOT).as_posix())
    assert paths == IMPORT_BY_NAME, "load what a user names with dialoop.import_paths"


def test_a_file_of_python_is_loaded_once_and_its_errors_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("calls = []\n\ndef score():\n    return 1.0\n", "utf-8")
    score = load_attribute("mine.py:score", what="reward function")
    assert score() == 1.0
    assert load_attribute(f"{tmp_path}/mine.py:score", what="reward function") is score
    (tmp_path / "broken.py").write_text("x = 1\nraise ValueError(x)\n", "utf-8")
    for path, words in (
        ("broken.py:score", "broken.py, line 2: ValueError"),
        ("none.py:score", "there is no file"),
        ("mine.py:scores", "no attribute 'scores'"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            load_attribute(path, what="reward function")
