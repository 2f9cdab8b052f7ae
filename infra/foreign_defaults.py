"""Write client/dialoop_extras/importers/defaults.json: the defaults of other trainers' configs.

.venv/bin/python infra/foreign_defaults.py [FOLDER]       # which keeps the wheels of VERSIONS

Nothing of the packages runs: dataclasses are read as source, and hydra's composed YAML as it is.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).resolve().parents[1] / "client/dialoop_extras/importers/defaults.json"
VERSIONS = {"transformers": "5.19.0", "trl": "1.16.0", "peft": "0.21.2", "verl": "0.9.1"}
_CLASSES = {
    "transformers": {"TrainingArguments": "transformers/training_args.py"},
    "trl": {
        "_BaseConfig": "trl/trainer/base_config.py",
        "GRPOConfig": "trl/trainer/grpo_config.py",
        "SFTConfig": "trl/trainer/sft_config.py",
        "AsyncGRPOConfig": "trl/experimental/async_grpo/async_grpo_config.py",
        "ModelConfig": "trl/trainer/model_config.py",
        "ScriptArguments": "trl/scripts/utils.py",
    },
    "peft": {"LoraConfig": "peft/tuners/lora/config.py"},
}
_VERL = "verl/trainer/config/_generated_ppo_trainer.yaml"


def wheel_of(package: str, folder: Path) -> zipfile.ZipFile:
    """Return a package's wheel, which is downloaded unless it lies in the folder."""
    pattern = f"{package}-{VERSIONS[package]}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, f"{package}=={VERSIONS[package]}"], check=True)
    (path,) = folder.glob(pattern)
    return zipfile.ZipFile(path)


def defaults_of_class(source: str, name: str) -> dict[str, Any]:
    """Return the defaults of a dataclass's own fields; an expression as "${...}"."""
    tree = ast.parse(source)
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(cls)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    defaults = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defaults[node.target.id] = _default_in(node.value, constants)
    return defaults


def _default_in(node: ast.expr | None, constants: dict[str, ast.expr]) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        words = {word.arg: word.value for word in node.keywords}
        if "default_factory" in words:
            return {"list": [], "dict": {}}.get(ast.unparse(words["default_factory"]))
        return _default_in(words.get("default"), constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _default_in(constants[node.id], constants)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return f"${{{ast.unparse(node)}}}"


def flat(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables by their dotted names."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{path}{name}.")
        elif name != "_target_":
            yield f"{path}{name}", value


def table(folder: Path) -> dict[str, Any]:
    """Return versions and defaults of the packages, whose wheels lie or are put in the folder."""
    defaults: dict[str, Any] = {"versions": VERSIONS}
    for package, classes in _CLASSES.items():
        with wheel_of(package, folder) as wheel:
            for name, path in classes.items():
                defaults[name] = defaults_of_class(wheel.read(path).decode("utf-8"), name)
    with wheel_of("verl", folder) as wheel:
        defaults["verl"] = dict(flat(yaml.safe_load(wheel.read(_VERL))))
    return defaults


def main() -> None:
    """Write the table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch)
        TABLE.write_text(json.dumps(table(folder), indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
