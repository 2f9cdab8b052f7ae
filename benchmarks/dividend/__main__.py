"""What asynchrony buys: the same job at pipeline depths 0, 1, 2, 4 and "auto", to the same reward.

    python -m benchmarks.dividend prepare slow          # the model that every run starts from
    python -m benchmarks.dividend run slow --depth auto --seed 0
    python -m benchmarks.dividend run tail --depth auto-wait --seed 0
    python -m benchmarks.dividend all slow              # what is missing of 3 seeds, one by one
    python -m benchmarks.dividend report slow > dividend.json

The tasks are those of `benchmarks.dividend.environments`: `slow` has a calculator that sleeps, in
`slower` it sleeps three times as long, `tail` has answers of very different lengths, and `plain` is
the demo's task. With "auto-wait" answers under way end before new weights are loaded, where they
otherwise go on under them. A run trains through all services, with vLLM and Redis. Its clock goes
from the first live policy to the policy of a train step. The policies are evaluated afterwards,
with a calculator that does not sleep, so no evaluation is on the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import dialoop_ops
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.errors import DialoopError

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from benchmarks.servers.real_race import live_seconds, write_json

FOLDER = Path("runs") / "dividend"
ENVIRONMENTS = "benchmarks.dividend.environments"
SLOW = f"{ENVIRONMENTS}:chains"
TASKS: dict[str, dict[str, Any]] = {
    "slow": {"use": SLOW, "options": {"scale": 1.0}},
    "slower": {"use": SLOW, "options": {"scale": 3.0}},
    "tail": {"use": f"{ENVIRONMENTS}:counting"},
    "plain": {"use": "arithmetic"},
}
WAYS = ("0", "1", "2", "4", "auto", "auto-wait")
"""The pipeline's depth, and whether a publish waits for answers under way."""
SEEDS = (0, 1, 2)
NUM_STEPS, NUM_AGENTS, GROUP_SIZE = 16, 64, 8
MAX_MODEL_LEN = 480
EVALUATED_EVERY, NUM_HELDOUT = 8, 256
MARGIN = 0.05
LONG_SHARE = 0.25
"""The episodes of the longest quarter of all that were played are called long."""
_LOOK_S = 0.25
Result = dict[str, Any]


def job_of(task: str, *, way: str, seed: int) -> dict[str, Any]:
    """Return the job of a run; all start from the same model."""
    is_tail = task == "tail"
    name, _, mode = way.partition("-")
    depth = name if name == "auto" else int(name)
    return {
        "run": f"{way}_{seed}",
        "seed": seed,
        "engine": "vllm",
        "store": "redis",
        "environment": TASKS[task],
        "model": {"directory": str((FOLDER / task / "model").resolve())},
        "inference": {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": NUM_AGENTS}
        | ({"update_mode": mode} if mode else {}),
        "collector": {
            "group_size": GROUP_SIZE,
            "max_new_tokens": 320 if is_tail else 24,
            "max_groups_in_flight": "auto" if depth == "auto" else 8 * NUM_AGENTS // GROUP_SIZE,
        },
        "train": {
            "num_steps": NUM_STEPS,
            "groups_per_train_step": 8,
            "loss": "grpo",
            "learning_rate": 2e-4,
            "pipeline_depth": depth,
            "max_staleness": "auto",
            "keep_policies": 0,
        },
        "warm_start": {"num_steps": 0},
        "evaluation": {"num_tasks": 0},
        "gates": {"rescoring_s": 0, "logprob_difference_at_most": 1e-3},
    }


def prepare(task: str) -> None:
    """Make the model that every run of a task starts from: a tiny one, after a warm start."""
    folder = FOLDER / task
    if (folder / "model").is_dir():
        return
    job = job_of(task, way="0", seed=0) | {"run": "warm_start"}
    job |= {"model": {}, "warm_start": {"num_steps": 700, "batch_size": 32, "learning_rate": 3e-3}}
    job["train"] = job["train"] | {"num_steps": 0}
    asyncio.run(_train(job, folder, {}))
    command = ["export", str(folder / "warm_start"), "latest", str(folder / "model")]
    subprocess.run([sys.executable, "-m", "dialoop_ops.cli.main", *command], check=True)


async def _train(job: Mapping[str, Any], folder: Path, looks: dict[str, int]) -> Path:
    async with dialoop_ops.Job(dict(job), folder=folder, fresh=True) as running:
        looking = asyncio.create_task(_look(running.run_dir, looks))
        try:
            await running.result()
        finally:
            looking.cancel()
    return running.run_dir


async def _look(run_dir: Path, looks: dict[str, int]) -> None:
    """Count the looks at which the engine had requests while the job trained, and all of them."""
    while True:
        await asyncio.sleep(_LOOK_S)
        with suppress(OSError, ValueError, KeyError, DialoopError):
            address = json.loads((run_dir / "stack.json").read_bytes())["addresses"]["inference"]
            channel = Channel(address)
            try:
                client = InferenceClient(channel)
                while True:
                    status = await client.get_policy()
                    if status.policy_version is not None:
                        looks["all"] = looks.get("all", 0) + 1
                        looks["busy"] = looks.get("busy", 0) + (status.num_requests_running > 0)
                    await asyncio.sleep(_LOOK_S)
            finally:
                await channel.close()


def run(task: str, *, way: str, seed: int) -> None:
    """Train one run and evaluate its policies, unless its result is there."""
    folder = FOLDER / task
    path = folder / f"{way}_{seed}.json"
    if path.is_file():
        return
    prepare(task)
    looks: dict[str, int] = {}
    run_dir = asyncio.run(_train(job_of(task, way=way, seed=seed), folder, looks))
    rows = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    steps = [row for row in rows if row["kind"] == "train"]
    seconds = live_seconds(rows)
    result: Result = {
        "seconds": {str(step): round(s, 2) for step, s in seconds.items()},
        "rewards": _rewards(task, run_dir),
        "waiting_share": _waiting_share(steps),
        "engine_busy_share": looks.get("busy", 0) / max(1, looks.get("all", 0)),
        "staleness_mean": fmean(row["staleness_mean"] for row in steps),
        "staleness_max": max(row["staleness_max"] for row in steps),
        "ess_mean": fmean(row["ess"] for row in steps),
        "depths": [row["pipeline_depth"] for row in steps],
        **_lengths(run_dir),
    }
    write_json(path, result)
    shutil.rmtree(run_dir / "policies")


def _waiting_share(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the trainer's time after the first step in which it waited for groups."""
    waited = sum(row["lease_s"] for row in steps[1:])
    return waited / (steps[-1]["time"] - steps[0]["time"])


def _rewards(task: str, run_dir: Path) -> dict[str, float]:
    """Return the sampled held-out reward of every few policies, by train step."""
    start = FOLDER / task / "start.json"
    if not start.is_file():  # all runs have the same first policy
        write_json(start, _reward(task, run_dir, step=0))
    rewards = {"0": float(json.loads(start.read_text("utf-8")))}
    for step in range(EVALUATED_EVERY, NUM_STEPS + 1, EVALUATED_EVERY):
        rewards[str(step)] = _reward(task, run_dir, step=step)
    return rewards


def _reward(task: str, run_dir: Path, *, step: int) -> float:
    """Return the sampled held-out reward of the policy of a train step."""
    awake = [] if "options" not in TASKS[task] else ["--option", "scale=0"]
    command = ["eval", TASKS[task]["use"], "--policy", f"{run_dir}@main-{step + 1}"]
    command += ["--run", "dividend-eval", "--fresh", "--json", "--tasks", str(NUM_HELDOUT)]
    command += ["--temperature", "1", "--concurrency", "64", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--max-new-tokens", "320" if task == "tail" else "24", *awake]
    ended = subprocess.run(
        [sys.executable, "-m", "dialoop_ops.cli.main", *command],
        check=True,
        stdout=subprocess.PIPE,
    )
    return float(json.loads(ended.stdout)["mean_reward"]["mean"])


def _lengths(run_dir: Path) -> dict[str, Any]:
    """Return what was dropped, and the share of long episodes among all and among the trained."""
    played: list[tuple[float, str]] = []
    for path in sorted(run_dir.glob("trajectories*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                if row["label"] == "training":
                    took = sum(turn["generate_s"] + turn["step_s"] for turn in row["turns"])
                    played.append((took, row["outcome"]))
    bound = sorted(took for took, _ in played)[int(len(played) * (1 - LONG_SHARE))]
    # Groups of uniform reward teach nothing at any age, and say nothing about lengths here.
    wanted = [(took, outcome) for took, outcome in played if outcome != "uniform_reward"]
    trained = [took for took, outcome in wanted if outcome == "trained"]
    return {
        "outcomes": dict(Counter(outcome for _, outcome in played)),
        "long_s": bound,
        "long_share_played": fmean(took >= bound for took, _ in wanted),
        "long_share_trained": fmean(took >= bound for took in trained),
        "dropped_s_mean": fmean([t for t, outcome in wanted if outcome != "trained"] or [0.0]),
        "trained_s_mean": fmean(trained),
    }


def seconds_to(result: Result, target: float) -> float | None:
    """Return when a policy reached the target, between two evaluations by a straight line."""
    before: tuple[float, float] | None = None
    for step, reward in result["rewards"].items():
        at = result["seconds"][step]
        if reward >= target:
            if before is None or reward == before[1]:
                return float(at)
            share = (target - before[1]) / (reward - before[1])
            return float(before[0] + share * (at - before[0]))
        before = at, reward
    return None


def results_of(task: str) -> dict[tuple[str, int], Result]:
    """Return the results that are there, by way and seed."""
    return {
        (way, seed): json.loads(path.read_text("utf-8"))
        for way in WAYS
        for seed in SEEDS
        if (path := FOLDER / task / f"{way}_{seed}.json").is_file()
    }


def report(task: str) -> Result:
    """Return the runs of a task side by side, to the reward that depth 0 reaches at its end.

    It is the lowest of the seeds' ends, less .05: the standard error of 256 tasks is .02.
    SystemExit where no run of depth 0 is there.
    """
    results = results_of(task)
    if not any(way == "0" for way, _ in results):
        raise SystemExit(f"Nothing was measured at depth 0 in {FOLDER / task}.")
    last = str(NUM_STEPS)
    at_end = {key: result["rewards"][last] for key, result in results.items()}
    target = min(reward for (way, _), reward in at_end.items() if way == "0") - MARGIN
    figures: Result = {"task": task, "target": round(target, 3), "ways": {}}
    for way in WAYS:
        own = {seed: result for (w, seed), result in results.items() if w == way}
        if not own:
            continue
        reached = {seed: seconds_to(result, target) for seed, result in own.items()}
        ratios = [
            plain / taken
            for seed, taken in reached.items()
            if taken
            and ("0", seed) in results
            and (plain := seconds_to(results["0", seed], target))
        ]
        means = ("waiting_share", "engine_busy_share", "staleness_mean", "ess_mean")
        means += ("long_share_played", "long_share_trained", "dropped_s_mean", "trained_s_mean")
        figures["ways"][way] = {
            "seconds_to_target": reached,
            "times_as_fast": round(median(ratios), 2) if ratios else None,
            "seconds_of_all_steps": {s: result["seconds"][last] for s, result in own.items()},
            "reward_at_end": round(fmean(at_end[way, seed] for seed in own), 4),
            **{name: round(fmean(result[name] for result in own.values()), 3) for name in means},
            "staleness_max": max(result["staleness_max"] for result in own.values()),
            "outcomes": dict(sum((Counter(r["outcomes"]) for r in own.values()), Counter())),
            "chosen_depths": {s: result["depths"] for s, result in own.items()},
        }
    return figures


def main() -> int:
    """Prepare, run or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "run", "all", "report"))
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--depth", default="auto", choices=WAYS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.task)
    elif arguments.command == "run":
        run(arguments.task, way=arguments.depth, seed=arguments.seed)
    elif arguments.command == "all":
        for seed in SEEDS:
            for way in WAYS:
                run(arguments.task, way=way, seed=seed)
    else:
        print_figures({"processor": processor()}, {arguments.task: report(arguments.task)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
