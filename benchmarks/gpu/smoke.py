"""Run what needs a GPU, each check in a process of its own, within 15 minutes.

    python -m benchmarks.gpu.smoke [--output runs/gpu_smoke.json] [--only "NAME;NAME"]

prints a table and writes one JSON with the machine's name. Exit code 0: every check that could run
passed. 1: one failed; its output and logs are kept in a folder beside the JSON. 2: this machine has
no GPU; the table says what would have run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
"""Seconds that all checks together may take; what has no time left is not run."""
NO_GPU = 2

_JOB = """
run = "{name}"
engine = "{engine}"
store = "memory"
console = false
placement = "{placement}"
[resources]
overlap = true
[model]
directory = "{model}"
[inference]
dtype = "{dtype}"
device = "{engine_device}"
max_model_len = 256
data_plane = "{data_plane}"
[collector]
max_new_tokens = 16
[warm_start]
num_steps = 150
learning_rate = 3e-3
[train]
device = "{device}"
autocast = "{autocast}"
num_steps = 3
groups_per_train_step = 4
pipeline_depth = 0
[evaluation]
num_tasks = 8
every = 0
[gates]
policy_versions_at_least = 4
rescoring_s = 30
logprob_difference_at_most = {bound}
"""
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Fields of the jobs' model. vLLM's Qwen2 takes hidden_size / num_attention_heads as head_dim."""
AT_PROBES, AT_SAMPLED = 2.0, 0.5
"""Nats by which log-probs may differ in bfloat16. The probes after a publish are random ids, of
which this model is so sure that they are wrong that rounding moves them by .6 to .9; a publish that
did not arrive moved them by 3.5 and more. Sampled tokens held within .16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. words: its command after `python -m`. needs: packages without which it cannot run.

    job: fields of the job file that it trains with, if it is one, beside those of _ON_VLLM.
    limit_s: how long it may take.
    num_gpus: how many devices it needs. rehearses: whether it can be gone through without one.
    """

    name: str
    what: str
    words: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    job: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 180.0
    num_gpus: int = 1
    rehearses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a check ended: "passed", "failed" or "not run", and why; figures are what it measured."""

    check: str
    status: str
    why: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


_ON_CUDA = {"device": "cuda", "dtype": "bfloat16", "autocast": "bfloat16", "bound": str(AT_PROBES)}
_REHEARSED = {"device": "cpu", "dtype": "float32", "autocast": "", "bound": "1e-4"}
_ON_VLLM = {"engine": "vllm", "engine_device": "cpu"}  # vLLM chooses its device itself
_ON_TRANSFORMERS = {"engine": "transformers", "engine_device": "cuda"}
_STEP = "benchmarks.gpu.train_step"
_CONFORMANCE = "dialoop_ops.conformance.inference"
CHECKS = (
    Check(
        name="train step",
        what="float32 on the GPU against the CPU: log-probs and gradients",
        words=(_STEP, "parity"),
    ),
    Check(
        name="train step, bf16",
        what="autocast, torch's varlen attention; tokens per second, memory against the formula",
        words=(_STEP, "bf16"),
    ),
    Check(
        name="cut kernel",
        what="cut cross-entropy against the chunked head",
        words=(_STEP, "cut"),
        needs=("cut_cross_entropy",),
    ),
    Check(
        name="FSDP of one", what="a model that is sharded over one device", words=(_STEP, "fsdp")
    ),
    Check(
        name="activation offload",
        what="activations in the host's memory: the same gradients, less memory on the device",
        words=(_STEP, "offload"),
    ),
    Check(
        name="transformers engine",
        what="the engine's conformance kit on CUDA: samples, log-probs, loads, adapters, sleep",
        words=(_CONFORMANCE, "transformers", "--device", "cuda"),
    ),
    Check(
        name="transformers engine, log-probs",
        what="log-probs of 64 answers, scored again by the trainer; tokens per second at batch 64",
        words=("benchmarks.gpu.engine",),
    ),
    Check(
        name="job, transformers engine",
        what="trainer and transformers engine on one GPU at the same time, policies over gRPC",
        job={**_ON_TRANSFORMERS, "placement": "split", "data_plane": "chunks"},
        limit_s=300,
    ),
    Check(
        name="job, transformers engine, shared",
        what="trainer and transformers engine take turns on one GPU: sleep, wake, a weights file",
        job={**_ON_TRANSFORMERS, "placement": "shared", "data_plane": "shared_memory"},
        limit_s=300,
    ),
    Check(
        name="vLLM conformance",
        what="samples, log-probs, loads by native reload, streaming, adapters, sleep and wake",
        words=(_CONFORMANCE, "vllm", "--dtype", "{dtype}"),
        needs=("vllm",),
        limit_s=240,
        rehearses=True,
    ),
    Check(
        name="job, chunks",
        what="a job whose policies reach vLLM over gRPC; version labels, re-scored at the end",
        job={"placement": "split", "data_plane": "chunks"},
        needs=("vllm",),
        limit_s=300,
        rehearses=True,
    ),
    Check(
        name="job, shared device",
        what="trainer and vLLM take turns on one GPU: sleep, wake, a weights file",
        job={"placement": "shared", "data_plane": "shared_memory"},
        needs=("vllm",),
        limit_s=300,
    ),
    Check(
        name="job, IPC",
        what="trainer and vLLM on one GPU at the same time, weights by CUDA IPC",
        job={"placement": "split", "data_plane": "ipc"},
        needs=("vllm",),
        limit_s=300,
    ),
    Check(
        name="job, NCCL",
        what="weights by NCCL from the trainer's GPU to the engine's",
        job={"placement": "split", "data_plane": "nccl"},
        needs=("vllm",),
        limit_s=300,
        num_gpus=2,
    ),
)
"""What needs vLLM comes last: the rest runs on a machine with a GPU and without it."""


def gpu_names() -> list[str]:
    """Return the names of the CUDA devices; none where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def obstacle(check: Check, *, num_gpus: int, left_s: float, rehearsal: bool = False) -> str:
    """Return why a check cannot run here; empty if it can."""
    if rehearsal and not check.rehearses:
        return "it is not rehearsed: it needs a GPU"
    if num_gpus < check.num_gpus and not rehearsal:
        return f"it needs {check.num_gpus} GPUs, and there are {num_gpus}"
    missing = [package for package in check.needs if find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    return "" if left_s > 0 else f"the {LIMIT_S} s of all checks are over"


def run_all(
    checks: Sequence[Check],
    *,
    num_gpus: int,
    kept: Path,
    limit_s: float = LIMIT_S,
    rehearsal: bool = False,
) -> list[Outcome]:
    """Run one check after the other; what a failed one wrote goes to a folder in kept."""
    ends_at, outcomes = time.monotonic() + limit_s, []
    for check in checks:
        left_s = ends_at - time.monotonic()
        why = obstacle(check, num_gpus=num_gpus, left_s=left_s, rehearsal=rehearsal)
        if why:
            outcomes.append(Outcome(check=check.name, status="not run", why=why))
            continue
        with tempfile.TemporaryDirectory() as folder:
            limit = min(check.limit_s, left_s)
            outcomes.append(run_one(check, Path(folder), limit_s=limit, rehearsal=rehearsal))
            if outcomes[-1].status == "failed":
                _keep(Path(folder), kept / check.name.replace(", ", "-").replace(" ", "-"))
    return outcomes


def run_one(check: Check, folder: Path, *, limit_s: float, rehearsal: bool = False) -> Outcome:
    """Run a check in a process; the last line of its output may be a JSON object of figures."""
    started = time.monotonic()
    command = [sys.executable, "-m", *_words_of(check, folder, rehearsal=rehearsal)]
    try:
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            done = subprocess.run(
                command,
                stdout=stdout,
                stderr=stderr,
                check=False,
                cwd=folder,
                timeout=limit_s,
                env=os.environ | {"PYTHONPATH": python_path()},
            )
    except subprocess.TimeoutExpired:
        why = f"it took more than {limit_s:.0f} s"
        return Outcome(check=check.name, status="failed", why=why, seconds=limit_s)
    lines, errors = _lines(folder / "stdout"), _lines(folder / "stderr")
    figures = _figures_in(folder, check, lines)
    errors = [*lines, *errors]
    failed = [line for line in errors if line.startswith("FAIL")]
    why = "" if not done.returncode else (failed or errors or ["it printed nothing"])[-1][:300]
    off = (figures.get("rescoring") or {}).get("max_difference") or 0.0
    if not why and off > AT_SAMPLED:
        why = f"log-probs of sampled tokens differ by {off:.2g} nats, more than {AT_SAMPLED}"
    return Outcome(
        check=check.name,
        status="failed" if why else "passed",
        why=why,
        seconds=round(time.monotonic() - started, 1),
        figures=figures,
    )


def python_path() -> str:
    """Return the paths of this checkout, in front of those that the caller has."""
    paths = (ROOT, ROOT / "client", ROOT / "services", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(str(path) for path in paths if str(path))


def _lines(file: Path) -> list[str]:
    text = file.read_text("utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _keep(folder: Path, into: Path) -> None:
    """Copy what a check wrote, without weights, which can be large."""
    weights = shutil.ignore_patterns("model", "policies", "checkpoints")
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(folder, into, ignore=weights)


def _words_of(check: Check, folder: Path, *, rehearsal: bool) -> list[str]:
    if not check.job:
        dtype = _REHEARSED["dtype"] if rehearsal else "bfloat16"
        return [word.format(dtype=dtype) for word in check.words]
    from benchmarks.servers.families import make_family

    model = make_family("qwen2", folder / "model", fields=MODEL)
    text = job_file(check, model, rehearsal=rehearsal)
    (folder / "job.toml").write_text(text, encoding="utf-8")
    return ["dialoop_ops.stack", "train", "job.toml"]


def job_file(check: Check, model: Path, *, rehearsal: bool = False) -> str:
    """Return the job file of a check that trains."""
    where = _REHEARSED if rehearsal else _ON_CUDA
    return _JOB.format(name="smoke", model=model, **{**where, **_ON_VLLM, **check.job})


def _figures_in(folder: Path, check: Check, lines: Sequence[str]) -> dict[str, Any]:
    summary = folder / "runs" / "smoke" / "summary.json"
    if check.job and summary.is_file():
        whole = json.loads(summary.read_text("utf-8"))
        return {name: whole.get(name) for name in ("num_train_steps", "rescoring", "gates")}
    try:
        figures = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {"lines": list(lines)}
    return figures if isinstance(figures, dict) else {}


def report(outcomes: Sequence[Outcome], machine: Mapping[str, Any], output: Path) -> None:
    """Print the table and write the JSON."""
    table = Table("check", "", "s", "why, or what it measured", title=str(machine["gpus"]))
    for outcome in outcomes:
        detail = outcome.why or json.dumps(outcome.figures)
        table.add_row(outcome.check, outcome.status, f"{outcome.seconds:g}", detail)
    Console().print(table)
    rows = [
        {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}
        for outcome in outcomes
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": "gpu_smoke", **machine, "checks": rows}
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_smoke.json"))
    parser.add_argument("--only", default="", help="names of checks, between semicolons")
    parser.add_argument("--rehearse", action="store_true", help="go through some without a GPU")
    options = parser.parse_args(arguments)
    names = {name.strip() for name in options.only.split(";")} if options.only else None
    checks = [check for check in CHECKS if names is None or check.name in names]
    unknown = (names or set()) - {check.name for check in CHECKS}
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}")
    gpus = gpu_names()
    if not gpus and not options.rehearse:
        console = Console()
        console.print("This machine has no GPU that nvidia-smi sees, so nothing was run. With one:")
        for check in checks:
            console.print(f"  {check.name:<24} {check.what}", highlight=False)
        return NO_GPU
    kept, rehearsal = options.output.with_suffix(""), options.rehearse
    outcomes = run_all(checks, num_gpus=len(gpus), kept=kept, rehearsal=rehearsal)
    machine = {
        "rehearsal": rehearsal,
        "gpus": gpus,
        "machine": platform.node(),
        "python": platform.python_version(),
    }
    report(outcomes, machine, options.output)
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
