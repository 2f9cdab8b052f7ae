"""Race our job and TRL's GRPOTrainer on SmolLM2-135M-Instruct, on two CPU cores, in float32.

    python -m benchmarks.real.race choose                # TRL's micro-batch and threads
    python -m benchmarks.real.race dialoop --seed 0      # and --seed 1 and 2
    python -m benchmarks.real.race trl --seed 0          # as chosen
    python -m benchmarks.real.race report --target 0.5 > real_race.json

infra/configs/real.toml says what both share: model, tasks, reward, groups, tokens, learning rate.
Each side and seed ends after 75 minutes at the latest, with exit code 3 where work is left: the
same command goes on, with more --num-steps too. Both keep weights every few train steps. When
training has ended, one sampler answers the held-out tasks with each of them, so no clock holds an
evaluation.

Our clock runs from the first live policy on and holds publishes and checkpoints; TRL's holds its
train steps alone, without the writing of checkpoints. Ours plays on until a train step has all its
groups with a signal; TRL trains on what it drew. TRL generates with transformers: its vLLM modes
need CUDA. It gets a virtual environment of its own over ours, which the first run makes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from dialoop_services.config.file import load_with_origins, overrides_of_words, toml_of
from dialoop_services.config.job import JobConfig

from benchmarks.real.__main__ import MODEL, ROOT, fetch_model
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from benchmarks.servers.real_race import live_seconds, sampled_score, write_json

CONFIG = ROOT / "infra" / "configs" / "real.toml"
TRL = "trl>=1.16,<1.17"
NUM_CORES = 2
GOES_ON = 3
"""Exit code of a run that its limit ended: the same command goes on."""
_MARGIN_S = 120.0
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side with one seed: its folder, and the job that says what both sides share."""

    name: str
    folder: Path
    job: JobConfig
    every: int
    deadline: float
    options: Mapping[str, Any]

    @property
    def num_steps(self) -> int:
        """Return how many train steps there are."""
        return self.job.train.num_steps


def job_of(words: Sequence[str], *, seed: int, num_steps: int | None) -> JobConfig:
    """Return the real model's job without its own evaluations; every policy stays on disk."""
    changes = [f"seed={seed}", 'run="race"', "train.keep_policies=0"]
    changes += ["evaluation.num_tasks=0", "evaluation.every=0"]
    changes += [] if num_steps is None else [f"train.num_steps={num_steps}"]
    overrides = overrides_of_words([*words, *changes])
    return load_with_origins(CONFIG, environment={}, overrides=overrides).config


def shared_by(job: JobConfig) -> dict[str, Any]:
    """Return what both sides share."""
    return {
        "groups": job.train.groups_per_train_step,
        "group_size": job.collector.group_size,
        "max_new_tokens": job.collector.max_new_tokens,
        "temperature": job.collector.temperature,
        "learning_rate": job.train.learning_rate,
    }


def run_until(command: Sequence[str], deadline: float, *, cwd: Path) -> None:
    """Run a command; end it gently at the deadline. SystemExit where it fails before."""
    kept = {k: v for k, v in os.environ.items() if k != "SEED" and not k.startswith("DIALOOP_")}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = kept | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=cwd, env=variables, stdout=sys.stderr)
    try:
        code = process.wait(max(1.0, deadline - time.monotonic()))
        if code:
            raise SystemExit(code)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(_MARGIN_S)


def train_ours(side: Side) -> None:
    """Run our job, or go on with it."""
    run_dir = side.folder / "race"
    if max(our_policies(run_dir), default=0) >= side.num_steps:
        return
    (side.folder / "job.toml").write_text(toml_of(side.job), encoding="utf-8")
    command = [sys.executable, "-m", "dialoop_ops.stack", "train", "job.toml", "--folder", "."]
    is_begun = (run_dir / "checkpoints" / "latest.json").is_file()
    run_until([*command, *([] if is_begun else ["--fresh"])], side.deadline, cwd=side.folder)


def our_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of our metrics; none before the run."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def our_policies(run_dir: Path) -> dict[int, Path]:
    """Return the newest weights of each train step."""
    return {
        row["train_step"]: run_dir
        / "policies"
        / f"{row['lineage']}-{row['policy_version']}"
        / "model.safetensors"
        for row in our_rows(run_dir)
        if row["kind"] == "publish"
    }


def train_trl(side: Side) -> None:
    """Run TRL, or go on with it."""
    if max(trl_seconds(side.folder), default=0) >= side.num_steps:
        return
    limit_s = side.deadline - time.monotonic()
    recipe = {
        **shared_by(side.job),
        **{key: side.options[key] for key in ("micro_batch", "threads")},
        "model": str(MODEL),
        "out": str(side.folder),
        "seed": side.job.seed,
        "num_steps": side.num_steps,
        "every": side.every,
        "limit_s": limit_s,
    }
    arguments = ["-W", "ignore", "-m", "benchmarks.servers.trl_instructions", json.dumps(recipe)]
    python = str(Path(side.options["trl_python"]).absolute())
    run_until([python, *arguments], side.deadline + _MARGIN_S, cwd=side.folder)


def trl_seconds(folder: Path) -> dict[int, float]:
    """Return TRL's clock; empty before its first train step."""
    path = folder / "clock.json"
    rows = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return {row["train_step"]: row["wall_s"] for row in rows}


def make_trl_python(folder: Path) -> Path:
    """Return the Python of a virtual environment with TRL over our packages; make it once."""
    python = folder / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site, ours = (
            subprocess.run([of, "-c", ask], check=True, capture_output=True, text=True).stdout
            for of in (python, sys.executable)
        )
        line = f"import site; site.addsitedir({ours.strip()!r})\n"
        Path(site.strip(), "ours.pth").write_text(line, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", TRL]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    return python


def run_side(side: Side) -> Result:
    """Train to the end or the deadline, score what was kept, and write result.json."""
    side.folder.mkdir(parents=True, exist_ok=True)
    load = round(os.getloadavg()[0], 2)
    if side.name == "trl":
        train_trl(side)
        seconds = {0: 0.0, **trl_seconds(side.folder)}
        paths = {step: side.folder / "weights" / f"{step}.safetensors" for step in seconds}
        facts = side.folder / "trl.json"
    else:
        train_ours(side)
        seconds = live_seconds(our_rows(side.folder / "race"))
        paths = our_policies(side.folder / "race")
        facts = side.folder / "race" / "summary.json"
    paths[0] = MODEL / "model.safetensors"
    scores = score_kept(side, {step: paths[step] for step in seconds})
    last = max(seconds)
    result = {
        "side": side.name,
        "seed": side.job.seed,
        "options": {k: v for k, v in side.options.items() if k != "trl_python"},
        "shared": shared_by(side.job),
        "versions": json.loads(facts.read_text("utf-8"))["versions"] if facts.is_file() else {},
        "is_complete": last >= side.num_steps and last - last % side.every in scores,
        "num_train_steps": last,
        "wall_s": round(seconds[last], 1),
        "s_per_train_step": round(seconds[last] / max(1, last), 2),
        "load_before": load,
        "curve": [
            {"train_step": step, "wall_s": round(seconds[step], 1), "sampled": round(score, 4)}
            for step, score in sorted(scores.items())
        ],
    }
    write_json(side.folder / "result.json", result)
    return result


def score_kept(side: Side, weights: Mapping[int, Path]) -> dict[int, float]:
    """Return the scores of every few train steps, while there is time; delete weights not needed.

    Those of the newest step stay: more train steps may follow.
    """
    path = side.folder / "scores.json"
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    scores = {int(step): score for step, score in known.items()}
    took_s = 0.0
    for step, file in sorted(weights.items()):
        is_due = step % side.every == 0
        if is_due and step not in scores:
            begun = time.monotonic()
            if begun + took_s > side.deadline:
                break
            scores[step] = sampled_score(
                MODEL, file, max_new_tokens=side.job.collector.max_new_tokens, num_tasks=96
            )
            took_s = time.monotonic() - begun
            write_json(path, scores)
            sys.stderr.write(f"{side.name}, train step {step}: {scores[step]:.4f}\n")
        if step and step != max(weights):
            file.unlink(missing_ok=True)
    return scores


def choose(arguments: argparse.Namespace, trl_python: Path, deadline: float) -> Result:
    """Time two train steps of TRL with each micro-batch and number of threads; keep the best."""
    folder: Path = arguments.folder
    seconds: dict[tuple[int, int], float] = {}
    for micro_batch in arguments.micro_batch:
        for threads in arguments.threads:
            place = folder / f"choose-{micro_batch}-{threads}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            side = Side(
                name="trl",
                folder=place,
                job=job_of(arguments.set, seed=0, num_steps=2),
                every=0,
                deadline=deadline,
                options={
                    "micro_batch": micro_batch,
                    "threads": threads,
                    "trl_python": str(trl_python),
                },
            )
            train_trl(side)
            took = trl_seconds(place)
            if 2 not in took:
                raise SystemExit(f"Two train steps take longer than {arguments.minutes:g} minutes.")
            seconds[micro_batch, threads] = round(took[2], 2)
            shutil.rmtree(place)
    micro_batch, threads = min(seconds, key=lambda key: seconds[key])
    choice = {
        "micro_batch": micro_batch,
        "threads": threads,
        "seconds_of_two_train_steps": {
            f"{m} rows, {t} threads": s for (m, t), s in seconds.items()
        },
    }
    write_json(folder / "choice.json", choice)
    return choice


def results_in(folder: Path) -> list[Result]:
    """Return every result of a side and a seed."""
    paths = sorted(folder.glob("*/result.json"))
    return [json.loads(path.read_text("utf-8")) for path in paths]


def joined(results: Sequence[Result], target: float) -> dict[str, Any]:
    """Return each run's seconds to the target, medians by side, and each side's over TRL's.

    A run that never came so far counts as longer than any other. SystemExit where runs that are to
    be compared were made with different options.
    """
    by_side: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        hits = [row for row in result["curve"] if row["sampled"] >= target]
        hit = hits[0] if hits else {}
        reached = {
            "wall_s_to_target": hit.get("wall_s"),
            "train_steps_to_target": hit.get("train_step"),
        }
        by_side[result["side"]].append(reached | result)
    for what, rows in (("shared", list(results)), *(("options", r) for r in by_side.values())):
        if len({json.dumps(row[what], sort_keys=True) for row in rows}) > 1:
            raise SystemExit(f"Runs differ in their {what}: delete the folders that do not belong.")
    middles = {
        side: _median([r["wall_s_to_target"] for r in runs]) for side, runs in by_side.items()
    }
    theirs = middles.get("trl")
    return {
        "median_wall_s_to_target": middles,
        "over_trl": {
            side: None if middle is None or not theirs else round(middle / theirs, 3)
            for side, middle in middles.items()
            if side != "trl"
        },
        "runs": {side: sorted(runs, key=lambda run: run["seed"]) for side, runs in by_side.items()},
    }


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, where None is longer than any number; None where that is the median."""
    middle = median(math.inf if value is None else value for value in values)
    return round(middle, 1) if math.isfinite(middle) else None


def report(arguments: argparse.Namespace) -> None:
    """Print what all results show."""
    results = results_in(arguments.folder)
    if not results:
        raise SystemExit(f"Nothing was measured: {arguments.folder} has no result.json.")
    choice = arguments.folder / "choice.json"
    facts = {
        "benchmark": "real.race",
        "processor": processor(),
        "cores": NUM_CORES,
        "target": arguments.target,
        "dtype": "float32",
        "trl_generates_with": "transformers",
        "trl_choice": json.loads(choice.read_text("utf-8")) if choice.is_file() else None,
    }
    print_figures(facts, joined(results, arguments.target))


def parsed() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("choose", "trl", "dialoop", "report"):
        command = commands.add_parser(name)
        command.add_argument("--folder", type=Path, default=ROOT / "runs" / "real_race")
        if name == "report":
            command.add_argument("--target", type=float, required=True, help="score to reach")
            continue
        command.add_argument("--minutes", type=float, default=75.0, help="of this command at most")
        command.add_argument("--set", action="append", default=[], help="KEY=VALUE, on both sides")
        if name != "dialoop":
            many = {"nargs": "+"} if name == "choose" else {}
            sizes, threads = ([16, 64], [1, 2]) if name == "choose" else (None, None)
            command.add_argument("--micro-batch", type=int, default=sizes, **many)
            command.add_argument("--threads", type=int, default=threads, **many)
            command.add_argument("--trl-python", type=Path, help="instead of the one made here")
        if name != "choose":
            command.add_argument("--seed", type=int, default=0)
            command.add_argument("--num-steps", type=int, help="instead of the config's")
            command.add_argument("--every", type=int, default=2, help="train steps between scores")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.absolute()
    return arguments


def options_of(arguments: argparse.Namespace, trl_python: Path) -> dict[str, Any]:
    """Return TRL's options: those of the command line, or else the chosen ones."""
    path = arguments.folder / "choice.json"
    chosen = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    options = {
        key: getattr(arguments, key) or chosen.get(key) for key in ("micro_batch", "threads")
    }
    if not all(options.values()):
        raise SystemExit("Give --micro-batch and --threads, or run `choose` before.")
    return options | {"trl_python": str(trl_python)}


def main() -> int:
    """Run one command; print JSON."""
    arguments = parsed()
    if arguments.command == "report":
        report(arguments)
        return 0
    deadline = time.monotonic() + 60 * arguments.minutes - _MARGIN_S
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    torch.set_num_threads(NUM_CORES)
    fetch_model()
    options: dict[str, Any] = {}
    if arguments.command != "dialoop":
        made = arguments.trl_python or make_trl_python(arguments.folder / "trl-venv")
        if arguments.command == "choose":
            print_figures({"benchmark": "real.race choose"}, choose(arguments, made, deadline))
            return 0
        options = options_of(arguments, made)
        name = f"trl-{options['micro_batch']}-{options['threads']}-seed{arguments.seed}"
    job = job_of(arguments.set, seed=arguments.seed, num_steps=arguments.num_steps)
    side_name = arguments.command
    if side_name == "dialoop":  # each depth is a side
        side_name = f"dialoop_depth_{job.train.pipeline_depth}"
        name = f"{side_name}-seed{arguments.seed}"
    side = Side(
        name=side_name,
        folder=arguments.folder / name,
        job=job,
        every=arguments.every,
        deadline=deadline,
        options=options,
    )
    result = run_side(side)
    print_figures({"benchmark": f"real.race {side.name}"}, result)
    return 0 if result["is_complete"] else GOES_ON


if __name__ == "__main__":
    sys.exit(main())
