"""Checkpoints: everything a restarted trainer needs to continue as if it had never stopped."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from dialoop.sequences import PolicyVersion

from dialoop_services.runtime.durable import named_failures, sync_tree, write_json
from dialoop_services.trainer.job.state import JobState

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_services.trainer.learner.learner import Learner


class Checkpoints:
    """The checkpoint directory of a run, which keeps the newest two."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "checkpoints"

    @property
    def newest(self) -> Path | None:
        """Return the folder of the newest whole checkpoint; None without one."""
        pointer = self._root / "latest.json"
        if not pointer.is_file():
            return None
        return self._root / str(json.loads(pointer.read_text("utf-8"))["name"])

    def save(self, learner: Learner, state: JobState) -> Path:
        """Write a checkpoint and return its folder; it counts once latest.json names it.

        When this returns, a power loss does not lose it. After an error nothing has changed.
        """
        directory = self._fresh_directory(f"{state.policy_version}-{state.num_train_steps:06d}")
        try:
            learner.snapshot(directory)
            write_json(directory / "progress.json", state.to_json())
            with named_failures(directory):
                sync_tree(directory)
            write_json(self._root / "latest.json", {"name": directory.name})
        except Exception:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._delete_old(directory.name)
        return directory

    def restore(self, learner: Learner) -> JobState | None:
        """Load the newest checkpoint into the learner and return its state; None without one."""
        directory = self.newest
        if directory is None:
            return None
        learner.restore(directory)
        return JobState.from_json(json.loads((directory / "progress.json").read_text("utf-8")))

    def _fresh_directory(self, name: str) -> Path:
        """Make a new directory, so that a kill while writing does not harm the newest one."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        directory = next(self._root / n for n in names if not (self._root / n).exists())
        directory.mkdir(parents=True)
        return directory

    def _delete_old(self, newest: str) -> None:
        others = [d for d in self._root.iterdir() if d.is_dir() and d.name != newest]
        for directory in sorted(others, key=lambda d: d.stat().st_mtime)[:-1]:
            shutil.rmtree(directory)


def lineage_after_restore(
    restored: PolicyVersion, *published: PolicyVersion | None
) -> PolicyVersion:
    """Return the version of the restored weights, given versions that others know as published.

    When newer versions were published and are now discarded, their numbers must not return with
    other weights, so a new lineage starts (main, main.1, main.2, ...).
    """
    ages = [_age(version) for version in published if version is not None]
    newest_generation, number = max(ages, default=(0, 0))
    if (newest_generation, number) <= _age(restored):
        return restored
    base = restored.lineage.partition(".")[0]
    return PolicyVersion(lineage=f"{base}.{newest_generation + 1}", number=restored.number)


def _age(version: PolicyVersion) -> tuple[int, int]:
    """Return the sort key of a run's versions: (2, 7) for main.2-7."""
    generation = version.lineage.partition(".")[2]
    return int(generation) if generation.isdecimal() else 0, version.number


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestPolicy:
    """The newest published policy, as `policies/latest.json` names it."""

    version: PolicyVersion
    file_name: str
    sha256: str


def published_policy(run_dir: Path) -> LatestPolicy | None:
    """Return the newest published policy, if there is one."""
    pointer = run_dir / "policies" / "latest.json"
    if not pointer.is_file():
        return None
    data = json.loads(pointer.read_text("utf-8"))
    return LatestPolicy(
        version=PolicyVersion(lineage=data["lineage"], number=data["number"]),
        file_name=PurePath(data["path"]).name,
        sha256=data["sha256"],
    )
