"""Put six published bugs into a job, one after the other, and show what stops it.

    python -m benchmarks.silent_bugs                     # all, as `make silent-bugs` does
    python -m benchmarks.silent_bugs stale_tied_head     # one of them

None of these bugs raises an error. Each job runs twice, on a model of 0.8 million parameters with
the services in one process. Without checks it trains to its end: its losses are finite and its
rewards plausible. With them `dialoop audit` reads the run after every train step, and the job is
stopped at the first finding that names a policy version, a trajectory and a token. A job without a
bug runs too, and is not stopped. The exit code is 1 where one of them behaves otherwise; --json
prints everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dialoop_ops
import torch
from dialoop_ops.audit import AuditFinding, Evidence, audit

from benchmarks.servers.machine import processor
from benchmarks.silent_bugs.bugs import BUGS

NUM_STEPS, RESUMED_AT = 8, 4
WARM_START, CONTROL, RESUME = "warm_start", "no_bug", "resume_skips_long_prompts"
# What a job has beside the others' config, so that its bug can show in a few steps.
EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "adapter_never_delivered": {"model": {"lora_rank": 16}, "train": {"learning_rate": 3e-3}},
    "stale_prefix_cache": {"train": {"learning_rate": 2e-3, "pipeline_depth": 0}},
    # A hot policy often writes a word in other tokens than its text is encoded in.
    "retokenised_history": {"collector": {"temperature": 1.3}},
    CONTROL: {"collector": {"temperature": 1.3}},
}


def config_of(name: str, model: str) -> dict[str, Any]:
    """Return the job: the demo's task, for a few steps; without a model it makes one."""
    config: dict[str, Any] = {
        "run": name,
        # Sums of one and two digits: prompts of three lengths.
        "environment": {"use": "arithmetic", "options": {"low": 0}},
        "collector": {"group_size": 8, "max_new_tokens": 24, "max_groups_in_flight": 8},
        "train": {
            "num_steps": NUM_STEPS if model else 0,
            "groups_per_train_step": 8,
            "learning_rate": 3e-4,
            "pipeline_depth": 1,
            "debug_table_every": 1,
        },
        "warm_start": {"num_steps": 0 if model else 200, "batch_size": 64},
        "evaluation": {"num_tasks": 32 if model else 0},
        "gates": {"rescoring_s": 0, "logprob_difference_at_most": 1e-3},
    }
    if model:
        config["model"] = {"directory": model}
    for table, values in EXTRA.get(name, {}).items():
        config[table] = config.get(table, {}) | values
    return config


def place_of(finding: AuditFinding) -> Evidence | None:
    """Return where the finding names a version, a trajectory and a token."""
    return next(
        (e for e in finding.evidence if e.trajectory and None not in (e.version, e.token)), None
    )


async def play(
    config: dict[str, Any], folder: Path, *, with_checks: bool, is_resumed: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Run a job to its end or to a finding; return its metrics and what the finding says."""
    rows: list[dict[str, Any]] = []
    job = dialoop_ops.Job(config, in_process=True, folder=folder, fresh=not is_resumed, quiet=True)
    async with job:
        async for row in job.metrics():
            rows.append(row)
            if not (with_checks and row["kind"] == "train"):
                continue
            report = await asyncio.to_thread(audit, job.run_dir)
            for finding in report.findings:
                place = place_of(finding)
                if place is not None:
                    stop = {"train_step": row["train_step"], "fault": finding.fault}
                    return rows, stop | {
                        "version": place.version,
                        "trajectory": place.trajectory,
                        "token": place.token,
                        "detail": place.detail,
                    }
        await job.result()
    return rows, None


async def play_with_bug(name: str, model: str, folder: Path, *, with_checks: bool) -> Any:
    """Return what became of the job of a bug, or of the one without; both are resumed once."""
    config = config_of(name, model)
    bug = BUGS[name](Path(model)) if name in BUGS else nullcontext()
    rows: list[dict[str, Any]] = []
    stop = None
    is_resumed = name in (RESUME, CONTROL)
    if is_resumed:
        half = config | {"train": config["train"] | {"num_steps": RESUMED_AT}}
        rows, stop = await play(half, folder, with_checks=with_checks)
    if stop is None:
        with bug:
            more, stop = await play(config, folder, with_checks=with_checks, is_resumed=is_resumed)
        rows += more
    trained = {row["train_step"]: row for row in rows if row["kind"] == "train"}
    means = [row["mean_reward"] for row in rows if row["kind"] == "evaluation"]
    return {
        "stopped": stop,
        "num_steps": len(trained),
        "losses_are_finite": all(abs(row["loss"]) < 1e6 for row in trained.values()),
        "rewards": [round(row["reward"], 3) for _, row in sorted(trained.items())],
        "heldout": [round(mean, 3) for mean in means],
    }


async def play_both(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Return what became of a job without checks, and with them."""
    torch.set_num_threads(1)  # threads that wait for each other take most of a busy machine
    outcomes = {}
    for checks in ("without", "with"):
        own = folder / checks
        outcomes[checks] = await play_with_bug(name, model, own, with_checks=checks == "with")
    return outcomes


def play_apart(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Do that in a process of its own, so that one bug leaves nothing to the next."""
    words = ["--only", name, "--model", model, "--folder", str(folder)]
    command = [sys.executable, "-m", "benchmarks.silent_bugs", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if ended.returncode:
        raise SystemExit(f"{name} failed:\n{ended.stderr[-2000:]}")
    outcome: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return outcome


def make_model(folder: Path) -> str:
    """Warm a model up, which all jobs start with, and return its directory."""
    play_apart(WARM_START, "", folder)
    model = str(folder / "model")
    words = ["export", str(folder / WARM_START), "latest", model]
    subprocess.run(
        [sys.executable, "-m", "dialoop_ops.cli.main", *words],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return model


def behaves(name: str, result: dict[str, Any]) -> bool:
    """Return whether the job ends without checks, and with them only if there is no bug."""
    alone = result["without"]
    ends = alone["num_steps"] == NUM_STEPS and alone["losses_are_finite"]
    return ends and (result["with"]["stopped"] is not None) == (name in BUGS)


def show(name: str, result: dict[str, Any]) -> None:
    """Print what became of one bug."""
    alone, stop = result["without"], result["with"]["stopped"]
    rewards = f"reward {alone['rewards'][0]:.2f} to {alone['rewards'][-1]:.2f}"
    lines = [name, f"  without checks: {alone['num_steps']} train steps, {rewards}, no error"]
    if stop is None:
        lines.append(f"  with checks:    {result['with']['num_steps']} train steps, no finding")
    else:
        place = f"version {stop['version']}, trajectory {stop['trajectory']}, token {stop['token']}"
        lines.append(f"  with checks:    stopped at step {stop['train_step']}: {stop['fault']}")
        lines += [f"                  {place}", f"                  {stop['detail']}"]
    lines += [] if behaves(name, result) else ["  NOT as it should be"]
    sys.stderr.write("\n".join(lines) + "\n")


def play_all(names: list[str], model: str, *, as_json: bool) -> int:
    """Run each bug without and with the checks; return 1 where one does not behave as it should."""
    started = time.monotonic()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dialoop-silent-bugs-") as scratch:
        folder = Path(scratch)
        model = model or make_model(folder)
        for name in (CONTROL, *names):
            results[name] = play_apart(name, model, folder / name)
            show(name, results[name])
    wrong = [name for name, result in results.items() if not behaves(name, result)]
    seconds = round(time.monotonic() - started)
    sys.stderr.write(f"{len(names)} bugs in {seconds} s; {len(wrong)} not as they should be\n")
    if as_json:
        report: dict[str, Any] = {
            "benchmark": "silent_bugs",
            "cores": os.cpu_count(),
            "processor": processor(),
        }
        report |= {"load": round(os.getloadavg()[0], 1), "seconds": seconds}
        report |= {"bugs": len(names), "wrong": wrong, "results": results}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(bool(wrong))


def main() -> int:
    """Run all bugs, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(BUGS)} (all)")
    parser.add_argument("--model", default="", help="model to start with (one is warmed up)")
    parser.add_argument("--json", action="store_true", help="print JSON too")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.only:
        unknown = [name for name in options.names if name not in BUGS]
        if unknown:
            parser.error(f"there is no bug {', '.join(unknown)}")
        return play_all(options.names or list(BUGS), options.model, as_json=options.json)
    if options.only == WARM_START:
        outcome: Any = asyncio.run(
            play(config_of(WARM_START, ""), options.folder, with_checks=False)
        )
        outcome = {"num_rows": len(outcome[0])}
    else:
        outcome = asyncio.run(play_both(options.only, options.model, options.folder))
    sys.stdout.write(json.dumps(outcome) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
