"""Counts of a collector's work in a small JSON file, for people and dashboards.

{"worker": "c1", "training": {"num_trajectories": 64, "num_tokens": 900, ...}, ...}
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from dialoop.sequences import ForkCause
from dialoop.trajectory import Owner, Purpose, Trajectory
from dialoop.waits import waiting_for
from dialoop_learning.rl.buckets import length_bin

log = logging.getLogger(__name__)


class Counters:
    """Counts since this process started, written to `path`; one event loop counts, one reads."""

    def __init__(self, worker: str, *, num_turns_before: int = 0, path: Path | None = None) -> None:
        self._worker = worker
        self._path = path
        self._written: dict[str, Any] | None = None
        self._num_turns_before = num_turns_before
        self._counts: dict[Purpose, Counter[str]] = {purpose: Counter() for purpose in Purpose}
        self._forks: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._lengths: dict[Purpose, Counter[int]] = {purpose: Counter() for purpose in Purpose}
        self._returned: Counter[str] = Counter()
        self._num_leases_lost = 0
        self._num_continued = 0
        self._last_failure = ""
        self._restarted: Counter[str] = Counter()

    def count_trajectory(self, trajectory: Trajectory, purpose: Purpose) -> None:
        """Count a finished trajectory, whether it is appended later or not."""
        self._counts[purpose].update(
            num_trajectories=1,
            num_turns=len(trajectory.turns),
            num_tokens=trajectory.num_model_tokens,
            num_tool_calls=trajectory.num_tool_calls,
        )
        # One that something other than the policy cut short has no length of its own.
        if all(failure.owner is Owner.POLICY for failure in trajectory.failures):
            self._lengths[purpose][length_bin(trajectory.num_model_tokens)] += 1
        causes = (sequence.fork_cause for sequence in trajectory.sequences)
        self._forks.update(c.name.lower() for c in causes if c is not ForkCause.NONE)
        self._failures.update(
            f"{failure.owner.name.lower()}/{failure.reason.lower()}"
            for failure in trajectory.failures
        )

    @property
    def num_training_turns(self) -> int:
        """Return the turns of finished training episodes, with those of earlier processes."""
        return self._num_turns_before + self._counts[Purpose.TRAINING]["num_turns"]

    def count_append(self, purpose: Purpose, *, num_discarded: int) -> None:
        """Count a trajectory in the queue; `num_discarded` earlier plays of it had failed."""
        self._counts[purpose].update(
            num_trajectories_appended=1, num_trajectories_discarded=num_discarded
        )

    def count_group(self, purpose: Purpose) -> None:
        """Count a group whose last members this collector appended."""
        self._counts[purpose].update(num_groups_appended=1)

    def note_failure(self, message: str) -> None:
        """Keep why the newest member was given up."""
        self._last_failure = message

    def count_return(self, reason: str) -> None:
        """Count a task that was given back."""
        self._returned[reason] += 1

    def count_continued(self) -> None:
        """Count an episode that goes on after turns that were sampled before a process died."""
        self._num_continued += 1

    def count_restarted(self, reason: str) -> None:
        """Count an episode whose kept turns were thrown away, to play it from the start."""
        self._restarted[reason.lower()] += 1

    def count_lost_lease(self, purpose: Purpose, *, num_trajectories: int) -> None:
        """Count a task that another collector may have by now, with its useless trajectories."""
        self._num_leases_lost += 1
        self._counts[purpose].update(num_trajectories_lost=num_trajectories)

    def save(self) -> None:
        """Replace the file, if there is one and a count has changed; readers see no half of it."""
        counts = self.to_json()
        if self._path is None or counts == self._written:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f".{self._path.name}.tmp")
        draft.write_text(json.dumps(counts) + "\n", encoding="utf-8")
        draft.replace(self._path)
        self._written = counts

    async def keep_saved(self, *, interval_s: float = 1.0) -> None:
        """Save the counts until cancelled; the caller saves the last ones."""
        while True:
            await self.save_at_last()
            await asyncio.sleep(interval_s)

    async def save_at_last(self, *, interval_s: float = 1.0) -> None:
        """Save the counts; where the disk is full or fails, try until it does no more."""
        while True:
            try:
                self.save()
                return
            except OSError as error:
                log.warning("The counts cannot be saved.", extra={"error": str(error)})
            with waiting_for("disk", "the collector's counts"):
                await asyncio.sleep(interval_s)

    def to_json(self) -> dict[str, Any]:
        """Return all counts, by purpose where they depend on it."""
        names = (
            "num_trajectories",
            "num_turns",
            "num_tokens",
            "num_tool_calls",
            "num_groups_appended",
            "num_trajectories_appended",
            "num_trajectories_discarded",
            "num_trajectories_lost",
        )
        by_purpose = {
            purpose.name.lower(): {name: counts[name] for name in names}
            | {"lengths": dict(sorted(self._lengths[purpose].items()))}
            for purpose, counts in self._counts.items()
        }
        return {
            "worker": self._worker,
            **by_purpose,
            "num_forks": dict(self._forks),
            "num_failures": dict(self._failures),
            "last_failure": self._last_failure,
            "num_tasks_returned": dict(self._returned),
            "num_leases_lost": self._num_leases_lost,
            "num_episodes_continued": self._num_continued,
            "num_episodes_restarted": dict(self._restarted),
        }


def read_training_turns(run_dir: Path | None) -> int:
    """Return the turns of training episodes that the run's collectors have written down."""
    files = sorted(run_dir.glob("collector-*.json")) if run_dir is not None else ()
    counts = (json.loads(file.read_text("utf-8")) for file in files)
    return sum(count["training"]["num_turns"] for count in counts)


def path_of_counts(run_dir: Path, worker: str) -> Path:
    """Return the file for a process's counts, which no earlier process of that name has written.

    A container that is started again keeps its host name and process id, and so its worker's name.
    """
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    paths = (run_dir / f"collector-{worker}{ending}.json" for ending in endings)
    return next(path for path in paths if not path.exists())
