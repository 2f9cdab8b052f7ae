"""Which trajectories of a run somebody wants to see: the same words on the console and in `show`.

`Filters.of({"outcome": "trained", "reward": ":0.5"})` is asked by `accepts` in a plain pass over
trajectories.jsonl, and by `where` in the index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.trajectory import Owner, StopReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_ops.runs.summaries import TrajectorySummary

ANY_OWNER = "ANY"
MIN_TEXT = 3
"""Fewest characters of a text search: the index keeps triples of characters."""

_EXACT = ("environment", "outcome", "label", "task_key", "group_id")
_RANGES = {
    "reward": "reward",
    "staleness": "staleness",
    "step": "train_step",
    "length": "num_sampled",
    "tools": "num_tool_calls",
}
# A bit for each member, so that a trajectory with several turns or failures has them all.
_STOPS = {reason.name: 1 << reason for reason in StopReason}
_OWNERS = {owner.name: 1 << owner for owner in Owner}


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; None is open."""

    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, name: str, text: str) -> Range:
        """Read "3", "0.5:", ":2" or "1:4"; InvalidInput (INVALID_FIELD) for anything else."""
        low, colon, high = text.partition(":")
        try:
            ends = [float(end) if end.strip() else None for end in (low, high if colon else low)]
        except ValueError:
            ends = [math.nan]
        if any(end is not None and math.isnan(end) for end in ends):
            raise InvalidInput(
                f"{name} is '{text[:40]}'.",
                reason=Reason.INVALID_FIELD,
                remedy='Give a number or a range: "3", "0.5:", ":2" or "1:4".',
            )
        return cls(*ends)

    def has(self, value: float | None) -> bool:
        """Return whether the value is in it; None is in no range that has an end."""
        return self.meets(value, value)

    def meets(self, first: float | None, last: float | None) -> bool:
        """Return whether any number from `first` to `last` is in it."""
        if self.low is None and self.high is None:
            return True
        if first is None or last is None:
            return False
        return (self.low is None or last >= self.low) and (self.high is None or first <= self.high)


_ANY = Range()


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Conditions that all hold. An empty text and an open range ask for nothing.

    `version`: any policy version that sampled it. `length`: sampled tokens. `tools`: tool calls
    that were run. `stop_reason`: of any turn. `owner`: of any failure; "ANY" for whichever. `text`:
    part of the messages, in capitals or not.
    """

    trajectory_id: str = ""
    """The beginning of the id."""
    group_id: str = ""
    task_key: str = ""
    environment: str = ""
    outcome: str = ""
    label: str = ""
    stop_reason: str = ""
    owner: str = ""
    text: str = ""
    reward: Range = _ANY
    staleness: Range = _ANY
    version: Range = _ANY
    length: Range = _ANY
    tools: Range = _ANY
    step: Range = _ANY

    def __post_init__(self) -> None:
        _require_member("stop_reason", self.stop_reason, _STOPS)
        _require_member("owner", self.owner, {ANY_OWNER: 0, **_OWNERS})
        if self.text and (len(self.text) < MIN_TEXT or "\0" in self.text):
            raise InvalidInput(
                f"text is '{self.text}'.",
                reason=Reason.INVALID_FIELD,
                remedy=f"Search for {MIN_TEXT} characters or more.",
            )

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Filters:
        """Return the filters that a query or a command line asks for; InvalidInput otherwise."""
        ranges = {field.name for field in fields(cls) if field.default == _ANY}
        names = {field.name for field in fields(cls)}
        for name in values:
            if name not in names:
                raise InvalidInput(
                    f"There is no filter '{name[:40]}'.",
                    reason=Reason.INVALID_FIELD,
                    remedy=f"Use {', '.join(sorted(names))}.",
                )
        return cls(
            **{k: Range.of(k, v) if k in ranges else v for k, v in values.items() if v}  # type: ignore[arg-type]
        )

    def accepts(self, summary: TrajectorySummary, text: str) -> bool:
        """Return whether a trajectory with these messages is wanted."""
        is_asked_owner = self.owner in summary.owners or (
            self.owner == ANY_OWNER and bool(summary.owners)
        )
        return (
            summary.trajectory_id.startswith(self.trajectory_id)
            and all(getattr(self, name) in ("", getattr(summary, name)) for name in _EXACT)
            and (not self.stop_reason or self.stop_reason in summary.stop_reasons)
            and (not self.owner or is_asked_owner)
            and all(getattr(self, n).has(getattr(summary, field)) for n, field in _RANGES.items())
            and self.version.meets(summary.oldest, summary.newest)
            and (not self.text or self.text.lower() in text.lower())
        )

    def where(self) -> tuple[str, list[object]]:
        """Return the same condition on the index's table `trajectory`, with its parameters."""
        terms: list[tuple[str, object]] = []
        if self.trajectory_id:
            terms.append(("trajectory_id >= ?", self.trajectory_id))
            terms.append(("trajectory_id < ?", self.trajectory_id + chr(0x10FFFF)))
        terms += [(f"{name} = ?", getattr(self, name)) for name in _EXACT if getattr(self, name)]
        if self.stop_reason:
            terms.append(("stops & ? <> 0", _STOPS[self.stop_reason]))
        if self.owner:
            bits = sum(_OWNERS.values()) if self.owner == ANY_OWNER else _OWNERS[self.owner]
            terms.append(("owners & ? <> 0", bits))
        columns = {name: (column, column) for name, column in _RANGES.items()}
        columns["version"] = ("oldest", "newest")
        for name, (first, last) in columns.items():
            bounds: Range = getattr(self, name)
            terms += [(f"{last} >= ?", bounds.low)] if bounds.low is not None else []
            terms += [(f"{first} <= ?", bounds.high)] if bounds.high is not None else []
        if self.text:
            phrase = '"' + self.text.replace('"', '""') + '"'
            terms.append(("number IN (SELECT rowid FROM words WHERE words MATCH ?)", phrase))
        return " AND ".join(term for term, _ in terms) or "1", [value for _, value in terms]


def bits_of_stops(names: tuple[str, ...]) -> int:
    """Return the bits of stop reasons, as the index keeps them."""
    return sum(_STOPS.get(name, 0) for name in names)


def bits_of_owners(names: tuple[str, ...]) -> int:
    """Return the bits of failures' owners, as the index keeps them."""
    return sum(_OWNERS.get(name, 0) for name in names)


def stops_of_bits(bits: int) -> tuple[str, ...]:
    """Return the stop reasons that the bits stand for."""
    return tuple(sorted(name for name, bit in _STOPS.items() if bits & bit))


def owners_of_bits(bits: int) -> tuple[str, ...]:
    """Return the owners that the bits stand for."""
    return tuple(sorted(name for name, bit in _OWNERS.items() if bits & bit))


def _require_member(name: str, value: str, members: Mapping[str, int]) -> None:
    if value and value not in members:
        raise InvalidInput(
            f"{name} is '{value[:40]}'.",
            reason=Reason.INVALID_FIELD,
            remedy=f"Use one of: {', '.join(members)}.",
        )
