"""What changed between two safetensors files of one model, as a third safetensors file.

write_delta(old, new, out, {"sha256": digest})     # False where it would not be worth it
apply_delta(out, copy_of_old)                      # now `new`, byte for byte; returns its SHA-256

A tensor of which few elements changed is two tensors of a delta: `NAME#values`, the new elements in
their order, and `NAME#gaps`, how many elements lie between each and the one before it. A gap of 8
or 16 bits that does not reach far enough ends at an element that is the same in both. A tensor of
which much changed is there whole, as `NAME`. Elements are compared as bits, so -0.0 and NaN are
exact.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

from dialoop_learning.model.weight_files import Header, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

_BLOCK = 1 << 22
_GAPS, _VALUES = "#gaps", "#values"
_DENSE = 160
"""Mean distance between changed elements from which on gaps of 8 bits need so many fillers that
those of 16 bits are smaller."""
_WORTH = 0.9
"""Part of the whole that a delta is at most: it takes longer to apply a larger one than to load."""
_ENTRY_BYTES = 160  # more than an entry of a header has beside its name
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def write_delta(old: Path, new: Path, out: Path, facts: Mapping[str, str]) -> bool:
    """Write the changes from one file to another, with `facts` as metadata; say if it is worth it.

    It is not where the files hold other tensors than each other, or most elements changed. Then
    nothing useful is at `out`. Raises OSError.
    """
    before, after = read_header(old), read_header(new)
    if (before.tensors, before.metadata) != (after.tensors, after.metadata):
        return False
    room = sum(2 * (len(json.dumps(name)) + _ENTRY_BYTES) for name in after.tensors)
    room += len(json.dumps(dict(facts))) + _ENTRY_BYTES
    most = int(_WORTH * new.stat().st_size)
    entries: dict[str, Any] = {"__metadata__": dict(facts)}
    with out.open("wb") as file:
        file.seek(8 + room)
        for name, entry in after.tensors.items():
            theirs, ours = (_elements(*at, entry) for at in ((old, before), (new, after)))
            for part, kind, data in _changes(theirs, ours, entry):
                start = file.tell() - 8 - room
                data_offsets = [start, start + data.nbytes]
                shape = [len(data)] if part else entry["shape"]
                entries[name + part] = {"dtype": kind, "shape": shape, "data_offsets": data_offsets}
                file.write(data.data)
            if file.tell() > most:
                return False
        file.seek(0)
        file.write(room.to_bytes(8, "little") + json.dumps(entries).encode().ljust(room))
    return True


def apply_delta(delta: Path, file: Path) -> str:
    """Turn the file that a delta starts from into the one it leads to; return its SHA-256.

    One tensor at a time is in memory. Raises InvalidInput (MANIFEST_MISMATCH) for a delta that does
    not fit; the file is neither of the two then, and so it is after an OSError.
    """
    changes = read_header(delta)
    target = read_header(file)
    known = {name + part for name in target.tensors for part in ("", _GAPS, _VALUES)}
    if unknown := changes.tensors.keys() - known:
        raise _misfit(min(unknown))
    with file.open("r+b") as opened:
        digest = hashlib.sha256(opened.read(target.data_at))
        for name, entry in target.tensors.items():
            start, end = entry["data_offsets"]
            data = bytearray(end - start)
            opened.readinto(data)
            try:
                is_changed = _patch(data, name, entry, delta, changes)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise _misfit(name) from error
            if is_changed:
                opened.seek(target.data_at + start)
                opened.write(data)
            digest.update(data)
    return digest.hexdigest()


def _changes(
    old: NDArray[Any], new: NDArray[Any], entry: Mapping[str, Any]
) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Yield the parts of a tensor in a delta: suffix of the name, number format, data."""
    blocks = [slice(at, at + _BLOCK) for at in range(0, new.size, _BLOCK)]
    count = sum(int(np.count_nonzero(old[block] != new[block])) for block in blocks)
    if not count:
        return
    kind: Any = np.uint8 if count * _DENSE >= new.size else np.uint16
    each = new.itemsize + np.dtype(kind).itemsize
    if count * each < new.nbytes:
        gaps, values = _sparse(old, new, blocks, kind)
        if len(gaps) * each < new.nbytes:
            yield _VALUES, entry["dtype"], values
            yield _GAPS, "U8" if kind is np.uint8 else "U16", gaps
            return
    yield "", entry["dtype"], new


def _sparse(
    old: NDArray[Any], new: NDArray[Any], blocks: list[slice], kind: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return gaps and new values of the elements that changed, and of those that fill long gaps."""
    longest = int(np.iinfo(kind).max) + 1  # steps, of which a gap is one less
    gaps, values, last = [], [], -1
    for block in blocks:
        changed = np.flatnonzero(old[block] != new[block]) + block.start
        if not changed.size:
            continue
        steps = np.diff(changed, prepend=last)
        fillers = (steps - 1) // longest
        all_steps = np.full(changed.size + int(fillers.sum()), longest)
        all_steps[np.cumsum(fillers + 1) - 1] = steps - fillers * longest
        gaps.append((all_steps - 1).astype(kind))
        values.append(new[last + np.cumsum(all_steps)])
        last = int(changed[-1])
    return np.concatenate(gaps), np.concatenate(values)


def _patch(
    data: bytearray, name: str, entry: Mapping[str, Any], delta: Path, changes: Header
) -> bool:
    """Apply a delta to the bytes of one tensor; return whether it changes them."""
    whole = changes.tensors.get(name)
    if whole is not None:
        _require(whole["dtype"] == entry["dtype"] and whole["shape"] == entry["shape"])
        new_bytes = _bytes(delta, changes, whole)
        _require(len(new_bytes) == len(data))
        data[:] = new_bytes
        return True
    if name + _VALUES not in changes.tensors and name + _GAPS not in changes.tensors:
        return False
    changed, between = changes.tensors[name + _VALUES], changes.tensors[name + _GAPS]
    _require(changed["dtype"] == entry["dtype"] and between["dtype"] in ("U8", "U16"))
    kind = np.uint8 if between["dtype"] == "U8" else np.uint16
    elements = np.frombuffer(data, _bits(entry))
    values = np.frombuffer(_bytes(delta, changes, changed), elements.dtype)
    gaps = np.frombuffer(_bytes(delta, changes, between), kind)
    _require(len(values) == len(gaps))
    last = -1
    for at in range(0, len(gaps), _BLOCK):
        some = slice(at, at + _BLOCK)
        places = last + np.cumsum(gaps[some].astype(np.int64) + 1)
        elements[places] = values[some]  # IndexError where they reach behind its end
        last = int(places[-1])
    return True


def _elements(file: Path, header: Header, entry: Mapping[str, Any]) -> NDArray[Any]:
    """Return a tensor's elements as whole numbers of their bits [n], mapped."""
    start, end = entry["data_offsets"]
    if start == end:
        return np.empty(0, np.uint8)
    raw = np.memmap(file, np.uint8, "r", header.data_at + start, (end - start,))
    return raw.view(_bits(entry))


def _bits(entry: Mapping[str, Any]) -> Any:
    start, end = entry["data_offsets"]
    return _BITS.get((end - start) // max(1, math.prod(entry["shape"])), np.uint8)


def _bytes(file: Path, header: Header, entry: Mapping[str, Any]) -> bytes:
    start, end = entry["data_offsets"]
    with file.open("rb") as opened:
        _require(0 <= start <= end <= file.stat().st_size - header.data_at)
        opened.seek(header.data_at + start)
        return opened.read(end - start)


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError("it does not fit")


def _misfit(name: str) -> InvalidInput:
    return InvalidInput(
        f"The changes of {name} do not fit the policy that is here.",
        reason=Reason.MANIFEST_MISMATCH,
        remedy="Send the whole policy.",
    )
