"""Frames on a pipe or socket: four bytes of length, then the content."""

from __future__ import annotations

import os
import struct

_LENGTH = struct.Struct("!I")


def read_frame(fd: int) -> bytes | None:
    """Return the next frame; None at the end of the stream."""
    head = _read_exactly(fd, _LENGTH.size)
    if head is None:
        return None
    return _read_exactly(fd, _LENGTH.unpack(head)[0])


def write_frame(fd: int, content: bytes) -> None:
    """Send one frame; OSError when the other end is closed."""
    rest = memoryview(_LENGTH.pack(len(content)) + content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 16))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
