"""Read serialised trajectories in place: the bytes of their digests, and floats as arrays.

trajectory = pb.Trajectory(seed=3)
kept, scored = digests_of(trajectory, trajectory.SerializeToString(deterministic=True))
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dialoop.v1 import trajectory_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray


def number_of(message: Any, field: str) -> int:
    """Return the number of a field of a message."""
    return int(message.DESCRIPTOR.fields_by_name[field].number)


_TURNS = number_of(pb.Trajectory, "turns")
_SEQUENCES = number_of(pb.Trajectory, "sequences")
TRAJECTORIES = number_of(pb.Group, "trajectories")
PER_TOKEN = number_of(pb.Reward, "per_token")
_COLUMNS = number_of(pb.Sequence, "columns")
_NAME = number_of(pb.Column, "name")
# What scoring may change, by the field of the trajectory that holds it.
_SCORED = {
    _TURNS: {number_of(pb.Turn, "rewards")},
    _SEQUENCES: {number_of(pb.Sequence, "advantage")},
}
_SCORED_COLUMNS = frozenset(("ref_logprobs", "token_advantages", "teacher_logprobs"))
_VARINT, _FIXED64, _BYTES = 0, 1, 2
# Hexadecimal digits of the two digests. Processors of today compute SHA-256 themselves.
_KEPT, _OF_SCORES = 24, 8
_NOTHING = sha256().hexdigest()[:_OF_SCORES]
_MORE = 0x80
"""Set in each byte of a varint but the last."""


_SHORT = [bytes([number]) for number in range(_MORE)]


def varint(number: int) -> bytes:
    """Return a number from 0 on as protobuf writes it."""
    if number < _MORE:
        return _SHORT[number]
    written = bytearray()
    while number >= _MORE:
        written.append(number & 0x7F | _MORE)
        number >>= 7
    written.append(number)
    return bytes(written)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and where it ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, position
        shift += 7


def fields_in(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field of a serialised message: number, start, start of its value, end."""
    position = start
    while position < end:
        begin, tag = position, data[position]
        position += 1
        if tag >= _MORE:
            tag, position = _read_varint(data, begin)
        kind, value = tag & 7, position
        if kind == _BYTES:
            size, value = data[position], position + 1
            if size >= _MORE:
                size, value = _read_varint(data, position)
            position = value + size
        elif kind == _VARINT:
            while data[position] >= _MORE:
                position += 1
            position += 1
        else:
            position += 8 if kind == _FIXED64 else 4
        yield tag >> 3, begin, value, position


def floats_of(data: bytes, field: int) -> NDArray[np.float32]:
    """Return the float column of a serialised message, float32 [N]."""
    return next(
        (
            np.frombuffer(data, "<f4", (end - value) // 4, value)
            for number, _, value, end in fields_in(data, 0, len(data))
            if number == field
        ),
        _NONE,
    )


_NONE = np.empty(0, np.float32)


class MemberSummary(NamedTuple):
    """What the queue reads of a trajectory beside its bytes and numbers.

    scored: its fields that hold what scoring may change. versions: the lowest and highest number
    of each lineage's policies.
    """

    scored: set[int]
    versions: dict[str, tuple[int, int]]

    def read(self, sequence: pb.Sequence, columns: Collection[str]) -> None:
        """Add what a sequence has; `columns` are the names of its columns."""
        if sequence.HasField("advantage") or not _SCORED_COLUMNS.isdisjoint(columns):
            self.scored.add(_SEQUENCES)
        for version in sequence.policy_versions[:]:
            lineage, number = version.lineage, version.number
            low, high = self.versions.get(lineage, (number, number))
            self.versions[lineage] = min(low, number), max(high, number)

    def note_rewards(self) -> None:
        """Note that a turn has rewards."""
        self.scored.add(_TURNS)


def summary_of(trajectory: pb.Trajectory) -> MemberSummary:
    """Return the summary of a trajectory that no check has read."""
    summary = MemberSummary(set(), {})
    if any(turn.rewards for turn in trajectory.turns):
        summary.note_rewards()
    for sequence in trajectory.sequences:
        summary.read(sequence, [column.name for column in sequence.columns])
    return summary


def digests_of(
    trajectory: pb.Trajectory, raw: bytes, summary: MemberSummary | None = None
) -> tuple[str, str]:
    """Return the digest of what scoring keeps of a trajectory, and that of the rest.

    raw: the trajectory as protobuf writes it, in a fixed order. The first digest is over what it
    would write without what scoring may change. What has no scores is not searched for them.
    """
    fields = (summary or summary_of(trajectory)).scored
    if not fields:
        return sha256(raw).hexdigest()[:_KEPT], _NOTHING
    kept, scored = sha256(), sha256()
    done = 0
    for number, begin, value, end in fields_in(raw, 0, len(raw)):
        if number not in fields:
            continue
        cut = [
            (b, e)
            for n, b, v, e in fields_in(raw, value, end)
            if n in _SCORED[number]
            or (n == _COLUMNS and number == _SEQUENCES and _is_scored(raw, v, e))
        ]
        if not cut:
            continue
        kept.update(raw[done:begin])
        done = end
        tag = varint(number << 3 | _BYTES)
        kept.update(tag + varint(end - value - sum(e - b for b, e in cut)))
        scored.update(tag + varint(begin))
        for cut_start, cut_end in cut:
            kept.update(raw[value:cut_start])
            scored.update(raw[cut_start:cut_end])
            value = cut_end
        kept.update(raw[value:end])
    kept.update(raw[done:])
    return kept.hexdigest()[:_KEPT], scored.hexdigest()[:_OF_SCORES]


def _is_scored(data: bytes, start: int, end: int) -> bool:
    """Return whether scoring writes the column that the bytes are."""
    return any(
        number == _NAME and data[value:stop].decode() in _SCORED_COLUMNS
        for number, _, value, stop in fields_in(data, start, end)
    )
