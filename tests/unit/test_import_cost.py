"""What an import brings along; measured in a process of its own."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import dialoop
import dialoop.chat
import dialoop_extras.compat.chat
import dialoop_extras.compat.history
import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    *("grpc", "google", "numpy", "tokenizers", "jinja2", "rich", "pydantic"),
    *("torch", "transformers", "vllm"),
}
MODELS = {"torch", "transformers", "vllm", "safetensors"}
MEASURE = """
import json, sys, time
before, started = set(sys.modules), time.process_time()
import {module}
spent = time.process_time() - started
loaded = sorted(name.partition(".")[0] for name in set(sys.modules) - before)
print(json.dumps([spent, loaded]))
"""


def modules_after(module: str) -> tuple[float, set[str]]:
    """Return CPU seconds, and the top-level names of the modules that were loaded."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    spent, loaded = json.loads(done.stdout)
    return spent, set(loaded)


def test_import_dialoop_loads_nothing_heavy_and_is_quick():
    tries = [modules_after("dialoop") for _ in range(5)]
    assert not tries[0][1] & HEAVY
    assert min(spent for spent, _ in tries) < 0.1


def test_the_command_loads_nothing_heavy():
    _, loaded = modules_after("dialoop_ops.cli.main")
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "module",
    [
        "dialoop_services.environment.servicer",
        "dialoop_services.replay.servicer",
        "dialoop.clients.connection",
    ],
)
def test_services_without_a_model_load_no_torch(module):
    _, loaded = modules_after(module)
    assert not loaded & MODELS


def test_pydantic_comes_with_the_first_tool_and_not_before():
    _, loaded = modules_after("dialoop.environments")
    assert "pydantic" not in loaded


def test_every_exported_name_is_there_and_no_other():
    for name, home in dialoop._HOMES.items():  # `collect` is another name of Collection
        assert getattr(dialoop, name) is getattr(importlib.import_module(f"dialoop.{home}"), name)
    tree = ast.parse((ROOT / "client" / "dialoop" / "__init__.py").read_text())
    typed = [n for node in tree.body if isinstance(node, ast.If) for n in ast.walk(node)]
    aliases = [alias.name for n in typed if isinstance(n, ast.ImportFrom) for alias in n.names]
    assert sorted(aliases) == sorted(dialoop.__all__) == sorted(dialoop._HOMES)
    assert set(dialoop.__all__) <= set(dir(dialoop))


def test_a_name_that_is_not_exported():
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        _ = dialoop.trainer


def test_history_and_chat_have_the_names_of_dialoop_chat():
    both = (dialoop_extras.compat.history, dialoop_extras.compat.chat)
    own = {"History", "add_chat_template", "lazy_stack"}
    for name in dialoop_extras.compat.history.__all__:
        (value,) = {getattr(module, name) for module in both}
        assert name in own or value is getattr(dialoop.chat, name)
