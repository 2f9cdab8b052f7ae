"""Files of lines that another process appends to: read on from where the last look ended.

A file is known by what it holds, not by its name, because trajectories.jsonl is renamed when a part
of it is full. A last line without its end is left for later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import BinaryIO

_MARK_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a file has been read, and marks of its first bytes and of those before `offset`."""

    offset: int = 0
    head_bytes: int = 0
    head: bytes = b""
    tail: bytes = b""

    def is_of(self, file: BinaryIO) -> bool:
        """Return whether this file begins with what was read under this position."""
        return (
            os.fstat(file.fileno()).st_size >= self.offset
            and _mark(file, 0, self.head_bytes) == self.head
            and _mark(file, *self._tail_range()) == self.tail
        )

    def move(self, file: BinaryIO, offset: int) -> Position:
        """Return the position after reading the file on to `offset`."""
        head_bytes = self.head_bytes or min(offset, _MARK_BYTES)
        moved = replace(self, offset=offset, head_bytes=head_bytes, head=_mark(file, 0, head_bytes))
        return replace(moved, tail=_mark(file, *moved._tail_range()))

    def _tail_range(self) -> tuple[int, int]:
        num_bytes = min(self.offset, _MARK_BYTES)
        return self.offset - num_bytes, num_bytes


def _mark(file: BinaryIO, start: int, num_bytes: int) -> bytes:
    if not num_bytes:
        return b""
    file.seek(start)
    return blake2b(file.read(num_bytes), digest_size=16).digest()


def whole_lines(file: BinaryIO, start: int, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from `start` on until about `max_bytes` are read, or no line is whole.

    Lines end at newlines only: a policy may sample every other line separator.
    """
    file.seek(start)
    offset = start
    for line in file:
        if not line.endswith(b"\n") or offset - start >= max_bytes:
            return
        yield offset, line
        offset += len(line)
