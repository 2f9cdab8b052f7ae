"""Audit real rollouts that are believed clean: runs of this checkout, and dumps of TRL.

    python -m benchmarks.audit.rollouts --trl-python VENV/bin/python > rollouts.json

Each run trains for seconds on the transformers engine. TRL needs a Python of its own over ours, as
`reasoning_race` does; without it only our runs are made. Prints for each the findings, what was
checked, and what was not: the aim is no finding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dialoop.tokens.tokenizer import Tokenizer
from dialoop_ops.audit import Claims, audit

from benchmarks.servers.figures import print_figures

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "infra" / "configs"
ENGINE = ("engine=transformers", "store=memory", "gates.rescoring_s=0", "warm_start.num_steps=200")
SHORT = ("train.num_steps=10", "train.groups_per_train_step=4", "evaluation.num_tasks=16")
TABLE = "train.debug_table_every=1"
# Name -> the config and what is other in it.
OURS: dict[str, tuple[str, ...]] = {
    "demo": ("demo", *SHORT),
    "demo_table": ("demo", *SHORT, TABLE, "seed=1"),
    "demo_warm": ("demo", *SHORT, TABLE, "collector.temperature=0.8", "seed=2"),
    "reasoning": ("reasoning", *SHORT),
    "reasoning_table": ("reasoning", *SHORT, TABLE, "seed=3"),
    "subtraction": ("subtraction", *SHORT, TABLE),
    "cispo": ("demo", *SHORT, TABLE, "train.loss=cispo", "seed=4"),
    "drop_uniform": ("demo", *SHORT, TABLE, "scorer.drop_uniform=true", "seed=5"),
    "small_groups": ("reasoning", *SHORT, TABLE, "collector.group_size=4", "seed=6"),
    "deep_pipeline": ("demo", *SHORT, "train.pipeline_depth=4", "seed=7"),
}
RECIPE: dict[str, Any] = {
    "num_steps": 16,
    "rows": 32,
    "group_size": 8,
    "max_new_tokens": 40,
    "temperature": 1.0,
    "learning_rate": 1e-4,
    "num_tasks": 40,
}
THEIRS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl_seed_1": {"seed": 1},
    "trl_cold": {"temperature": 0.7},
    "trl_small_groups": {"group_size": 4, "num_tasks": 16},
    "trl_long_steps": {"num_iterations": 1, "steps_per_generation": 2},
}


def main() -> int:
    """Make and audit all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="some of them (all)")
    parser.add_argument("--trl-python", default="", help="a Python with TRL; without: ours alone")
    parser.add_argument("--keep", type=Path, help="folder for what is made, instead of a new one")
    options = parser.parse_args()
    unknown = set(options.names) - OURS.keys() - set(THEIRS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dialoop-audit-") as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for name, (config, *settings) in OURS.items():
            if not options.names or name in options.names:
                run = train(folder, name, config, settings)
                note(results, name, run)
        theirs = [n for n in THEIRS if not options.names or n in options.names]
        if options.trl_python and theirs:
            model = base_model(folder)
            for number, name in enumerate(theirs):
                recipe = {"seed": number} | RECIPE | THEIRS[name] | {"model": str(model)}
                out = roll_out(folder, name, recipe, options.trl_python)
                note(results, f"{name}_batches", out / "rollouts.jsonl", model, recipe)
                note(results, f"{name}_tables", out, model, recipe)
    findings = sum(len(result["findings"]) for result in results.values())
    report = {"cpus": os.cpu_count(), "dumps": len(results), "findings": findings}
    rollouts = sum(result["num_rollouts"] for result in results.values())
    print_figures(report | {"results": results}, {"rollouts": rollouts})
    return int(findings > 0)


def note(
    results: dict[str, Any],
    name: str,
    path: Path,
    model: Path | None = None,
    recipe: dict[str, Any] | None = None,
) -> None:
    """Audit a path, and add what came of it."""
    claims = None if recipe is None else Claims(max_new_tokens=recipe["max_new_tokens"])
    tokenizer = None if model is None else Tokenizer.from_directory(model)
    report = audit(path, claims=claims, tokenizer=tokenizer)
    results[name] = {
        "kind": report.kind,
        "num_rollouts": report.num_rollouts,
        "findings": [f"{f.fault}: {f.evidence[0]}" for f in report.findings],
        "checked": list(report.checked),
        "in_part": sorted(report.limits),
        "not_checked": report.not_checked,
        "notes": list(report.notes),
    }
    sys.stderr.write(f"{name}: {results[name]['findings'] or 'no finding'}\n")


def train(folder: Path, name: str, config: str, settings: list[str]) -> Path:
    """Run a job of ours, and return its directory; it may miss gates of its config."""
    run_dir = folder / "runs" / name
    if not (run_dir / "summary.json").is_file():
        words = [word for value in (*ENGINE, *settings) for word in ("--set", value)]
        command = [sys.executable, "-m", "dialoop_ops.stack", "train"]
        _run([*command, str(CONFIGS / f"{config}.toml"), "--run", name, *words], folder, name)
    return run_dir


def base_model(folder: Path) -> Path:
    """Return the model that TRL starts with: ours after the warm start."""
    train(folder, "reasoning", *_split(OURS["reasoning"]))
    model = folder / "model"
    if not model.is_dir():
        words = ["export", "reasoning", "1", str(model)]
        _run([sys.executable, "-m", "dialoop_ops.cli.main", *words], folder, "export")
    return model


def _split(values: tuple[str, ...]) -> tuple[str, list[str]]:
    return values[0], list(values[1:])


def roll_out(folder: Path, name: str, recipe: dict[str, Any], python: str) -> Path:
    """Let TRL train, and return its output directory."""
    out = folder / name
    if not (out / "completions").is_dir():
        words = [json.dumps(recipe | {"out": str(out)})]
        _run([python, "-m", "benchmarks.servers.trl_rollouts", *words], folder, name)
    return out


def _run(command: list[str], folder: Path, name: str) -> None:
    paths = f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"
    with (folder / f"{name}.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": paths},
            check=False,
            timeout=600,
        )


if __name__ == "__main__":
    sys.exit(main())
