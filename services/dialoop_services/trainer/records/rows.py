"""Lines of a run's files: trajectories.jsonl, which comes in parts, and numbers of metrics.jsonl.

A trajectory is plain JSON, token by token. A run writes each with `outcome`, `label` and
`train_step` in front; `dialoop_ops.runs` reads them. Of the rows of metrics.jsonl some no longer
count after a restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dialoop.episode import UpdateMode
from dialoop.sequences import Sequence
from dialoop.trajectory import Trajectory, sums_by_name

METRICS, TRAJECTORIES = "metrics.jsonl", "trajectories.jsonl"
# Evaluations that take place once, so that a restore may have to repeat them.
_ONCE = ("before_", "after_")
_NO_SERIES = ("time", "train_step", "kind", "label")


def as_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as plain JSON, as `trajectories.jsonl` holds it."""
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "task_key": trajectory.task_key,
        "seed": trajectory.seed,
        "environment": trajectory.environment,
        "environment_version": trajectory.environment_version,
        "reward": trajectory.reward,
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        "done_reason": trajectory.done_reason.name,
        "num_tool_calls": trajectory.num_tool_calls,
        "temperature": trajectory.sampling.temperature,
        "update_mode": trajectory.labels.get("update_mode", UpdateMode.RECOMPUTE.name),
        "labels": trajectory.labels,
        "messages": trajectory.history.to_chats(),
        "turns": [
            {
                "message_start": turn.message_start,
                "num_messages": turn.num_messages,
                "rewards": sums_by_name(turn.rewards),
                "success": {r.name: r.success for r in turn.rewards if r.success is not None},
                "feedback": {r.name: r.feedback for r in turn.rewards if r.feedback},
                "stop_reason": turn.stop_reason.name,
                "generate_s": turn.generate_s,
                "step_s": turn.step_s,
            }
            for turn in trajectory.turns
        ],
        "sequences": [_sequence_row(sequence) for sequence in trajectory.sequences],
        "failures": [
            {"owner": f.owner.name, "reason": f.reason, "message": f.message}
            for f in trajectory.failures
        ],
    }


def _sequence_row(sequence: Sequence) -> dict[str, Any]:
    return {
        "token_ids": sequence.token_ids.tolist(),
        "segments": [
            {
                "start": s.start,
                "length": s.length,
                "source": s.source.name,
                "turn": s.turn,
                "message_index": s.message_index,
                "lineage": None if s.policy_version is None else s.policy_version.lineage,
                "policy_version": None if s.policy_version is None else s.policy_version.number,
            }
            for s in sequence.segments
        ],
        "inference_logprobs": sequence.inference_logprobs.tolist(),
        "advantage": sequence.advantage,
        "token_advantages": sequence.token_advantages.tolist(),
        "fork_cause": sequence.fork_cause.name,
        "columns": {
            name: {
                "data_type": column.values.dtype.name,
                "along": column.along.name,
                "data": column.values.tolist(),
            }
            for name, column in sequence.columns.items()
        },
    }


def trajectory_files(run_dir: Path) -> tuple[Path, ...]:
    """Return the parts of trajectories.jsonl, oldest first: .000001.jsonl, ..., the one in use."""
    older = sorted(run_dir.glob("trajectories.[0-9]*.jsonl"), key=number_of)
    newest = run_dir / TRAJECTORIES
    return (*older, newest) if newest.is_file() else tuple(older)


def number_of(part: Path) -> int:
    """Return the number of a part that is full."""
    return int(part.name.split(".")[1])


def without_discards(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that count, without those of weights that a restore has discarded."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["kind"] == "restore":
            kept = [earlier for earlier in kept if is_kept(earlier, row)]
        kept.append(row)
    return kept


def is_kept(row: Mapping[str, Any], restore: Mapping[str, Any]) -> bool:
    """Return whether the restored checkpoint contains the step of a row before the restore."""
    if row["kind"] == "warm_start":
        return bool(row["train_step"] <= restore["num_warm_start_steps"])
    again = row.get("label", "").startswith(_ONCE) and row["label"] not in restore["evaluations"]
    return bool(row["train_step"] <= restore["train_step"] and not again)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's numbers as {"train/reward": 0.5, "train/by_staleness/0/ratio": 1.0}."""
    label = f"{row['kind']}/{row['label']}" if "label" in row else str(row["kind"])
    return dict(_numbers({k: v for k, v in row.items() if k not in _NO_SERIES}, label))


def _numbers(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        path = f"{prefix}/{name}"
        if isinstance(value, dict):
            yield from _numbers(value, path)
        elif isinstance(value, (int, float)):
            yield path, float(value)
