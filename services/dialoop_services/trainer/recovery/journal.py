"""The journal: what happened since the newest checkpoint, so that a killed trainer does it again.

A line stands beside the checkpoint before anybody outside hears of what it says. On the same groups
a train step gives the same weights bit for bit, so that no published policy is ever taken back.

    {"train_step": 7, "lineage": "main", "number": 8, "trained": ["scored/1/a"], "dropped": {}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from dialoop.sequences import PolicyVersion

from dialoop_services.trainer.records.records import opened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dialoop_services.trainer.recovery.checkpoint import Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """A train step that was taken, a publish in between, or an evaluation that was judged.

    policy_version is the one after it; trained and dropped are lease ids, the latter by reason. An
    evaluation is named by the train step it was due after; of one that failed, judged is None.
    """

    train_step: int
    policy_version: PolicyVersion
    trained: tuple[str, ...] = ()
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evaluated: int | None = None
    judged: float | None = None

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """All leases it names."""
        return self.trained + tuple(one for lost in self.dropped.values() for one in lost)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        version = {"lineage": self.policy_version.lineage, "number": self.policy_version.number}
        leases = {"trained": self.trained, "dropped": dict(self.dropped)}
        evaluation = {"evaluated": self.evaluated, "judged": self.judged}
        is_one = self.evaluated is not None
        return {
            "train_step": self.train_step,
            **version,
            **leases,
            **(evaluation if is_one else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""
        return cls(
            train_step=data["train_step"],
            policy_version=PolicyVersion(lineage=data["lineage"], number=data["number"]),
            trained=tuple(data["trained"]),
            dropped={reason: tuple(leases) for reason, leases in data["dropped"].items()},
            evaluated=data.get("evaluated"),
            judged=data.get("judged"),
        )


class Journal:
    """Lies in the newest checkpoint's folder, so a new checkpoint begins it anew at one stroke."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def add(self, entry: JournalEntry) -> None:
        """Add a line; it is there when this returns, whatever becomes of the process."""
        path = self._path
        if path is None:  # before its first checkpoint a run has nothing to go on from
            return
        with opened(path) as file:
            file.write(json.dumps(entry.to_json()) + "\n")

    def entries(self) -> tuple[JournalEntry, ...]:
        """Everything since the checkpoint, but for a line that a kill cut short."""
        path = self._path
        if path is None or not path.is_file():
            return ()
        whole = path.read_text("utf-8").split("\n")[:-1]
        return tuple(JournalEntry.from_json(json.loads(line)) for line in whole)

    @property
    def _path(self) -> Path | None:
        directory = self._checkpoints.newest
        return None if directory is None else directory / "journal.jsonl"
