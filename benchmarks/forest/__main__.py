"""Measure a pass over traces whose sequences begin alike, beside another checkout's packing.

    git worktree add ../before COMMIT
    python -m benchmarks.forest --before ../before > forest.json

Each checkout trains in a process of its own, on the same model, sequences, row budget and threads.
They take turns, trace by trace, so that what else runs on the machine slows both. Ratios are
medians of the ratios of neighbours. Loss and gradients must agree, or the benchmark ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment_doors import ROOT
from benchmarks.servers.figures import print_figures
from benchmarks.servers.forest_way import SHAPE, TRACES, make_trace
from benchmarks.servers.machine import processor

_SAME = 1e-5


class Way:
    """A checkout's process."""

    def __init__(self, checkout: Path, arguments: argparse.Namespace) -> None:
        paths = [checkout / "client", checkout / "services", ROOT]
        options = (arguments.threads, arguments.row_tokens, arguments.scale)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.servers.forest_way", *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": ":".join(map(str, paths))},
        )

    def step(self, trace: str) -> dict[str, float]:
        """Take a step; raise RuntimeError when the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"step {trace}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("A process ended before it answered.")
        figures: dict[str, float] = json.loads(answer)
        return figures

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def figures_of(name: str, scale: float, steps: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return what a trace is, what each way did, and their ratio."""
    trace = make_trace(name, scale)
    num_distinct = trace.num_distinct
    figures: dict[str, Any] = {
        "sequences": len(trace.sequences),
        "tokens": trace.num_tokens,
        "distinct_tokens": num_distinct,
        "reuse": round(trace.num_tokens / num_distinct, 2),
    }
    for way, taken in steps.items():
        wall = median(step["wall_s"] for step in taken)
        figures[way] = {
            "rows": taken[0]["num_rows"],
            "forwarded_per_distinct": round(taken[0]["num_forwarded"] / num_distinct, 4),
            "trained_tokens_per_s": round(taken[0]["num_trained"] / wall),
            "step_s": round(wall, 3),
            "step_cpu_s": round(median(step["cpu_s"] for step in taken), 3),
        }
    if "before" in steps:
        for key in ("loss", "grad_norm"):
            now, before = steps["now"][0][key], steps["before"][0][key]
            if abs(now - before) > _SAME * abs(before) + 1e-7:
                raise SystemExit(f"{name}: {key} is {now} now and was {before} before.")
        for key in ("wall_s", "cpu_s"):
            pairs = zip(steps["before"], steps["now"], strict=True)
            figures[f"times_faster_{key[:-2]}"] = round(
                median(b[key] / n[key] for b, n in pairs), 3
            )
    return figures


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--row-tokens", type=int, default=12_288)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--traces", nargs="*", default=list(TRACES), choices=list(TRACES))
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    checkouts = {"now": ROOT} | ({"before": arguments.before} if arguments.before else {})
    ways = {name: Way(checkout, arguments) for name, checkout in checkouts.items()}
    figures: dict[str, Any] = {}
    try:
        for trace in arguments.traces:
            steps: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, way in ways.items():
                    steps[name].append(way.step(trace))
                    sys.stderr.write(f"{trace}, {name}: {steps[name][-1]}\n")
            figures[trace] = figures_of(trace, arguments.scale, steps)
    finally:
        for way in ways.values():
            way.close()
    facts = {
        "benchmark": "forest",
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "rounds": arguments.rounds,
        "row_tokens": arguments.row_tokens,
        "scale": arguments.scale,
        "model": dict(SHAPE),
    }
    print_figures(facts, {"traces": figures})


if __name__ == "__main__":
    main()
