"""What an audit says: findings with evidence, and what could not be checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dialoop_ops.audit.records import Rollout

ERROR, WARNING = "error", "warning"


class NotCheckable(Exception):
    """A check lacks what it needs; its text says what."""


MAX_EVIDENCE = 5
"""Pieces of evidence of a finding that its report shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where a fault shows. What does not apply is None; tokens and turns count from 0.

    step: the train step; version: the policy version that sampled it; sequence: the trajectory's
    token row.
    """

    trajectory: str = ""
    step: int | None = None
    version: int | None = None
    turn: int | None = None
    sequence: int | None = None
    token: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        names = ("trajectory", "step", "version", "turn", "sequence", "token")
        values = ((name, getattr(self, name)) for name in names)
        place = ", ".join(f"{name} {value}" for name, value in values if value not in (None, ""))
        return ": ".join(filter(None, (place, self.detail)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One fault of one path. count: how often it shows, of `total` places that were looked at."""

    fault: str
    severity: str
    message: str
    remedy: str
    evidence: tuple[Evidence, ...]
    count: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The findings of one path.

    checked: faults that were looked for; limits: fault -> what of it could not be; not_checked:
    fault -> why it could not be looked for at all; notes: what of
    the path could not be read.
    """

    path: Path
    kind: str
    num_rollouts: int
    findings: tuple[AuditFinding, ...]
    checked: tuple[str, ...]
    not_checked: dict[str, str]
    limits: dict[str, str]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return asdict(self) | {"path": str(self.path)}


def finding_of(  # noqa: PLR0913 - what a finding has
    fault: str,
    severity: str,
    evidence: Sequence[Evidence],
    *,
    total: int,
    message: str,
    remedy: str,
    count: int | None = None,
) -> list[AuditFinding]:
    """Return the finding that the evidence makes; none without evidence, of which a few stay.

    count: how often the fault shows, where that is not the number of pieces of evidence.
    """
    if not evidence:
        return []
    return [
        AuditFinding(
            fault=fault,
            severity=severity,
            message=message,
            remedy=remedy,
            evidence=tuple(evidence[:MAX_EVIDENCE]),
            count=len(evidence) if count is None else count,
            total=total,
        )
    ]


def evidence_of(rollout: Rollout, **fields: Any) -> Evidence:
    """Return evidence in a rollout; `fields` are further fields of Evidence."""
    place = {"trajectory": rollout.name, "step": rollout.step, "version": rollout.version}
    return Evidence(**(place | fields))
