"""A codec between a dataclass and its protobuf message, from a table of fields.

TURN = Codec(Turn, pb.Turn, rewards=many(REWARD), stop_reason=enum(StopReason))
TURN.to_proto(turn); TURN.from_proto(proto)

Fields of one name belong together. Numbers, texts, lists of them and maps need no row: protobuf's
descriptor says what they are. Nested messages, enums, arrays, and fields with another name on the
wire need one.

An absent field stays absent: an optional field that is None is not sent, and one that did not
arrive gets the dataclass's default. Nothing else is filled in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from dialoop.errors import InvalidInput
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from enum import IntEnum

    from google.protobuf.message import Message

D = TypeVar("D")
P = TypeVar("P", bound="Message")


@dataclass(frozen=True, slots=True)
class FieldRow:
    """How one field crosses the wire.

    encode: the dataclass's value to the message's; None is not sent. decode: the other way. wire:
    its name in the message, where that is another one. With `spreads`, encode gives several fields
    of the message by name, and decode reads the whole message.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    wire: str = ""
    spreads: bool = False


def submessage(codec: Codec[Any, Any], *, wire: str = "") -> FieldRow:
    """Return the row of a nested message."""
    return FieldRow(codec.to_proto, codec.from_proto, wire)


def many(codec: Codec[Any, Any], *, wire: str = "") -> FieldRow:
    """Return the row of a tuple of nested messages."""
    return each(codec.to_proto, codec.from_proto, wire=wire)


def each(encode: Callable[[Any], Any], decode: Callable[[Any], Any], *, wire: str = "") -> FieldRow:
    """Return the row of a tuple whose items are converted one by one."""
    return FieldRow(
        lambda values: [encode(value) for value in values],
        lambda values: tuple([decode(value) for value in values]),
        wire,
    )


def wire_name(wire: str) -> FieldRow:
    """Return the row of a list of numbers or texts that has another name in the message."""
    return FieldRow(_same, tuple, wire)


def enum(kind: type[IntEnum], *, unspecified: IntEnum | None = None) -> FieldRow:
    """Return the row of an enum; a number that is none of its members raises InvalidInput.

    unspecified: what the number 0 means, where leaving the field out is no mistake.
    """
    members: dict[int, IntEnum] = {int(member): member for member in kind}
    name = _snake(kind.__name__)
    if unspecified is not None:
        members[0] = unspecified

    def decode(number: int) -> IntEnum:
        member = members.get(number)
        if member is None:
            raise InvalidInput(
                f"{name} is unspecified or unknown ({number}).", remedy=f"Set {name}."
            )
        return member

    return FieldRow(int, decode)


def array(dtype: type[np.generic], *, wire: str = "") -> FieldRow:
    """Return the row of a one-dimensional array; None and an empty one look alike on the wire."""

    # Going through lists is the fastest way, as measured.
    def decode(values: Any) -> Any:
        return np.array(values[:], dtype=dtype)

    return FieldRow(methodcaller("tolist"), decode, wire)


class Codec(Generic[D, P]):
    """Writes a dataclass as a message and reads it back, by the table of its fields."""

    def __init__(self, domain: type[D], message: type[P], **rows: FieldRow) -> None:
        self.domain, self.message = domain, message
        # Of each field: its name, its name in the message (None if it spreads), how it is written
        # and read, and whether it keeps its default where the message says that it is absent.
        self._fields: list[tuple[str, str | None, Any, Any, bool]] = []
        for field in dataclasses.fields(domain):  # type: ignore[arg-type]  # D is a dataclass
            row = rows.pop(field.name, None)
            if row is not None and row.spreads:
                self._fields.append((field.name, None, row.encode, row.decode, False))
                continue
            wire = (row and row.wire) or field.name
            descriptor = message.DESCRIPTOR.fields_by_name[wire]
            row = row or _row_of(descriptor)
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            is_optional = has_default and descriptor.has_presence
            self._fields.append((field.name, wire, row.encode, row.decode, is_optional))
        if rows:
            raise TypeError(f"{domain.__name__} has no field {', '.join(rows)}.")

    def to_proto(self, value: D) -> P:
        """Return the message; InvalidInput (HALF_CHARACTER) for what is not Unicode."""
        sent: dict[str, Any] = {}
        for name, wire, encode, _, _ in self._fields:
            held = getattr(value, name)
            if wire is None:
                sent.update(encode(held))
            elif held is not None:
                sent[wire] = held if encode is _same else encode(held)
        try:
            return self.message(**sent)
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"A text of a {self.domain.__name__} has half a character, "
                f"{error.object[error.start]!r}.",
                reason=Reason.HALF_CHARACTER,
                remedy='Leave it out: text.encode(errors="replace").decode() puts a ? there.',
            ) from None

    def from_proto(self, proto: P) -> D:
        """Return the value; raises what its own checks raise, and InvalidInput of an enum."""
        read: dict[str, Any] = {}
        for name, wire, _, decode, is_optional in self._fields:
            if wire is None:
                read[name] = decode(proto)
            elif not is_optional or proto.HasField(wire):
                held = getattr(proto, wire)
                read[name] = held if decode is _same else decode(held)
        return self.domain(**read)


def _same(value: Any) -> Any:
    return value


def _row_of(descriptor: Any) -> FieldRow:
    """Return the row of a field that the table does not list."""
    nested_type = descriptor.message_type
    if nested_type is not None and nested_type.GetOptions().map_entry:
        return FieldRow(dict, dict)
    if nested_type is not None or descriptor.enum_type is not None:
        raise TypeError(f"{descriptor.full_name} is a message or an enum: its codec needs a row.")
    return FieldRow(_same, tuple if descriptor.is_repeated else _same)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
