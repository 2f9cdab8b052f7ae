"""Check a run's books from its files alone: the queue's own file, trajectories and metrics.

It imports nothing of Dialoop, so that no mistake of ours hides itself. A scratch Redis reads a copy
of the queue's append-only file; the keys are those that the ledger's script documents.

python -m tests.chaos.ledger_checker runs/demo runs/demo/redis
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

TRAINING = 1
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What the queue's file holds: records by task id, counts by name, cursor "epoch:position"."""

    records: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, int]
    cursor: str

    @property
    def training(self) -> dict[str, Mapping[str, Any]]:
        """The records of training tasks."""
        return {
            name: record for name, record in self.records.items() if record["purpose"] == TRAINING
        }


def read_queue(folder: Path, program: str) -> Queue:
    """Let a scratch Redis read a copy of the folder's append-only file."""
    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0)) as probe:
        copy, port = Path(scratch) / "copy", probe.getsockname()[1]
        shutil.copytree(folder, copy)
        probe.close()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(copy)]
        options += ["--appendonly", "yes", "--save", ""]
        with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as server:
            try:
                return _read(redis.Redis(port=port, decode_responses=True))
            finally:
                server.kill()


def _read(client: redis.Redis) -> Queue:
    deadline = time.monotonic() + 60.0
    while True:
        try:
            client.ping()
            break
        except redis.RedisError:
            assert time.monotonic() < deadline, "the scratch Redis does not read the file"
            time.sleep(0.1)
    (ledger,) = client.keys("*:ledger")
    prefix = ledger.removesuffix("ledger")
    records = {name: json.loads(text) for name, text in client.hgetall(ledger).items()}
    counts = {name: int(count) for name, count in client.hgetall(f"{prefix}counts").items()}
    return Queue(
        records=records, counts=counts, cursor=client.hget(f"{prefix}meta", "cursor") or ""
    )


def read_lines(folder: Path, name: str) -> list[Row]:
    """The rows of a file of lines and of its older parts, oldest first."""
    stem, suffix = name.split(".")
    parts = [*sorted(folder.glob(f"{stem}-*.{suffix}")), folder / name]
    lines = (
        line for part in parts if part.exists() for line in part.read_text("utf-8").splitlines()
    )
    return [json.loads(line) for line in lines]


def problems_of(
    queue: Queue, trajectories: Iterable[Row], metrics: Iterable[Row], *, max_staleness: int
) -> list[str]:
    """Return a sentence for everything that does not add up; none for a run that lost nothing."""
    rows = list(trajectories)
    steps = _steps_kept(metrics)
    trained = _rows_by_group(rows, steps)
    return [
        *_problems_of_tasks(queue),
        *_problems_of_counts(queue),
        *_problems_of_trained(queue, trained),
        *_problems_of_steps(trained, steps, max_staleness),
    ]


def _steps_kept(metrics: Iterable[Row]) -> dict[int, Row]:
    """Return the rows of train steps, without those that a restore took back."""
    steps: dict[int, Row] = {}
    for row in metrics:
        if row["kind"] == "restore":
            steps = {step: kept for step, kept in steps.items() if step <= row["train_step"]}
        elif row["kind"] == "train":
            steps[row["train_step"]] = row
    return steps


def _rows_by_group(rows: Iterable[Row], steps: Mapping[int, Row]) -> dict[str, list[Row]]:
    """Return the trained rows by group; a step that a killed trainer repeats has the same rows.

    A step that was taken back, because the queue had lost its groups, was done again with others:
    the policy that it made is of another lineage.
    """
    by_group: dict[str, dict[tuple[str, int], Row]] = defaultdict(dict)
    for row in rows:
        lineage = steps.get(row["train_step"], {}).get("lineage")
        if row["outcome"] == "trained" and row.get("lineage") == lineage:
            by_group[row["group_id"]][row["trajectory_id"], row["train_step"]] = row
    return {group: list(members.values()) for group, members in by_group.items()}


def _problems_of_tasks(queue: Queue) -> Iterable[str]:
    """Every task that was read from the source is in the ledger, under one id."""
    epoch, _, position = queue.cursor.rpartition(":")
    if epoch == "0" and int(position) != len(queue.training):
        yield f"{position} tasks were read, and the ledger has {len(queue.training)}"
    keys = Counter("/".join(name.split("/")[-2:]) for name in queue.training)
    for key, count in keys.items():
        if count > 1:
            yield f"task {key} has {count} ids"


def _problems_of_counts(queue: Queue) -> Iterable[str]:
    """The ledger's counts are those of its records, and no finished member was played again."""
    states = Counter(record["state"] for record in queue.training.values())
    for state in ("offered", "leased", "unscored", "scored", "training", "trained", "consumed"):
        if states[state] != queue.counts.get(f"1:{state}", 0):
            yield (
                f"{states[state]} records are {state}, and the count is "
                f"{queue.counts.get(f'1:{state}', 0)}"
            )
    if states["training"] or states["trained"]:
        yield "groups are still leased by a trainer that has ended"
    num_finished = sum(record["num_finished"] for record in queue.training.values())
    num_generated = queue.counts.get("1:trajectories:generated", 0)
    given_up = sum(
        count
        for name, count in queue.counts.items()
        if name.startswith("1:trajectories:dropped:")
        and f"1:dropped:{name.removeprefix('1:trajectories:dropped:')}" not in queue.counts
    )
    if num_generated != num_finished + given_up:
        dropped = {
            n: c for n, c in queue.counts.items() if n.startswith("1:trajectories:dropped:") and c
        }
        yield (
            f"{num_generated} members were finished, and the groups have {num_finished}; "
            f"dropped: {dropped}"
        )


def _problems_of_trained(queue: Queue, trained: Mapping[str, list[Row]]) -> Iterable[str]:
    """What the queue calls consumed is what the trainer trained, member for member."""
    consumed = {name for name, record in queue.training.items() if record["state"] == "consumed"}
    for group in consumed - trained.keys():
        yield f"{group} is consumed and was never trained"
    for group in trained.keys() - consumed:
        state = queue.training.get(group, {}).get("state", "unknown")
        yield f"{group} was trained, and the queue says {state}"
    groups_of = defaultdict(set)
    for group, members in trained.items():
        ids = {row["trajectory_id"] for row in members}
        for trajectory_id in ids:
            groups_of[trajectory_id].add(group)
        num_finished = queue.training.get(group, {}).get("num_finished", len(ids))
        if len(ids) > num_finished:
            yield f"{group} has {num_finished} members, and {len(ids)} were trained"
    for trajectory_id, groups in groups_of.items():
        if len(groups) > 1:
            yield f"trajectory {trajectory_id} was trained in {len(groups)} groups"


def _problems_of_steps(
    trained: Mapping[str, list[Row]], steps: Mapping[int, Row], max_staleness: int
) -> Iterable[str]:
    """No group is in two train steps, and none was too old when it was trained."""
    for group, members in trained.items():
        own = {row["train_step"] for row in members}
        if len(own) > 1:
            yield f"{group} was trained in steps {sorted(own)}"
        for row in members:
            step = steps.get(row["train_step"])
            if step is None:
                yield f"{group} was trained in step {row['train_step']}, which metrics do not have"
                break
            oldest = min(
                segment["policy_version"]
                for sequence in row["sequences"]
                for segment in sequence["segments"]
                if segment["source"] == "MODEL"
            )
            # A row's policy is the one that the step made.
            lag = step["policy_version"] - 1 - oldest
            if lag > max_staleness:
                yield f"{group} lagged {lag} versions in step {row['train_step']}"
                break
    if steps and sorted(steps) != list(range(1, max(steps) + 1)):
        yield f"train steps are missing: {sorted(set(range(1, max(steps) + 1)) - steps.keys())}"


def check_run(run_dir: Path, redis_folder: Path, program: str) -> list[str]:
    """Return the problems of a run that has ended."""
    config = json.loads((run_dir / "run.json").read_text())["config"]
    bound = config["train"]["max_staleness"]
    return problems_of(
        read_queue(redis_folder, program),
        read_lines(run_dir, "trajectories.jsonl"),
        read_lines(run_dir, "metrics.jsonl"),
        max_staleness=sys.maxsize if bound == "auto" else bound,
    )


if __name__ == "__main__":
    server = shutil.which("redis-server") or sys.argv[3]
    problems = check_run(Path(sys.argv[1]), Path(sys.argv[2]), server)
    sys.stdout.write("\n".join(problems or ["0 problems"]) + "\n")
    sys.exit(bool(problems))
