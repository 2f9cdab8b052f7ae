"""Measure seconds of RL to 0.85 held-out sampled accuracy: Dialoop beside TRL's GRPOTrainer.

    python -m benchmarks.reasoning_race --trl-python VENV/bin/python > reasoning_race.json

The task is dialoop.tasks.column_addition: one turn, reasoning by columns or a guess. One warm start
(our SFT) makes the model directory that every contender starts from; prompts, reward, group size,
batch, updates per batch, loss and learning rate are the same. They run one after the other, each in
processes of its own. TRL needs an environment of its own over ours:

    .venv/bin/python -m venv --without-pip VENV     # then put our site-packages into a .pth there
    .venv/bin/python -m pip --python VENV/bin/python install trl

Every policy is kept with the moment it was ready, and afterwards all are evaluated by one sampler
at one cadence: the clock of no contender holds any evaluation. `rl_s` begins when the first policy
is live (ours) or training begins (TRL), `from_start_s` with the start of the first process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from benchmarks.servers.race import Recipe, contend, first_above, heldout_accuracy, warm_start

OURS = ("vllm", "transformers", "in_process")
THEIRS = ("trl", "trl_one_thread")
FIGURES = (
    "rl_s_to_threshold",
    "from_start_s_to_threshold",
    "s_per_train_step",
    "rl_cpu_s_per_train_step",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOptions:
    """The options of the command line, except the recipe."""

    contenders: list[str]
    model: str
    trl_python: str
    threshold: float
    every: int
    samples: int


def run_of(name: str, model: Path, recipe: Recipe, options: RaceOptions) -> dict[str, Any]:
    """Return one contender's run, with the accuracy of its policies."""
    with tempfile.TemporaryDirectory(prefix="dialoop-race-") as folder:
        load = os.getloadavg()[0]
        run = contend(name, model, Path(folder), recipe, trl_python=options.trl_python)
        torch.set_num_threads(2)
        curve = []
        for ready in run.policies:
            if ready.train_step % options.every:
                continue
            accuracy = heldout_accuracy(model, ready.path, recipe, samples=options.samples)
            curve.append((ready, accuracy))
            if accuracy >= options.threshold:
                break
    hit = first_above(curve, options.threshold)
    last = run.policies[-1]
    return {
        "rl_s_to_threshold": None if hit is None else round(hit.rl_s, 2),
        "from_start_s_to_threshold": None if hit is None else round(hit.rl_s + run.start_up_s, 2),
        "train_steps_to_threshold": None if hit is None else hit.train_step,
        "s_per_train_step": round(last.rl_s / max(1, last.train_step), 3),
        "start_up_s": round(run.start_up_s, 2),
        "rl_cpu_s_per_train_step": round(run.rl_cpu_s / max(1, last.train_step), 3),
        "cpu_s": round(run.cpu_s, 1),
        "load_before": round(load, 1),
        "curve": [
            {"train_step": r.train_step, "rl_s": round(r.rl_s, 2), "sampled": round(a, 4)}
            for r, a in curve
        ],
    }


def race(recipe: Recipe, options: RaceOptions) -> dict[str, Any]:
    """Run all contenders from one warm start."""
    with tempfile.TemporaryDirectory(prefix="dialoop-race-model-") as folder:
        start = Path(options.model).absolute()
        model = start if options.model else warm_start(Path(folder) / "model", recipe)
        before = heldout_accuracy(model, model / "model.safetensors", recipe, samples=4)
        runs = {}
        for name in options.contenders:
            runs[name] = run_of(name, model, recipe, options)
            sys.stderr.write(f"{name}: {json.dumps(runs[name])}\n")
    return {"seed": recipe.seed, "sampled_before": round(before, 4), **runs}


def ratios(races: list[dict[str, Any]], options: RaceOptions) -> dict[str, Any]:
    """Return ours over the better of TRL's, medians over the seeds: below 1 is faster."""
    by_name: dict[str, Any] = {}
    for name in (name for name in options.contenders if name in OURS):
        for key in FIGURES:
            pairs = []
            for outcome in races:
                theirs = [
                    outcome[other][key]
                    for other in THEIRS
                    if other in outcome and outcome[other][key]
                ]
                if theirs and outcome[name][key]:
                    pairs.append(outcome[name][key] / min(theirs))
            if pairs:
                by_name.setdefault(name, {})[key] = round(median(pairs), 2)
    return by_name


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", default="", help="a Python with TRL; without: ours alone")
    parser.add_argument("--contenders", nargs="+", choices=(*OURS, *THEIRS), default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="", help="a warm-started directory; else it is made")
    parser.add_argument("--threshold", type=float, default=0.85)
    parser.add_argument("--every", type=int, default=2, help="train steps between evaluations")
    parser.add_argument("--samples", type=int, default=2, help="samples of each of 256 tasks")
    for name, value in asdict(Recipe()).items():
        if name != "seed":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    seeds = arguments.pop("seeds")
    chosen = arguments.pop("contenders") or [*OURS, *(THEIRS if arguments["trl_python"] else [])]
    names = ("trl_python", "model", "threshold", "every", "samples")
    options = RaceOptions(contenders=chosen, **{name: arguments.pop(name) for name in names})
    load = os.getloadavg()[0]
    races = [race(Recipe(seed=seed, **arguments), options) for seed in seeds]
    result = {
        "benchmark": "reasoning_race",
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "recipe": arguments,
        "threshold": options.threshold,
    }
    print_figures(result, {"races": races, "ours_over_trl": ratios(races, options)})


if __name__ == "__main__":
    main()
