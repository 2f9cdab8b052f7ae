"""What a run was started with: run.json as flat keys, and where several runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dialoop.errors import DialoopError
from dialoop.representations import without_secrets
from dialoop.tokens.tokenizer import Tokenizer

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
MISSING = "-"
_OWN, _OWN_TABLES = ("run", "seed"), ("ports.", "versions.", "started_with.")
"""Keys, and tables, in which seeds of one variant may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigLine:
    """One key, its value in each run as JSON text ("-" where it has none), and if they differ."""

    key: str
    values: tuple[str, ...]
    differs: bool


def find_run(name: str | Path, root: Path) -> Path:
    """Return the directory of a run that is named by it, or by the run's name under `root`."""
    here, there = Path(name), root / name
    is_here = (here / RUN_FILE).is_file() or (here.is_dir() and not there.is_dir())
    return here if is_here else there


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return run.json; {} where it is missing or torn."""
    return read_object(run_dir / RUN_FILE)


def flat_config(run_dir: Path) -> dict[str, str]:
    """Return each key of the run's config with its value as JSON, and what else it started with.

    That is the origin of each value that is not the default, the code, a digest of the installed
    packages and the versions of some. The command is left out: it may contain a secret.
    """
    run = read_run(run_dir)
    config = dict(flat(without_secrets(run.get("config", {}))))
    started = run.get("started_with")
    facts = {
        name: started[name]
        for name in ("origins", "branch_of", "code", "packages")
        if isinstance(started, dict) and started.get(name)
    }
    versions = read_object(run_dir / SUMMARY_FILE).get("versions", {})
    return config | dict(flat(facts, "started_with.")) | dict(flat(versions, "versions."))


def settings_of(run_dir: Path) -> dict[str, str]:
    """Return the config without what may differ between the seeds of one variant."""
    config = flat_config(run_dir)
    return {k: v for k, v in config.items() if k not in _OWN and not k.startswith(_OWN_TABLES)}


def compare_configs(configs: Sequence[Mapping[str, str]]) -> tuple[ConfigLine, ...]:
    """Return a line for each key of any config, in the order of the first that has it."""
    keys = dict.fromkeys(key for config in configs for key in config)
    lines = ((key, tuple(config.get(key, MISSING) for config in configs)) for key in keys)
    return tuple(
        ConfigLine(key=key, values=values, differs=len(set(values)) > 1) for key, values in lines
    )


def tokenizer_of(run_dir: Path) -> Tokenizer | None:
    """Return the tokenizer of the run's model, or None where it is gone."""
    try:
        config = json.loads((run_dir / RUN_FILE).read_text("utf-8"))["config"]
        return Tokenizer.from_directory(Path(config["model"]["directory"] or run_dir / "model"))
    except (OSError, ValueError, KeyError, TypeError, DialoopError):
        return None


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key, as "train.loss", with its value as JSON."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; {} where it is missing or torn."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
