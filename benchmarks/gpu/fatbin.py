"""Cut CUDA libraries down to the code of one generation of chips.

An ELF file keeps CUDA code in sections of containers, each with entries for several architectures:
machine code (cubin) and PTX. `keep_architecture` leaves those that a chip of that architecture
loads, and fills the rest with zeros, which compress to nothing. The file keeps its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_MAGIC = 0xBA55ED50
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Code of one architecture, as 90 for sm_90: bytes [start, end) of the file."""

    kind: int
    architecture: int
    start: int
    end: int


def keep_architecture(library: Path, architecture: int) -> int:
    """Rewrite a library in place; return how many bytes of CUDA code are left in it."""
    data = bytearray(library.read_bytes())
    kept = 0
    for start, body, end in list(_containers(data)):
        chosen = _chosen(list(_entries(data, body, end)), architecture)
        code = b"".join(bytes(data[entry.start : entry.end]) for entry in chosen)
        data[body:end] = code.ljust(end - body, b"\0")
        struct.pack_into("<Q", data, start + 8, len(code))
        kept += len(code)
    library.write_bytes(data)
    return kept


def _chosen(entries: list[Entry], architecture: int) -> list[Entry]:
    """Return the machine code for it, else the newest PTX that can become it, else one entry.

    A container is never left empty, because the loader refuses that.
    """
    code = [e for e in entries if (e.kind, e.architecture) == (_CUBIN, architecture)]
    if code:
        return code
    texts = [e for e in entries if e.kind == _PTX and e.architecture <= architecture]
    if texts:
        return [max(texts, key=lambda entry: entry.architecture)]
    return [min(entries, key=lambda entry: entry.end - entry.start)] if entries else []


def _sections(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Give start and end of each section with CUDA code, in a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names = heads[names_at][4]
    for head in heads:
        begin = names + head[0]
        name = bytes(data[begin : data.index(b"\0", begin)]).decode("ascii", "replace")
        if name in _SECTIONS:
            yield head[4], head[4] + head[5]


def _containers(data: bytes | bytearray) -> Iterator[tuple[int, int, int]]:
    """Give where each container, its entries, and its end lie."""
    for start, end in _sections(data):
        place = start
        while place < end - 16:
            magic, _, head_size, size = struct.unpack_from("<IHHQ", data, place)
            if magic != _MAGIC:
                place += 8  # containers are aligned to that
                continue
            yield place, place + head_size, place + head_size + size
            place += head_size + size


def _entries(data: bytes | bytearray, place: int, end: int) -> Iterator[Entry]:
    while place < end:
        kind, _, head_size, size = struct.unpack_from("<HHIQ", data, place)
        (architecture,) = struct.unpack_from("<I", data, place + 28)
        after = place + head_size + size
        yield Entry(kind=kind, architecture=architecture, start=place, end=after)
        place = after
