"""The files that a run writes: metrics.jsonl, trajectories.jsonl and trainer.json."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from dialoop.sequences import PolicyVersion

from dialoop_services.runtime.durable import write_json
from dialoop_services.trainer.records.rows import (
    METRICS,
    TRAJECTORIES,
    as_row,
    number_of,
    trajectory_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dialoop.trajectory import Trajectory

    from dialoop_services.trainer.records.trackers import Tracker

log = logging.getLogger(__name__)

_LOGGED = {
    "warm_start": ("A warm-start step is done.", ("loss",)),
    "train": ("A train step is done.", ("reward", "loss", "num_groups_trained")),
    "heldout": ("The held-out loss is measured.", ("loss",)),
    "evaluation": ("An evaluation is done.", ("label", "mean_reward", "num_trajectories")),
}
"""Rows that are log lines too, for whoever reads the log of a container: a text, and which values.
"""

_BLOCK = 65536
_NUM_PARTS, _PART_BYTES = 4, 1 << 30


class RunRecords:
    """The writer of the run's files. Each call flushes, so a kill loses no line of earlier calls.

    Worker threads write trajectories, which are long; the event loop writes metrics. Trajectories
    are in parts. With `max_trajectory_bytes` there are four, and the oldest is deleted when all
    have more bytes than that (0: none is ever deleted).
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        max_trajectory_bytes: int = 0,
        trackers: tuple[Tracker, ...] = (),
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._trackers = trackers
        self._max_parts = _NUM_PARTS if max_trajectory_bytes else 0
        self._part_bytes = max_trajectory_bytes // _NUM_PARTS or _PART_BYTES
        self._metrics = open_lines(run_dir / METRICS)
        self._trajectories = open_lines(run_dir / TRAJECTORIES)
        self._writing = threading.Lock()
        self.newest: dict[str, float] = {}

    def metric(
        self, kind: str, *, train_step: int, policy_version: PolicyVersion | None, **values: Any
    ) -> None:
        """Add one row; numbers also become `newest["<kind>/<name>"]`."""
        row = {
            "time": time.time(),
            "kind": kind,
            "train_step": train_step,
            "policy_version": None if policy_version is None else policy_version.number,
            "lineage": None if policy_version is None else policy_version.lineage,
            **values,
        }
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for tracker in self._trackers:
            tracker.log(row)
        _log_progress(row)
        prefix = f"{kind}/{values['label']}" if "label" in values else kind
        numbers = {f"{prefix}/{k}": float(v) for k, v in values.items() if _is_number(v)}
        self.newest.update(numbers)

    def recorded_versions(self) -> frozenset[PolicyVersion]:
        """Return the policy versions that came out of the train steps with a row."""
        with (self._run_dir / METRICS).open(encoding="utf-8", newline="\n") as lines:
            return frozenset(
                PolicyVersion(lineage=row["lineage"], number=row["policy_version"])
                for row in map(json.loads, lines)
                if row["kind"] == "train"
            )

    def evaluation_due_after(self, train_step: int) -> dict[str, Any] | None:
        """Return the row of the evaluation due after that step, unless a restore took it back."""
        latest: dict[str, Any] | None = None
        with (self._run_dir / METRICS).open(encoding="utf-8", newline="\n") as lines:
            for row in map(json.loads, lines):
                if row.get("due_train_step") == train_step:
                    latest = row
                elif (
                    row["kind"] == "restore" and latest and row["train_step"] < latest["train_step"]
                ):
                    latest = None
        return latest

    def rewind(
        self, *, num_train_steps: int, num_warm_start_steps: int, evaluations: Iterable[str] = ()
    ) -> None:
        """Add a row that training continues from here: rows of later steps no longer count.

        `evaluations` are the labels that will not be evaluated again.
        """
        if self._metrics.tell():
            self.metric(
                "restore",
                train_step=num_train_steps,
                policy_version=None,
                num_warm_start_steps=num_warm_start_steps,
                evaluations=list(evaluations),
            )

    def trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        outcome: str,
        label: str,
        train_step: int,
        lineage: str = "",
    ) -> None:
        """Add trajectories with their outcome: trained, evaluation or the reason of a drop.

        lineage: of the policy that the train step made. If a restore took that step back, the row
        of the step in metrics.jsonl has another lineage.
        """
        fate = _fate(outcome, label, train_step, lineage)
        lines = [fate + json.dumps(as_row(t), ensure_ascii=False)[1:] for t in trajectories]
        with self._writing:
            self._trajectories.write("".join(line + "\n" for line in lines))
            self._trajectories.flush()
            if self._trajectories.tell() >= self._part_bytes:
                self._begin_part()

    def ids_of(
        self, *, outcome: str, label: str, train_step: int, lineage: str = ""
    ) -> frozenset[str]:
        """Return the ids of trajectories that were added with these values; it reads all parts."""
        fate = _fate(outcome, label, train_step, lineage)
        ids: set[str] = set()
        for part in trajectory_files(self._run_dir):
            with part.open(encoding="utf-8", newline="\n") as lines:
                ids.update(
                    json.loads(line)["trajectory_id"] for line in lines if line.startswith(fate)
                )
        return frozenset(ids)

    def _begin_part(self) -> None:
        """Begin a new part, and delete the oldest ones if their number is bounded."""
        self._trajectories.close()
        older = trajectory_files(self._run_dir)[:-1]
        number = number_of(older[-1]) + 1 if older else 1
        current = self._run_dir / TRAJECTORIES
        current.rename(self._run_dir / f"trajectories.{number:06d}.jsonl")
        self._trajectories = open_lines(current)
        if self._max_parts:
            for part in trajectory_files(self._run_dir)[: -self._max_parts]:
                part.unlink()

    def write_result(self, result: dict[str, Any]) -> None:
        """Write trainer.json in one piece."""
        write_json(self._run_dir / "trainer.json", result)

    def evaluated_after(self, num_train_steps: int) -> dict[str, dict[str, float]]:
        """Return the evaluations after the job's end, by label, if it ended with that step."""
        try:
            result = json.loads((self._run_dir / "trainer.json").read_text("utf-8"))
        except FileNotFoundError:
            return {}
        if result["num_train_steps"] != num_train_steps:
            return {}
        return {k: v for k, v in result["evaluations"].items() if k.startswith("after_")}

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._trajectories.close()
        for tracker in self._trackers:
            tracker.close()


def _fate(outcome: str, label: str, train_step: int, lineage: str) -> str:
    """Return the beginning of a line of trajectories.jsonl."""
    fate = {"outcome": outcome, "label": label, "train_step": train_step}
    fate |= {"lineage": lineage} if lineage else {}
    return json.dumps(fate, ensure_ascii=False).removesuffix("}") + ", "


def open_lines(path: Path) -> TextIO:
    """Open a file of lines to append to; cut off a last line that a kill left incomplete."""
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(_end_of_last_line(file))
    return path.open("a", encoding="utf-8")


def _end_of_last_line(file: BinaryIO) -> int:
    """Return the position after the last newline; it searches from the end."""
    position = file.seek(0, os.SEEK_END)
    while position:
        start = max(0, position - _BLOCK)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def _log_progress(row: Mapping[str, Any]) -> None:
    if row["kind"] not in _LOGGED:
        return
    text, names = _LOGGED[row["kind"]]
    values = {name: row[name] for name in ("train_step", "policy_version", *names) if name in row}
    rounded = {n: round(v, 4) if isinstance(v, float) else v for n, v in values.items()}
    log.info(text, extra=rounded)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
