"""Sequences to protobuf and back: their arrays are named, typed columns of bytes.

proto = sequence_to_proto(sequence_of([([5, 8], {"source": Source.PROMPT})]))
columns_of(proto)["token_ids"].values  # int32 [L], read in place

Sequences have no `Codec`: four of their fields are columns with fixed names, and the segments index
a table of policy versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dialoop.errors import InvalidSequence
from dialoop.reasons import Reason
from dialoop.sequences import (
    Along,
    Column,
    ForkCause,
    PolicyVersion,
    Segment,
    Sequence,
    Source,
    is_column_name,
)
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.codec import Codec, enum

DATA_TYPES: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        pb.DATA_TYPE_BOOL: np.dtype("?"),
        pb.DATA_TYPE_UINT8: np.dtype("u1"),
        pb.DATA_TYPE_UINT16: np.dtype("<u2"),
        pb.DATA_TYPE_INT32: np.dtype("<i4"),
        pb.DATA_TYPE_INT64: np.dtype("<i8"),
        pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
        pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
        pb.DATA_TYPE_FLOAT64: np.dtype("<f8"),
    }
)
"""The arrays' types by DataType; all are little endian."""
_NUMBERS = {dtype: number for number, dtype in DATA_TYPES.items()}
_FLOATS = ("inference_logprobs", "ref_logprobs", "token_advantages")
FIXED_COLUMNS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "token_ids": (pb.DATA_TYPE_INT32, pb.ALONG_TOKENS),
        **dict.fromkeys(_FLOATS, (pb.DATA_TYPE_FLOAT32, pb.ALONG_SAMPLED)),
    }
)
"""Data type (of four bytes) and rows of the columns whose names have a meaning of their own."""
_ALONG = {int(pb.ALONG_TOKENS): Along.TOKENS, int(pb.ALONG_SAMPLED): Along.SAMPLED}
_NO_IDS, _NO_FLOATS = np.empty(0, np.int32), np.empty(0, np.float32)
_CAUSE = enum(ForkCause, unspecified=ForkCause.NONE)
_SOURCE = enum(Source)
POLICY_VERSION = Codec(PolicyVersion, pb.PolicyVersion)


def column_to_proto(name: str, along: Along, values: NDArray[Any]) -> pb.Column:
    """Return the column of an array [N, ...] with a row for each token, or each sampled one.

    Raises InvalidSequence (BAD_COLUMN) for an array of a type that the wire does not have.
    """
    little = values.dtype.newbyteorder("<")
    if little not in _NUMBERS:
        raise _bad(name, f"has values of type {values.dtype}", _known_types())
    return pb.Column(
        name=name,
        data_type=pb.DataType.Name(_NUMBERS[little]),
        along=pb.Along.Name(along.value),
        shape=values.shape,
        data=values.astype(little, copy=False).tobytes(),
    )


def columns_of(sequence: pb.Sequence) -> dict[str, Column]:
    """Return all columns of a sequence by name, as arrays that read the message's bytes in place.

    Raises InvalidSequence (BAD_COLUMN) where name, type, shape and bytes do not fit each other, and
    where a name comes twice. Whether they fit the tokens is the caller's to check.
    """
    columns: dict[str, Column] = {}
    for proto in sequence.columns:
        name, data = proto.name, proto.data
        if name in columns:
            raise _bad(name, "comes twice", "Give each column a name of its own.")
        dtype = _type_of_column(name, proto.data_type, proto.along, proto.shape, len(data))
        values = np.frombuffer(data, dtype).reshape(proto.shape)
        columns[name] = Column(values=values, along=_ALONG[proto.along])
    return columns


def _type_of_column(
    name: str, number: int, along: int, shape: SequenceOf[int], num_bytes: int
) -> np.dtype[Any]:
    """Return the type of a column's numbers, from the DataType `number`.

    Raises InvalidSequence (BAD_COLUMN) where name, type, shape and bytes do not fit each other.
    """
    fixed = FIXED_COLUMNS.get(name)
    if fixed is not None and ((number, along) != fixed or len(shape) != 1):
        type_name = pb.DataType.Name(fixed[0])
        raise _bad(
            name,
            "has another type, other rows or another shape than its name asks for",
            f"Use {type_name}, {pb.Along.Name(fixed[1])} and one number for each row.",
        )
    if fixed is None and not is_column_name(name):
        raise _bad(
            name,
            "has a name that columns cannot have",
            "Use up to 64 of a-z, 0-9 and _, and no name of a field of the sequence.",
        )
    dtype = DATA_TYPES.get(number)
    if dtype is None:
        raise _bad(name, f"has the data type {number}, which is none", _known_types())
    if along not in _ALONG:
        raise _bad(name, "does not say along which tokens it is", "Set `along`.")
    if not shape or min(shape) < 0 or prod(shape) * dtype.itemsize != num_bytes:
        raise _bad(
            name,
            f"has {num_bytes} bytes for the shape {list(shape)} of {dtype.name}",
            "Give shape[0] as the number of rows, and all numbers row by row.",
        )
    return dtype


def sequence_to_proto(sequence: Sequence) -> pb.Sequence:
    """Return the message of a sequence; empty arrays are left out."""
    versions = {version: place for place, version in enumerate(sequence.policy_versions)}
    columns = [column_to_proto("token_ids", Along.TOKENS, sequence.token_ids)]
    for name in _FLOATS:
        values: NDArray[Any] = getattr(sequence, name)
        if len(values):
            columns.append(column_to_proto(name, Along.SAMPLED, values))
    for name, column in sequence.columns.items():
        columns.append(column_to_proto(name, column.along, column.values))
    return pb.Sequence(
        columns=columns,
        segments=[_segment_to_proto(segment, versions) for segment in sequence.segments],
        policy_versions=map(POLICY_VERSION.to_proto, versions),
        advantage=sequence.advantage,
        fork_cause=pb.ForkCause.Name(sequence.fork_cause.value),
    )


def sequence_from_proto(proto: pb.Sequence) -> Sequence:
    """Return the sequence of a message; raises InvalidSequence where its parts do not agree."""
    columns = columns_of(proto)
    # Arrays of the domain may be written to, and the message's bytes may not.
    for name, column in columns.items():
        columns[name] = replace(column, values=column.values.copy())
    versions = tuple(map(POLICY_VERSION.from_proto, proto.policy_versions))
    fixed = {name: columns.pop(name).values for name in FIXED_COLUMNS if name in columns}
    return Sequence(
        token_ids=fixed.get("token_ids", _NO_IDS),
        segments=tuple(_segment_from_proto(segment, versions) for segment in proto.segments),
        inference_logprobs=fixed.get("inference_logprobs", _NO_FLOATS),
        ref_logprobs=fixed.get("ref_logprobs", _NO_FLOATS),
        advantage=proto.advantage if proto.HasField("advantage") else None,
        token_advantages=fixed.get("token_advantages", _NO_FLOATS),
        fork_cause=_CAUSE.decode(proto.fork_cause),
        columns=columns,
    )


def _segment_to_proto(segment: Segment, versions: Mapping[PolicyVersion, int]) -> pb.Segment:
    version = segment.policy_version
    return pb.Segment(
        start=segment.start,
        length=segment.length,
        source=pb.Source.Name(segment.source.value),
        turn=segment.turn,
        message_index=segment.message_index,
        char_start=segment.char_start,
        char_length=segment.char_length,
        policy_version_index=None if version is None else versions[version],
    )


def _segment_from_proto(proto: pb.Segment, versions: tuple[PolicyVersion, ...]) -> Segment:
    version = None
    if proto.HasField("policy_version_index"):
        if not 0 <= proto.policy_version_index < len(versions):
            raise InvalidSequence(
                f"The segment at {proto.start} has policy_version_index "
                f"{proto.policy_version_index}, of {len(versions)} versions.",
                reason=Reason.OUT_OF_RANGE,
                remedy="Name a version of the sequence's policy_versions.",
            )
        version = versions[proto.policy_version_index]
    return Segment(
        start=proto.start,
        length=proto.length,
        source=_SOURCE.decode(proto.source),
        turn=proto.turn,
        message_index=proto.message_index if proto.HasField("message_index") else None,
        char_start=proto.char_start,
        char_length=proto.char_length,
        policy_version=version,
    )


def _known_types() -> str:
    return f"Use one of: {', '.join(dtype.name for dtype in DATA_TYPES.values())}."


def _bad(name: str, what: str, remedy: str) -> InvalidSequence:
    return InvalidSequence(f"Column '{name[:64]}' {what}.", reason=Reason.BAD_COLUMN, remedy=remedy)
