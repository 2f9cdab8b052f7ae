"""The journal: what happened since the newest checkpoint, so that a restarted trainer repeats it.

The trainer writes a line beside the checkpoint before another service learns of the step. On the
same groups a train step gives the same weights bit for bit, so no published policy is taken back.

    {"train_step": 7, "lineage": "main", "number": 8, "trained": ["scored/1/a"], "dropped": {}}
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from dialoop.sequences import PolicyVersion

from dialoop_services.runtime.durable import named_failures, sync_file
from dialoop_services.trainer.records.records import open_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dialoop_services.trainer.recovery.checkpoint import Checkpoints


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """A train step, a publish without one, groups dropped before a step, or an evaluation's result.

    policy_version: the version after it. trained: lease ids. dropped: lease ids by reason.
    candidates: metrics of the groups that were leased for the step, since the queue keeps only some
    of them. figures: what metrics need of groups dropped before the next step. num_in_a_row: groups
    and batches without a signal in a row by then. num_empty_batches: of the whole job by then.
    evaluated: the train step after which an evaluation was due. judged: its result, None if it
    failed.
    """

    train_step: int
    policy_version: PolicyVersion
    trained: tuple[str, ...] = ()
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    candidates: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[list[dict[str, Any]]] = ()
    num_in_a_row: tuple[int, int] = (0, 0)
    num_empty_batches: int = 0
    evaluated: int | None = None
    judged: float | None = None

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Return all leases of the entry."""
        return self.trained + tuple(i for lease_ids in self.dropped.values() for i in lease_ids)

    @property
    def is_before_a_step(self) -> bool:
        """Return whether it says only what was dropped before a train step."""
        return bool(self.dropped) and not self.trained

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        version = {"lineage": self.policy_version.lineage, "number": self.policy_version.number}
        leases = {"trained": self.trained, "dropped": dict(self.dropped)}
        candidates = {"candidates": dict(self.candidates)} if self.candidates else {}
        before = {
            "figures": list(self.figures),
            "num_in_a_row": self.num_in_a_row,
            "num_empty_batches": self.num_empty_batches,
        }
        evaluation = {"evaluated": self.evaluated, "judged": self.judged}
        return {
            "train_step": self.train_step,
            **version,
            **leases,
            **candidates,
            **(before if self.is_before_a_step else {}),
            **(evaluation if self.evaluated is not None else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the entry that `to_json` wrote."""
        return cls(
            train_step=data["train_step"],
            policy_version=PolicyVersion(lineage=data["lineage"], number=data["number"]),
            trained=tuple(data["trained"]),
            dropped={reason: tuple(leases) for reason, leases in data["dropped"].items()},
            candidates=data.get("candidates", {}),
            figures=data.get("figures", ()),
            num_in_a_row=tuple(data.get("num_in_a_row", (0, 0))),
            num_empty_batches=data.get("num_empty_batches", 0),
            evaluated=data.get("evaluated"),
            judged=data.get("judged"),
        )


class Journal:
    """The file of entries in the newest checkpoint's folder; a new checkpoint has none yet."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def add(self, entry: JournalEntry) -> None:
        """Add a line; when this returns, neither a kill nor a power loss loses it."""
        path = self._path
        if path is None:  # before its first checkpoint a run has nothing to recover from
            return
        is_new = not path.exists()
        with named_failures(path), open_lines(path) as file:
            file.write(json.dumps(entry.to_json()) + "\n")
            file.flush()
            sync_file(path)
            if is_new:
                sync_file(path.parent)

    def entries(self) -> tuple[JournalEntry, ...]:
        """Return the entries since the checkpoint, up to a line that a kill or the disk damaged."""
        path = self._path
        if path is None or not path.is_file():
            return ()
        entries: list[JournalEntry] = []
        for line in path.read_text("utf-8", errors="replace").split("\n")[:-1]:
            try:
                entries.append(JournalEntry.from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                log.error("The journal is damaged.", extra={"num_entries": len(entries)})
                break
        return tuple(entries)

    @property
    def _path(self) -> Path | None:
        directory = self._checkpoints.newest
        return None if directory is None else directory / "journal.jsonl"
