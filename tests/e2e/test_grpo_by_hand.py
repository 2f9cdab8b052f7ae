"""The loop that can be read: it learns by RL, it stands on public names, and its pointers lead."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "client" / "examples" / "grpo_by_hand.py"
CONCEPTS = ROOT / "docs" / "concepts.md"


@pytest.mark.heavy(reason="it trains for more than a minute")
@pytest.mark.timeout(600)  # a machine that is busy is no fault of what is tested
def test_grpo_raises_heldout_accuracy_after_the_warm_start(tmp_path):
    paths = (ROOT / "client", ROOT / "services")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(EXAMPLE), "--seed", "0", "--json", str(tmp_path / "result.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=580, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    gain = result["heldout_sampled_after"] - result["heldout_sampled_before"]
    assert gain >= 0.3, done.stdout


def test_every_step_of_the_loop_runs(tmp_path, monkeypatch):
    loop = load_example()
    monkeypatch.setattr(loop, "WARM_START_STEPS", 2)
    monkeypatch.setattr(loop, "TRAIN_STEPS", 1)
    monkeypatch.setattr(loop, "GROUPS_PER_STEP", 2)
    monkeypatch.setattr(loop, "MAX_NEW_TOKENS", 4)
    result = asyncio.run(loop.main(0, tmp_path))
    assert (result["seed"], result["heldout_sampled_before"]) == (0, 0.0)  # no answer is that short


def load_example() -> ModuleType:
    """Import the example, which is a program and no module of a package."""
    spec = importlib.util.spec_from_file_location("grpo_by_hand", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_is_short_and_stands_on_public_names():
    text = EXAMPLE.read_text("utf-8")
    assert len(text.splitlines()) <= 300
    tree = ast.parse(text)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    imported = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for name in (getattr(node, "module", "") or "", *(alias.name for alias in node.names))
    ]
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    parts = [part for name in (*imported, *attributes) for part in name.split(".")]
    assert not [part for part in parts if part.startswith("_")]


def test_the_files_that_the_loop_and_the_concepts_name_exist():
    named = re.findall(r"[a-z_]+(?:/[a-z_]+)+\.(?:py|toml)", EXAMPLE.read_text("utf-8"))
    named += re.findall(r"`([\w/]+\.py)`", CONCEPTS.read_text("utf-8"))
    assert len(named) > 20
    folders = (ROOT, ROOT / "services", ROOT / "services" / "dialoop_services")
    missing = [name for name in named if not any((folder / name).is_file() for folder in folders)]
    assert missing == []
