"""The lines of the evidence: what each runs, and the figures that it leaves.

A line's process has a limit. Its figures are read from what it has written, while it runs too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.place import Place

_LOOK_EVERY_S, _GRACE_S = 2.0, 30.0
_READY = re.compile(r"^\s*([\d.]+) s\s+(\w+)\s+(?:ready at|all services are ready)")
_TOOK = re.compile(r"\b(?:took|finished in) [\d.]+ ?s", re.IGNORECASE)
_REHEARSED: Mapping[str, object] = {
    "train.device": "cpu",
    "train.autocast": "",
    "train.groups_per_train_step": 4,
    "inference.dtype": "float32",
    "inference.max_model_len": 512,
    "inference.max_num_seqs": 32,
    "inference.kv_cache_mib": 64,
    "collector.max_new_tokens": 16,
    "collector.max_groups_in_flight": 8,
    "evaluation.num_tasks": 8,
    "gates.logprob_difference_at_most": 1e-4,
}
"""What of the job file a tiny model on a CPU needs otherwise."""
_SETTINGS = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a line ended: "passed", "failed", "cut" or "not run", and why; "running" until then."""

    status: str
    why: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


Note = Callable[[Ended], None]
Run = Callable[[Place, float, Note], Ended]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line. number: its place in the order. least_s: it does not begin with less time left.

    needs_gpus: how many; a rehearsal goes through it where it is 1 and `rehearses`.
    """

    number: int
    name: str
    what: str
    run: Run
    least_s: float = 60.0
    limit_s: float = 300.0
    needs_gpus: int = 1
    rehearses: bool = True


def run_line(line: Line, place: Place, *, limit_s: float, note: Note) -> Ended:
    """Run a line, or say why it cannot be run here."""
    if place.is_rehearsal and not line.rehearses:
        return Ended(status="not run", why="it is not rehearsed: it needs a GPU")
    if place.num_gpus < line.needs_gpus and not place.is_rehearsal:
        why = f"it needs {line.needs_gpus} GPUs, and there are {place.num_gpus}"
        return Ended(status="not run", why=why)
    return line.run(place, limit_s, note)


def _train(  # noqa: PLR0913 - what a line says of its job
    place: Place,
    limit_s: float,
    note: Note,
    *,
    run: str,
    steps: int | None = None,
    rehearsed_steps: int = 2,
    settings: _SETTINGS = MappingProxyType({}),
    is_fresh: bool = True,
) -> Ended:
    """Train with the job file as it is, for some of its steps; or go on, if it is not fresh."""
    own = {**(_REHEARSED if place.is_rehearsal else {}), **settings}
    num_steps = rehearsed_steps if place.is_rehearsal else steps
    if num_steps is not None:
        own["train.num_steps"] = num_steps
    words = ["-m", "dialoop_ops.stack", "train", "job.toml", "--run", run]
    words += ["--folder", str(place.work / "runs"), *["--fresh"] * is_fresh]
    words += [word for key, value in own.items() for word in ("--set", f"{key}={value}")]
    begun = time.time()
    out = place.work / f"{run}-{num_steps or 'all'}.out"
    read = partial(job_figures, place.work / "runs" / run, out, begun=begun)
    more = {"VLLM_LOGGING_LEVEL": "INFO"}  # vLLM says then what its start consists of
    code = _run(
        place, words, out, limit_s, cwd=place.job, more=more,
        on_look=lambda: note(Ended(status="running", figures=read())),
    )  # fmt: skip
    return replace(_outcome(code, out, limit_s), figures=read())


def job_figures(run_dir: Path, out: Path, *, begun: float) -> dict[str, Any]:
    """Return what a job has shown so far: times of the start at `begun`, rewards of all starts."""
    lines = out.read_text("utf-8", errors="replace").splitlines() if out.is_file() else []
    ready = {m[2]: float(m[1]) for m in map(_READY.match, lines) if m}
    metrics = _rows_of(run_dir / "metrics.jsonl")
    rows = [row for row in metrics if row["time"] >= begun]
    steps = [row for row in rows if row["kind"] == "train"]
    publishes = [row for row in rows if row["kind"] == "publish"]
    times = [row["time"] for row in steps]
    seconds = {
        name: statistics.median(row[f"{name}_s"] for row in steps)
        for name in ("lease", "train", "publish")
        if steps
    }
    if len(times) > 1:
        seconds["step"] = statistics.median(b - a for a, b in itertools.pairwise(times))
    log = run_dir / "logs" / "inference.log"
    took = [line for line in _lines_of(log) if _TOOK.search(line)]
    summary = run_dir / "summary.json"
    ended = json.loads(summary.read_text("utf-8")) if _is_newer(summary, begun) else {}
    return {
        "ready_s": ready.pop("stack", None),
        "ready_by_service_s": ready,
        "engine_start": [line[-160:] for line in took[-20:]],
        "num_steps": len(steps),
        "median_s": seconds,
        "rewards": [round(row["reward"], 4) for row in metrics if row["kind"] == "train"],
        "truncated_share": [row["truncated_share"] for row in steps],
        "trained_tokens": sum(row["num_trained_tokens"] for row in steps),
        "publish_mib": max((row["num_bytes"] / 2**20 for row in publishes), default=0.0),
        "largest_difference_at_probes": max(
            (row["max_logprob_difference"] for row in publishes), default=None
        ),
        "heldout": {r["label"]: r["mean_reward"] for r in metrics if r["kind"] == "evaluation"},
        **{name: ended.get(name) for name in ("rescoring", "gates", "trainer_seconds_by_phase")},
    }


def _rows_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the whole rows of a file that somebody may be writing."""
    text = metrics.read_text("utf-8") if metrics.is_file() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def _lines_of(file: Path) -> list[str]:
    return file.read_text("utf-8", errors="replace").splitlines() if file.is_file() else []


def _is_newer(file: Path, begun: float) -> bool:
    return file.is_file() and file.stat().st_mtime >= begun


def _smoke(place: Place, limit_s: float, note: Note, *, check: str) -> Ended:
    """Run one check of gpu-smoke."""
    name = check.replace(", ", "-").replace(" ", "-")
    report, out = place.work / f"{name}.json", place.work / f"{name}.out"
    report.unlink(missing_ok=True)
    words = ["-m", "benchmarks.gpu.smoke", "--only", check, "--output", str(report)]
    code = _run(place, [*words, *["--rehearse"] * place.is_rehearsal], out, limit_s)
    if not report.is_file():
        return _outcome(code, out, limit_s)
    (row,) = json.loads(report.read_text("utf-8"))["checks"]
    return Ended(status=row["status"], why=row["why"], figures=row["figures"])


def _rates(place: Place, limit_s: float, note: Note, *, is_invariant: bool = False) -> Ended:
    """Measure vLLM through Dialoop and by itself."""
    out = place.work / f"rates{'-invariant' * is_invariant}.out"
    words = ["-m", "benchmarks.gpu.rates", str(place.model)]
    more = {"VLLM_BATCH_INVARIANT": "1"} if is_invariant else {}
    if place.is_rehearsal:
        words += ["--dtype", "float32", "--requests", "8", "--new-tokens", "16"]
        words += ["--kv-cache-mib", "64"]
    code = _run(place, words, out, limit_s, more=more)
    figures = [line for line in _lines_of(out) if line.startswith("{")]
    return replace(_outcome(code, out, limit_s), figures=json.loads(figures[-1]) if figures else {})


def _run(  # noqa: PLR0913 - a process and its bounds
    place: Place,
    words: Sequence[str],
    out: Path,
    limit_s: float,
    *,
    cwd: Path | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
    on_look: Callable[[], None] = lambda: None,
) -> int | None:
    """Run Python with its output in a file; return its exit code, None where the time was over.

    A job that is stopped saves what it has, for which it gets half a minute.
    """
    ends_at = time.monotonic() + limit_s
    with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
        process = subprocess.Popen(
            (sys.executable, *words),
            stdout=stdout,
            stderr=stderr,
            cwd=cwd or place.work,
            env={**place.environment, **more},
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < ends_at - _GRACE_S:
                time.sleep(min(_LOOK_EVERY_S, max(0.0, limit_s)))
                on_look()
            if process.poll() is not None:
                return process.returncode
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _outcome(code: int | None, out: Path, limit_s: float) -> Ended:
    if code is None:
        return Ended(status="cut", why=f"it took more than {limit_s:.0f} s")
    if not code:
        return Ended(status="passed")
    lines = [*_lines_of(out), *_lines_of(out.with_suffix(".err"))]
    text = [line.strip() for line in lines if line.strip()]
    fails = [line for line in text if line.startswith(("FAIL", "  fails", "dialoop"))]
    return Ended(
        status="failed", why=f"exit code {code}: {(fails or text or ['silence'])[-1][:300]}"
    )


_SHORT: _SETTINGS = {"evaluation.num_tasks": 0, "gates.rescoring_s": 0}
LINES = (
    Line(
        number=1,
        name="job",
        what="SmolLM2-135M learns from the job file as it is: times of step, train and publish",
        run=partial(_train, run="smollm2", steps=12),
        limit_s=400,
    ),
    Line(
        number=2,
        name="ready",
        what="the same job is ready, with the caches that the first start left",
        run=partial(_train, run="warm", steps=1, rehearsed_steps=1, settings=_SHORT),
        limit_s=200,
    ),
    Line(
        number=3,
        name="conformance",
        what="the engines' kit on vLLM: log-probs, loads, adapters, sleep that frees memory",
        run=partial(_smoke, check="vLLM conformance"),
        limit_s=240,
    ),
    Line(
        number=3,
        name="job_chunks",
        what="a job whose policies reach vLLM over gRPC",
        run=partial(_smoke, check="job, chunks"),
    ),
    Line(
        number=3,
        name="job_shared",
        what="trainer and vLLM take turns on one GPU",
        run=partial(_smoke, check="job, shared device"),
        rehearses=False,
    ),
    Line(
        number=3,
        name="job_ipc",
        what="weights by CUDA IPC, on one GPU at the same time",
        run=partial(_smoke, check="job, IPC"),
        rehearses=False,
    ),
    Line(
        number=4,
        name="heldout",
        what="the first line's job goes on to its end: held-out rewards after 60 steps",
        run=partial(_train, run="smollm2", rehearsed_steps=4, is_fresh=False),
        least_s=150,
        limit_s=500,
    ),
    Line(
        number=5,
        name="rates",
        what="tokens per second through Dialoop's engine beside plain AsyncLLM",
        run=_rates,
        limit_s=240,
    ),
    Line(
        number=5,
        name="batch_invariant",
        what="a row's numbers alone and among others, in vLLM's batch-invariant mode",
        run=partial(_rates, is_invariant=True),
        limit_s=240,
        rehearses=False,
    ),
    Line(
        number=5,
        name="job_nccl",
        what="weights by NCCL from the trainer's GPU to the engine's",
        run=partial(_smoke, check="job, NCCL"),
        needs_gpus=2,
        rehearses=False,
    ),
)
"""In the order in which they run: each is worth more than all after it."""
