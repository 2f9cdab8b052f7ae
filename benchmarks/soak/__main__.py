"""Let a whole stack train for half an hour, and measure what grows: memory, descriptors, disk.

python -m benchmarks.soak > soak.json                       # 30 minutes
python -m benchmarks.soak --minutes 6 --groups-in-flight 8

The job is the demo's task with the transformers engine and a real Redis, without a last step. Every
ten seconds the script reads, of each process of the stack, the resident memory and the open
descriptors as the kernel counts them, and the size of the run's folder by what is in it. The load
is the CPU time of all these processes over the time and the cores; `--groups-in-flight` sets it.

The queue's ledger remembers finished tasks up to a bound that the settings state. With the default
it would still fill after half an hour. The job sets a bound that is full after three minutes, so
that what grows later is a leak.

Growth compares the median of the last two minutes with that of minutes four and five. The exit code
is 1 where memory or descriptors of a process grew by more than a twentieth (and by more than 1 MiB,
or by more than 1), or where the disk, without the retained trajectories, is above its bound: two
checkpoints, the policies that the settings keep, and 4 kB of metrics and logs for each train step.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from dialoop.running_stacks import find_stack

from benchmarks.environment_doors import ROOT
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor

EVERY_S = 10.0
WARM_S = (180.0, 300.0)
LAST_S = 120.0
GROWTH = 0.05
SLACK_MIB, SLACK_DESCRIPTORS = 1.0, 1
BYTES_A_STEP = 4000
KEEP_POLICIES, KEEP_EVERY = 4, 1000
# More than the groups between two checkpoints, which a restored trainer may ask for again.
MAX_FINISHED = 400
CONFIG = """
run = "soak"
engine = "transformers"
[inference]
max_model_len = 256
[collector]
max_groups_in_flight = {groups_in_flight}
[warm_start]
num_steps = 220
batch_size = 32
[train]
num_steps = 1000000
groups_per_train_step = 8
checkpoint_every = 20
keep_policies = {keep_policies}
keep_policies_every = {keep_every}
max_trajectories_mb = 50
[evaluation]
num_tasks = 16
every = 200
"""


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 for what has just gone."""
    try:
        if path.is_file():
            return path.stat().st_size
        return sum(size_of(inner) for inner in path.iterdir())
    except FileNotFoundError:
        return 0


def disk_of(run_dir: Path) -> dict[str, int]:
    """Return the bytes of a run's folder by what they are for."""
    sizes = {"trajectories": 0, "policies": 0, "checkpoints": 0, "redis": 0, "other": 0}
    for path in run_dir.iterdir():
        kind = path.name.split("-")[0].split(".")[0]
        sizes[kind if kind in sizes else "other"] += size_of(path)
    return sizes


def sample(run_dir: Path) -> dict[str, Any]:
    """Return the memory, descriptors and CPU seconds of each process of the stack, and the disk."""
    stack = find_stack(run_dir)
    pids = {name: each.get("pid") for name, each in (stack.processes if stack else {}).items()}
    processes: dict[str, dict[str, float]] = {}
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid)
            tree = [process, *process.children(recursive=True)]
            times = [each.cpu_times() for each in tree]
            processes[name] = {
                "mib": sum(each.memory_info().rss for each in tree) / 2**20,
                "descriptors": sum(each.num_fds() for each in tree),
                "cpu_s": sum(each.user + each.system for each in times),
            }
        except (psutil.NoSuchProcess, TypeError):
            continue
    metrics = run_dir / "metrics.jsonl"
    num_steps = metrics.read_text().count('"kind": "train"') if metrics.exists() else 0
    return {
        "at_s": time.monotonic(),
        "processes": processes,
        "disk": disk_of(run_dir),
        "num_steps": num_steps,
    }


def between(samples: list[dict[str, Any]], first_s: float, last_s: float) -> list[dict[str, Any]]:
    """Return the samples of a span of time from the first one on."""
    begin = samples[0]["at_s"]
    return [each for each in samples if first_s <= each["at_s"] - begin <= last_s]


def growth_of(samples: list[dict[str, Any]], name: str, what: str) -> dict[str, float]:
    """Return a process's memory or descriptors early and late, and the growth."""
    end = samples[-1]["at_s"] - samples[0]["at_s"]
    early, late = (
        median(each["processes"][name][what] for each in part if name in each["processes"])
        for part in (between(samples, *WARM_S), between(samples, end - LAST_S, end))
    )
    return {"early": round(early, 1), "late": round(late, 1), "growth": round(late / early - 1, 4)}


def bound_of(samples: list[dict[str, Any]], model_bytes: int, checkpoint_bytes: int) -> int:
    """Return the bytes that may be on the disk beside trajectories and the queue's file."""
    num_steps = samples[-1]["num_steps"]
    # The first, the newest, every thousandth, and each that was evaluated.
    num_policies = 2 + KEEP_POLICIES + num_steps // KEEP_EVERY + num_steps // 200
    return num_policies * model_bytes + 3 * checkpoint_bytes + num_steps * BYTES_A_STEP


def figures_of(samples: list[dict[str, Any]], run_dir: Path) -> dict[str, Any]:
    """Return what was measured, and what is above its bound."""
    names = samples[-1]["processes"].keys()
    table: dict[str, Mapping[str, Any]] = {
        name: {what: growth_of(samples, name, what) for what in ("mib", "descriptors")}
        for name in names
    }
    first, last = between(samples, *WARM_S)[0], samples[-1]
    seconds = last["at_s"] - first["at_s"]
    cpu_s = {n: last["processes"][n]["cpu_s"] - first["processes"][n]["cpu_s"] for n in names}
    model = size_of(run_dir / "model")
    checkpoint = max((size_of(p) for p in (run_dir / "checkpoints").glob("*")), default=0)
    bound = bound_of(samples, model, checkpoint)
    used = sum(last["disk"][kind] for kind in ("policies", "checkpoints", "other"))
    problems = [
        f"{name}: {what} grew from {each['early']} to {each['late']}"
        for name, figures in table.items()
        for what, slack in (("mib", SLACK_MIB), ("descriptors", SLACK_DESCRIPTORS))
        if (each := figures[what])["growth"] > GROWTH and each["late"] - each["early"] > slack
    ]
    if used > bound:
        problems.append(f"the disk has {used} bytes beside trajectories, above {bound}")
    return {
        "minutes": round((last["at_s"] - samples[0]["at_s"]) / 60, 1),
        "load": round(sum(cpu_s.values()) / seconds / len(os.sched_getaffinity(0)), 3),
        "num_train_steps": last["num_steps"],
        "processes": table,
        "mib_every_two_minutes": {
            name: [
                round(each["processes"][name]["mib"], 1)
                for each in samples[::12]
                if name in each["processes"]
            ]
            for name in names
        },
        "disk_mb": {kind: round(size / 1e6, 1) for kind, size in last["disk"].items()},
        "disk_bound_mb": round(bound / 1e6, 1),
        "problems": problems,
    }


def soak(folder: Path, minutes: float, groups_in_flight: int) -> dict[str, Any]:
    """Run the job for so many minutes, and stop it as a user would."""
    config = folder / "job.toml"
    config.write_text(
        CONFIG.format(
            groups_in_flight=groups_in_flight, keep_policies=KEEP_POLICIES, keep_every=KEEP_EVERY
        )
    )
    variables = os.environ | {
        "PYTHONPATH": f"{ROOT / 'client'}:{ROOT / 'services'}",
        "DIALOOP_REPLAY_MAX_FINISHED": str(MAX_FINISHED),
    }
    command = [sys.executable, "-m", "dialoop_ops.stack", "train", str(config)]
    samples: list[dict[str, Any]] = []
    run_dir = folder / "runs" / "soak"
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while not samples or samples[-1]["at_s"] - samples[0]["at_s"] < minutes * 60:
                time.sleep(EVERY_S)
                if process.poll() is not None:
                    raise SystemExit((folder / "output").read_text()[-3000:])
                if run_dir.exists() and (samples or sample(run_dir)["num_steps"]):
                    samples.append(sample(run_dir))
            figures = figures_of(samples, run_dir)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    return figures


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--groups-in-flight", type=int, default=8)
    chosen = parser.parse_args()
    least = (WARM_S[1] + LAST_S) / 60
    if chosen.minutes < least:
        parser.error(f"What grows shows after {least:g} minutes at the earliest.")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(Path(folder), chosen.minutes, chosen.groups_in_flight)
    print_figures({"processor": processor(), "load_before": load}, figures)
    raise SystemExit(bool(figures["problems"]))


if __name__ == "__main__":
    main()
