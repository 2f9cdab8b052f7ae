"""Count the modules that one prompt goes through, from its task's lease to the publish after it.

    python -m benchmarks.path_of_a_prompt [--rest-step] [--checkout DIRECTORY] [--name NAME]

Runs a small job of the checkout (every service a process, transformers engine, queue on Redis, no
console) and records, in all of its processes, which functions are entered while GRPO is under way:
from a publish in mid-training to the second publish after it, and for 15 s. In between whole groups
are leased, played, scored, trained on and published; at least one of them must have an episode of
two turns. Prints one JSON object. Works on any commit of this repository since 127deda.

With --rest-step it serves the environment `arithmetic` and records what a step over HTTP enters,
from the first one in a process. Only generated modules are left out there.

Counted are modules of which at least one function is entered, with all their lines, but for those
that every call passes and that say nothing of the algorithm, and start-up:

    generated   dialoop/v1, the blocking clients
    wire        dialoop/wire, clients/channel, the gRPC and REST plumbing (runtime, rest, hosting)
    settings    config and settings modules
    telemetry   metrics, counters, records, trackers, status
    start-up    __init__ and __main__ modules, the stack (it starts and watches the processes);
                and all that is entered before the window only
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment_doors import http, service
from benchmarks.servers import call_tracer

HERE = Path(__file__).resolve().parents[1]

OURS = ("client/dialoop", "services/")
LEFT_OUT = {
    "generated": r"dialoop/v1/|clients/blocking|/blocking(_|\.)",
    "wire": r"dialoop/wire/|clients/channel\.py|/runtime/|/rest/|/hosting/",
    "settings": r"/config/|/importers/|settings\.py|/config(_\w+)?\.py",
    "telemetry": r"/(metrics|counters|records/\w+|records|trackers|status)\.py",
    "start-up": r"/__(init|main)__\.py|/stack/|dialoop_ops/launch/",
}
"""Regular expressions on a module's path, alike for two packages and for five: `importers` lay in
`config`, and `launch` in `stack`. `environment/records.py` holds sessions, and counts."""
OF_A_REST_STEP = {"generated": LEFT_OUT["generated"]}
"""What a REST step leaves out: it is nearly all wire."""
COUNTED_ANYWAY = r"environments?/(sessions/)?records\.py"
WINDOW_S = 15.0  # at least, so that what services do every few seconds counts in each run
SETTINGS = ("DIALOOP_", "REDIS_URL")  # of the caller's shell; the job has its own

CONFIG = """
run = "path"
engine = "transformers"
store = "redis"
console = false
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


def trace(checkout: Path, timeout_s: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the job; return what its processes entered, and the episodes trained meanwhile."""
    root, package = stack_of(checkout)
    with tempfile.TemporaryDirectory(prefix="path-") as made:
        folder = Path(made)
        (folder / "job.toml").write_text(CONFIG, "utf-8")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        environment |= _tracing(checkout, folder)
        environment["PYTHONPATH"] += f":{checkout / 'client'}:{root}"
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
        return _merge(_reports(folder)), episodes


async def trace_rest_steps(checkout: Path) -> tuple[dict[str, Any], int]:
    """Serve `arithmetic`; return what steps over REST entered, and how many there were."""
    task = {"episode": 1, "split": "train", "task_key": "10+10"}
    answer = {"response": {"messages": [{"role": "assistant", "content": "20"}]}}
    sessions = [f"path{index}" for index in range(8)]
    with tempfile.TemporaryDirectory(prefix="path-") as made:
        folder = Path(made)
        variables = {"DIALOOP_ENVIRONMENT_ENVIRONMENTS": "arithmetic"}
        with service(checkout, variables | _tracing(checkout, folder)) as served:
            async with http(served.rest_address) as connection:

                async def post(path: str, fields: dict[str, Any]) -> None:
                    await connection.post(f"/v1/sessions{path}", json.dumps(fields).encode())

                for session in sessions:
                    await post("", {"session_id": session, "environment": "arithmetic"})
                    await post(f"/{session}/reset", task)
                (folder / "window").touch()
                await asyncio.sleep(10 * call_tracer.POLL_S)
                for session in sessions:
                    step = {"episode": 1, "step_index": 0, "history": answer}
                    await post(f"/{session}/step", step)
            (folder / "window").unlink()
            await asyncio.sleep(1.0)  # the service writes what it has recorded
        return _merge(_reports(folder)), len(sessions)


def stack_of(checkout: Path) -> tuple[Path, str]:
    """Return the folder and the package of the stack, in each layout since 127deda."""
    for package in ("services/dialoop_ops", "services/dialoop_services", "services"):
        if (checkout / package / "stack").is_dir():
            root = checkout / package
            return root.parent, root.name
    raise SystemExit(f"No stack is in {checkout}: name a checkout of this repository.")


def _tracing(checkout: Path, folder: Path) -> dict[str, str]:
    """Return the variables under which Python processes write what they enter into the folder."""
    (folder / "sitecustomize.py").write_bytes(Path(call_tracer.__file__).read_bytes())
    return {"PYTHONPATH": str(folder), "PATH_ROOT": str(checkout), "PATH_FOLDER": str(folder)}


def _reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]


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
    earliest = time.monotonic() + WINDOW_S
    wait_for(
        "two publishes and an episode of two turns",
        lambda: (
            time.monotonic() > earliest
            and num_published() >= published + 2
            and any(map(_has_two_turns, trained_rows()[before:]))
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


def summary(
    checkout: Path, entered: dict[str, Any], rules: Mapping[str, str] = LEFT_OUT
) -> dict[str, Any]:
    """Count the modules by the rule of this file's head; raise SystemExit where there is none."""
    counted, left_out = {}, dict.fromkeys(rules, 0)
    for module in sorted(entered):
        why = next((w for w, pattern in rules.items() if re.search(pattern, f"/{module}")), None)
        if why is not None and not re.search(COUNTED_ANYWAY, module):
            left_out[why] += 1
            continue
        functions = entered[module]["functions"]
        counted[module] = {
            "lines": len((checkout / module).read_text("utf-8").splitlines()),
            "num_functions": len(functions),
            "processes": sorted(entered[module]["processes"]),
        }
    if not counted:
        raise SystemExit(
            f"No module of {checkout} was entered while the window was open: the tracer was not "
            "loaded, or the folders of OURS hold nothing of that commit."
        )
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
    parser.add_argument("--rest-step", action="store_true", help="count a REST step instead")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    described = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    if arguments.rest_step:
        entered, num_steps = asyncio.run(trace_rest_steps(checkout))
        answer = {"num_steps": num_steps, **summary(checkout, entered, OF_A_REST_STEP)}
    else:
        entered, episodes = trace(checkout, arguments.timeout_s)
        answer = {
            "num_episodes": len(episodes),
            "num_episodes_of_two_turns": sum(map(_has_two_turns, episodes)),
            **summary(checkout, entered),
        }
    head = {
        "benchmark": "path_of_a_prompt",
        "path": "REST step" if arguments.rest_step else "prompt",
        "name": arguments.name or commit,
        "commit": commit,
    }
    print(json.dumps(head | answer, indent=2))


if __name__ == "__main__":
    main()
