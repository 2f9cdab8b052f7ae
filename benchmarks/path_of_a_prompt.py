"""Count the modules that one prompt goes through, from its task's lease to the publish after it.

    python -m benchmarks.path_of_a_prompt [--checkout DIRECTORY] [--name NAME]

Runs a small job of the checkout (every service a process, transformers engine, queue in memory) and
records, in all of its processes, which functions are entered while GRPO is under way: from a
publish in mid-training to the second publish after it. In between whole groups are leased, played,
scored, trained on and published; at least one of them must have an episode of two turns. Prints
one JSON object. Works on any commit of this repository since 127deda.

Counted are modules of which at least one function is entered, with all their lines, but for those
that every call passes and that say nothing of the algorithm, and start-up:

    generated   dialoop/v1, the blocking clients
    wire        dialoop/wire, clients/channel, the services' gRPC and REST plumbing (runtime, rest)
    settings    config and settings modules
    telemetry   metrics, counters, records, trackers, status
    start-up    __init__ and __main__ modules, the stack (it starts and watches the processes);
                and all that is entered before the window only
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]

OURS = ("client/dialoop/", "services/")
LEFT_OUT = {
    "generated": r"dialoop/v1/|clients/blocking|/blocking(_|\.)",
    "wire": r"dialoop/wire/|clients/channel\.py|/runtime/|/rest/",
    "settings": r"/config/|settings\.py|/config(_\w+)?\.py",
    "telemetry": r"/(metrics|counters|records/\w+|records|trackers|status)\.py",
    "start-up": r"/__(init|main)__\.py|/stack/",
}
"""Regular expressions on a module's path; `environment/records.py` holds sessions, and counts."""
COUNTED_ANYWAY = r"environments?/(sessions/)?records\.py"

CONFIG = """
run = "path"
engine = "transformers"
store = "memory"
[collector]
group_size = 4
max_new_tokens = 24
max_groups_in_flight = 4
[warm_start]
num_steps = 100
batch_size = 32
learning_rate = 3e-3
[train]
num_steps = 500
groups_per_train_step = 2
loss = "grpo"
checkpoint_every = 1000
[evaluation]
num_tasks = 4
every = 0
"""

TRACER = """
import json, os, sys, threading, time
ROOT, FOLDER = os.environ["PATH_ROOT"], os.environ["PATH_FOLDER"]
entered = set()
add = entered.add

def profile(frame, event, _):
    if event == "call":
        add(frame.f_code)

def watch():
    window, report = os.path.join(FOLDER, "window"), os.path.join(FOLDER, f"{os.getpid()}.json")
    while not os.path.exists(window):
        time.sleep(0.02)
    entered.clear()
    while os.path.exists(window):
        time.sleep(0.02)
    entered = {}
    for code in list(entered):
        if code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            lines = [line for *_, line in code.co_lines() if line]
            length = max(lines) - code.co_firstlineno + 1
            path = os.path.relpath(code.co_filename, ROOT)
            entered.setdefault(path, {})[f"{code.co_qualname}:{code.co_firstlineno}"] = length
    with open(report + ".part", "w") as file:
        json.dump({"command": sys.argv, "main": getattr(sys.modules["__main__"], "__file__", ""),
                   "entered": entered}, file)
    os.replace(report + ".part", report)

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
threading.setprofile(profile)
sys.setprofile(profile)
"""
"""Run by every Python process of the job, as `sitecustomize`, before anything else."""


def trace(checkout: Path, timeout_s: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the job; return what its processes entered, and the episodes trained meanwhile."""
    is_new = (checkout / "services/dialoop_services").is_dir()
    package = "dialoop_services" if is_new else "services"
    root = checkout / "services" if is_new else checkout
    with tempfile.TemporaryDirectory(prefix="path-") as made:
        folder = Path(made)
        (folder / "job.toml").write_text(CONFIG, "utf-8")
        (folder / "sitecustomize.py").write_text(TRACER, "utf-8")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DIALOOP_")} | {
            "PYTHONPATH": f"{folder}:{checkout / 'client'}:{root}",
            "PATH_ROOT": str(checkout),
            "PATH_FOLDER": str(folder),
        }
        command = [sys.executable, "-m", f"{package}.stack", "train", "job.toml"]
        with (folder / "output.txt").open("wb") as output:
            job = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            episodes = _through_window(job, folder, time.monotonic() + timeout_s)
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=120)
        reports = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    return _merge(reports), episodes


def _through_window(
    job: subprocess.Popen[bytes], folder: Path, deadline: float
) -> list[dict[str, Any]]:
    """Open the window at the second publish of RL, close it at the second one after that."""
    metrics = folder / "runs/path/metrics.jsonl"
    rows = folder / "runs/path/trajectories.jsonl"

    def wait_for(what: str, is_there: Any) -> None:
        while not is_there():
            if job.poll() is not None or time.monotonic() > deadline:
                text = (folder / "output.txt").read_text("utf-8", errors="replace")[-3000:]
                raise SystemExit(f"The job did not come to {what}:\n{text}")
            time.sleep(0.02)

    def num_published() -> int:
        return sum(row["kind"] == "publish" for row in _rows_of(metrics))

    def trained_rows() -> list[dict[str, Any]]:
        return [row for row in _rows_of(rows) if row["outcome"] == "trained"]

    wait_for("its first train steps", lambda: len(trained_rows()) and num_published() >= 3)
    before, published = len(trained_rows()), num_published()
    (folder / "window").touch()
    wait_for(
        "two publishes and an episode of two turns",
        lambda: (
            num_published() >= published + 2 and any(map(_has_two_turns, trained_rows()[before:]))
        ),
    )
    (folder / "window").unlink()
    episodes = trained_rows()[before:]
    time.sleep(5.0)  # each process writes what it has recorded
    return episodes


def _has_two_turns(row: dict[str, Any]) -> bool:
    return len(row["turns"]) == 2


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSONL file that is still being written."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text("utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {module: {"functions": {name: lines}, "processes": [...]}}, less the stack's."""
    entered: dict[str, Any] = {}
    for report in reports:
        process = Path(report["main"]).parent.name
        if process == "stack":
            continue
        for module, functions in report["entered"].items():
            if not module.startswith(OURS):
                continue
            entry = entered.setdefault(module, {"functions": {}, "processes": set()})
            entry["functions"] |= functions
            entry["processes"].add(process)
    return entered


def summary(checkout: Path, entered: dict[str, Any]) -> dict[str, Any]:
    """Count the modules by the rule of this file's head."""
    counted, left_out = {}, dict.fromkeys(LEFT_OUT, 0)
    for module in sorted(entered):
        why = next((w for w, pattern in LEFT_OUT.items() if re.search(pattern, f"/{module}")), None)
        if why is not None and not re.search(COUNTED_ANYWAY, module):
            left_out[why] += 1
            continue
        functions = entered[module]["functions"]
        counted[module] = {
            "lines": len((checkout / module).read_text("utf-8").splitlines()),
            "num_functions": len(functions),
            "processes": sorted(entered[module]["processes"]),
        }
    return {
        "num_modules": len(counted),
        "num_lines": sum(module["lines"] for module in counted.values()),
        "num_functions": sum(module["num_functions"] for module in counted.values()),
        "num_modules_left_out": left_out,
        "modules": counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=HERE)
    parser.add_argument("--name", default="", help="of the commit, in the answer")
    parser.add_argument("--timeout-s", type=float, default=1200.0)
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    described = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    entered, episodes = trace(checkout, arguments.timeout_s)
    answer = {
        "benchmark": "path_of_a_prompt",
        "name": arguments.name or commit,
        "commit": commit,
        "num_episodes": len(episodes),
        "num_episodes_of_two_turns": sum(map(_has_two_turns, episodes)),
        **summary(checkout, entered),
    }
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
