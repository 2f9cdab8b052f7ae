"""Checkpoints: everything a restarted trainer needs to go on as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from dialoop.sequences import PolicyVersion

from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.records.records import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_services.trainer.learner.learner import Learner


class Checkpoints:
    """The checkpoint directory of a run; keeps the newest two."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "checkpoints"

    @property
    def newest(self) -> Path | None:
        """The folder of the checkpoint that counts; None when there is none."""
        pointer = self._root / "latest.json"
        if not pointer.is_file():
            return None
        return self._root / str(json.loads(pointer.read_text("utf-8"))["name"])

    def save(self, learner: Learner, state: JobState) -> Path:
        """Write a checkpoint; it counts from the moment the pointer names it."""
        directory = self._fresh_directory(f"{state.policy_version}-{state.num_train_steps:06d}")
        learner.snapshot(directory)
        write_json(directory / "progress.json", state.to_json())
        write_json(self._root / "latest.json", {"name": directory.name})
        self._forget_all_but(directory.name)
        return directory

    def restore(self, learner: Learner) -> JobState | None:
        """Load the newest checkpoint into the learner; None when there is none."""
        directory = self.newest
        if directory is None:
            return None
        learner.restore(directory)
        return JobState.from_json(json.loads((directory / "progress.json").read_text("utf-8")))

    def _fresh_directory(self, name: str) -> Path:
        """One that was not there: a kill while writing must not hurt what the pointer names."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        directory = next(self._root / n for n in names if not (self._root / n).exists())
        directory.mkdir(parents=True)
        return directory

    def _forget_all_but(self, newest: str) -> None:
        others = [d for d in self._root.iterdir() if d.is_dir() and d.name != newest]
        for directory in sorted(others, key=lambda d: d.stat().st_mtime)[:-1]:
            shutil.rmtree(directory)


def lineage_after_restore(
    restored: PolicyVersion, *published: PolicyVersion | None
) -> PolicyVersion:
    """The version the restored weights go on under, given what others know as published.

    When newer versions were published and are now discarded, their numbers must not come back with
    other weights: a new lineage starts (main, main.1, main.2, ...).
    """
    known = [_age(version) for version in published if version is not None]
    newest_generation, number = max(known, default=(0, 0))
    if (newest_generation, number) <= _age(restored):
        return restored
    base = restored.lineage.partition(".")[0]
    return PolicyVersion(lineage=f"{base}.{newest_generation + 1}", number=restored.number)


def _age(version: PolicyVersion) -> tuple[int, int]:
    """Orders what one run publishes: main.2-7 is (2, 7)."""
    generation = version.lineage.partition(".")[2]
    return int(generation) if generation.isdecimal() else 0, version.number


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestPolicy:
    """What `policies/latest.json` says of the newest policy that went out."""

    version: PolicyVersion
    file_name: str
    sha256: str


def published_policy(run_dir: Path) -> LatestPolicy | None:
    """The newest policy that went out, if any."""
    pointer = run_dir / "policies" / "latest.json"
    if not pointer.is_file():
        return None
    data = json.loads(pointer.read_text("utf-8"))
    return LatestPolicy(
        version=PolicyVersion(lineage=data["lineage"], number=data["number"]),
        file_name=PurePath(data["path"]).name,
        sha256=data["sha256"],
    )
