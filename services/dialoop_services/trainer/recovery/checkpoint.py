"""Checkpoints: everything a restarted trainer needs to go on as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion

from dialoop_services.trainer.records.records import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_services.trainer.learner.ranked_learner import AnyLearner

_FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far the job is; owned by the job and written whole into every checkpoint.

    `consumed_lease_ids` and `consumed_group_ids` are of the groups whose gradient is in the weights
    and whose acknowledgement may not have reached the queue yet: a restart acknowledges the leases,
    and a redelivery of a group is acknowledged, not trained again. `due_evaluations` are the train
    steps after which an evaluation was due that has not been judged yet.
    """

    policy_version: PolicyVersion
    num_warm_start_steps: int = 0
    num_train_steps: int = 0
    num_policy_versions: int = 0
    num_trained_tokens: int = 0
    best_evaluation: float | None = None
    num_evaluations_without_gain: int = 0
    stopped_early: str = ""
    num_trained_trajectories: int = 0
    num_steps_with_older_data: int = 0
    max_logprob_difference: float = 0.0
    cursor: str = ""
    consumed_lease_ids: list[str] = field(default_factory=list)
    consumed_group_ids: list[str] = field(default_factory=list)
    staleness_histogram: Counter[int] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    due_evaluations: list[int] = field(default_factory=list)
    heldout_losses: dict[str, float] = field(default_factory=dict)
    phase_seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": _FORMAT, **values, "policy_version": asdict(self.policy_version)}

    def result(self) -> dict[str, Any]:
        """What trainer.json says of the whole run."""
        older = self.num_steps_with_older_data / max(1, self.num_train_steps)
        return {
            "phases": self.phase_seconds,
            "num_train_steps": self.num_train_steps,
            "num_policy_versions": self.num_policy_versions,
            "staleness_histogram": dict(sorted(self.staleness_histogram.items())),
            "share_of_train_steps_with_older_data": older,
            "max_logprob_difference": self.max_logprob_difference,
            "num_trained_tokens": self.num_trained_tokens,
            "num_trajectories_trained": self.num_trained_trajectories,
            "forks": dict(self.forks),
            "evaluations": self.evaluations,
            "heldout_losses": self.heldout_losses,
            "stopped_early": self.stopped_early,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Progress:
        """What `to_json` wrote."""
        if data.pop("format", None) != _FORMAT:
            raise InvalidConfig("The checkpoint is of another format.", remedy="Start a fresh run.")
        version = PolicyVersion(**data.pop("policy_version"))
        histogram = Counter({int(k): v for k, v in data.pop("staleness_histogram").items()})
        forks = Counter(data.pop("forks"))
        return cls(policy_version=version, staleness_histogram=histogram, forks=forks, **data)


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

    def save(self, learner: AnyLearner, progress: Progress) -> Path:
        """Write a checkpoint; it counts from the moment the pointer names it."""
        directory = self._fresh_directory(
            f"{progress.policy_version}-{progress.num_train_steps:06d}"
        )
        learner.save(directory)
        write_json(directory / "progress.json", progress.to_json())
        write_json(self._root / "latest.json", {"name": directory.name})
        self._forget_all_but(directory.name)
        return directory

    def restore(self, learner: AnyLearner) -> Progress | None:
        """Load the newest checkpoint into the learner; None when there is none."""
        directory = self.newest
        if directory is None:
            return None
        learner.restore(directory)
        return Progress.from_json(json.loads((directory / "progress.json").read_text("utf-8")))

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


def published_version(run_dir: Path) -> PolicyVersion | None:
    """The version that `policies/latest.json` names, if any."""
    pointer = run_dir / "policies" / "latest.json"
    if not pointer.is_file():
        return None
    data = json.loads(pointer.read_text("utf-8"))
    return PolicyVersion(lineage=data["lineage"], number=data["number"])
