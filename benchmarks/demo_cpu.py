"""Measure the CPU seconds and the wall time of the demo, alone or beside another checkout's.

python -m benchmarks.demo_cpu --before CHECKOUT > demo_cpu.json

Every round runs the demo of both checkouts one after the other, each with its own config and in an
empty folder. `cpu_s` is the user and system time of the stack and of all its processes, as the
kernel counts it for those that were waited for. A run whose exit code is not 0 (a gate does not
hold) ends the benchmark. Ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment_doors import ROOT
from benchmarks.path_of_a_prompt import stack_of
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor


@dataclass
class DemoRun:
    """What one run took. load: the machine's load average over a minute, before and after."""

    cpu_s: float
    wall_s: float
    load: tuple[float, float]


def run_demo(checkout: Path, seed: int) -> DemoRun:
    """Run the demo of a checkout, in each layout since 127deda."""
    root, package = stack_of(checkout)
    variables = os.environ | {"PYTHONPATH": f"{checkout / 'client'}:{root}", "SEED": str(seed)}
    config = checkout / "infra" / "configs" / "demo.toml"
    command = [sys.executable, "-m", f"{package}.stack", "train", str(config), "--fresh"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        load, start = os.getloadavg()[0], time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - start
        if code := os.waitstatus_to_exitcode(status):
            output.seek(0)
            sys.stderr.write(output.read()[-3000:].decode(errors="replace"))
            raise SystemExit(f"The demo of {checkout} ended with exit code {code}.")
    cpu_s = usage.ru_utime + usage.ru_stime
    return DemoRun(cpu_s=round(cpu_s, 1), wall_s=round(wall_s, 1), load=(load, os.getloadavg()[0]))


def main() -> None:
    """Print the runs and their ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": arguments.before} if arguments.before else {})
    runs: dict[str, list[DemoRun]] = {name: [] for name in checkouts}
    for seed in range(arguments.rounds):
        for name, checkout in checkouts.items():
            runs[name].append(run_demo(checkout, seed))
            sys.stderr.write(f"{name}, seed {seed}: {runs[name][-1]}\n")
    middle = {
        name: {key: median(getattr(run, key) for run in runs[name]) for key in ("cpu_s", "wall_s")}
        for name in runs
    }
    every = {name: [asdict(run) for run in of] for name, of in runs.items()}
    head: dict[str, Any] = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "seeds": arguments.rounds,
    }
    if "before" in middle:
        before = middle["before"].items()
        head["ratios"] = {key: round(middle["now"][key] / value, 2) for key, value in before}
    print_figures(head | {"runs": every}, {"medians": middle})


if __name__ == "__main__":
    main()
