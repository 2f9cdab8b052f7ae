"""The members of one group, and the one rule by which the group closes.

Values and transitions only, without a clock, leases or counts: the model that the Lua of
`redis_store` is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dialoop.v1 import replay_service_pb2 as pb
from dialoop_services.replay.store import MemberFacts

if TYPE_CHECKING:
    from collections.abc import Collection


class GroupClosing(Enum):
    """What the closing rule says of a group.

    OPEN: a member is to be played. WHOLE: all are finished. SHORT: some were given up, and the
    others are enough. HOPELESS: too few are finished, and no other member is to be played.
    """

    OPEN = auto()
    WHOLE = auto()
    SHORT = auto()
    HOPELESS = auto()


@dataclass(slots=True)
class GroupMember:
    """One trajectory of a group: `facts` once it is finished; `payload` until the group closes."""

    facts: MemberFacts | None = None
    payload: bytes = b""
    num_failures: int = 0
    turns: list[pb.RecordedTurn] = field(default_factory=list)
    snapshot: bytes = b""


@dataclass(slots=True)
class Assembly:
    """The members of a task's group. `min_trajectories` 0: only the whole group is used."""

    num_trajectories: int
    min_trajectories: int
    max_attempts: int
    members: list[GroupMember] = field(init=False)

    def __post_init__(self) -> None:
        self.members = [GroupMember() for _ in range(self.num_trajectories)]

    @property
    def open_members(self) -> list[int]:
        """Return the members that are to be played: neither finished nor given up."""
        return [
            index
            for index, member in enumerate(self.members)
            if member.facts is None and member.num_failures < self.max_attempts
        ]

    @property
    def finished(self) -> list[GroupMember]:
        """Return the finished members, in order."""
        return [member for member in self.members if member.facts is not None]

    @property
    def num_bytes(self) -> int:
        """Return the size of the finished members."""
        return sum(len(member.payload) for member in self.members)

    @property
    def digest(self) -> str:
        """Return the digest of the group of all finished members."""
        return ",".join(
            member.facts.digest.partition(".")[0] for member in self.members if member.facts
        )

    @property
    def versions(self) -> dict[str, tuple[int, int]]:
        """Return the oldest and newest policy version of all finished members, by lineage."""
        merged: dict[str, tuple[int, int]] = {}
        for member in self.members:
            for lineage, span in member.facts.versions.items() if member.facts else ():
                before = merged.get(lineage, span)
                merged[lineage] = (min(before[0], span[0]), max(before[1], span[1]))
        return merged

    @property
    def closing(self) -> GroupClosing:
        """Apply the closing rule."""
        if self.open_members:
            return GroupClosing.OPEN
        num_finished = len(self.finished)
        if num_finished == self.num_trajectories:
            return GroupClosing.WHOLE
        is_enough = 0 < self.min_trajectories <= num_finished
        return GroupClosing.SHORT if is_enough else GroupClosing.HOPELESS

    def fail(self, indices: Collection[int], *, keeps_turns: bool) -> None:
        """Count a failed attempt at these open members, or at all open ones where none is named."""
        for index in self.open_members:
            if not indices or index in indices:
                self.members[index].num_failures += 1
                if not keeps_turns:
                    self.members[index].turns = []

    def take_payload(self) -> bytes:
        """Return the serialised trajectories as the end of a serialised Group, and forget them."""
        payload = b"".join(member.payload for member in self.members)
        for member in self.members:
            member.payload = b""
        return payload
