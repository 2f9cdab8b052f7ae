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

if TYPE_CHECKING:
    from enum import IntEnum

    from google.protobuf.message import Message

D = TypeVar("D")
P = TypeVar("P", bound="Message")


@dataclass(frozen=True, slots=True)
class FieldRow:
    """How one field crosses the wire.

    encode: the dataclass's value to the message's. decode: the other way. wire: its name in the
    message, where that is another one. With `is_many`, they convert one of a tuple. With `spreads`,
    encode gives several fields of the message by name, and decode reads the whole message.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    wire: str = ""
    is_many: bool = False
    spreads: bool = False


def submessage(codec: Codec[Any, Any], *, wire: str = "") -> FieldRow:
    """Return the row of a nested message."""
    return FieldRow(codec.to_proto, codec.from_proto, wire)


def many(codec: Codec[Any, Any], *, wire: str = "") -> FieldRow:
    """Return the row of a tuple of nested messages."""
    return FieldRow(codec.to_proto, codec.from_proto, wire, is_many=True)


def wire_name(wire: str) -> FieldRow:
    """Return the row of a list of numbers or texts that has another name in the message."""
    return FieldRow(_same, tuple, wire)


def enum(kind: type[IntEnum], *, unspecified: IntEnum | None = None) -> FieldRow:
    """Return the row of an enum; a number that is none of its members raises InvalidInput.

    unspecified: what the number 0 means, where leaving the field out is no mistake.
    """
    members = _Members({int(member): member for member in kind})
    members.name = _snake(kind.__name__)
    if unspecified is not None:
        members[0] = unspecified
    return FieldRow(int, members.__getitem__)


class _Members(dict[int, Any]):
    """The members of an enum by their numbers."""

    name = ""

    def __missing__(self, number: int) -> Any:
        raise InvalidInput(
            f"{self.name} is unspecified or unknown ({number}).", remedy=f"Set {self.name}."
        )


def array(dtype: type[np.generic], *, wire: str = "") -> FieldRow:
    """Return the row of a one-dimensional array; None and an empty one look alike on the wire."""

    # Going through lists is the fastest way, as measured.
    def decode(values: Any) -> Any:
        return np.array(values[:], dtype=dtype)

    return FieldRow(methodcaller("tolist"), decode, wire)


class Codec(Generic[D, P]):
    """Writes a dataclass as a message and reads it back; made once, from the table of its fields.

    With `leaves_out_defaults`, a field that has its default is not sent.
    """

    to_proto: Callable[[D], P]
    """Return the message."""
    from_proto: Callable[[P], D]
    """Return the value; raises what its own checks raise, and InvalidInput of an enum."""

    def __init__(
        self,
        domain: type[D],
        message: type[P],
        *,
        leaves_out_defaults: bool = False,
        **rows: FieldRow,
    ) -> None:
        self.domain, self.message = domain, message
        # The functions are generated as source, as dataclasses do: a loop over the fields takes
        # twice as long, and every group is converted several times on its way to the trainer.
        source = _Source(message, leaves_out_defaults=leaves_out_defaults)
        for field in dataclasses.fields(domain):  # type: ignore[arg-type]  # D is a dataclass
            source.add(field, rows.pop(field.name, None))
        if rows:
            raise TypeError(f"{domain.__name__} has no field {', '.join(rows)}.")
        self.to_proto = source.function(message, source.sent, *source.sent_unless_default)
        self.from_proto = source.function(domain, source.read)


class _Source:
    """The text of a codec's two functions, and the values that it names."""

    def __init__(self, message: type[Message], *, leaves_out_defaults: bool) -> None:
        self._descriptors = message.DESCRIPTOR.fields_by_name
        self._leaves_out_defaults = leaves_out_defaults
        self._names: dict[str, Any] = {}
        self.sent: list[str] = []
        self.sent_unless_default: list[str] = []
        self.read: list[str] = []

    def name(self, value: Any) -> str:
        """Return the name under which the text has that value."""
        name = f"_{len(self._names)}"
        self._names[name] = value
        return name

    def add(self, field: dataclasses.Field[Any], row: FieldRow | None) -> None:
        """Add one field of the dataclass to both functions."""
        value, default = f"value.{field.name}", self._default_of(field)
        if row is not None and row.spreads:
            self.sent.append(f"**{self.name(row.encode)}({value})")
            self.read.append(f"{field.name}={self.name(row.decode)}(value)")
            return
        wire = (row and row.wire) or field.name
        descriptor = self._descriptors[wire]
        row = row or _row_of(descriptor)
        sent = self._call(row.encode, value, "[{} for each in {}]" if row.is_many else "")
        if self._leaves_out_defaults and default:
            put = f".extend({sent})" if descriptor.is_repeated else f" = {sent}"
            self.sent_unless_default.append(f"if {value} != {default}: made.{wire}{put}")
        elif field.default is None and sent != value:
            self.sent.append(f"{wire}=None if {value} is None else {sent}")
        else:
            self.sent.append(f"{wire}={sent}")
        read = self._call(
            row.decode, f"value.{wire}", "tuple([{} for each in {}])" if row.is_many else ""
        )
        if descriptor.has_presence and default:
            read = f"{read} if value.HasField({wire!r}) else {default}"
        self.read.append(f"{field.name}={read}")

    def _default_of(self, field: dataclasses.Field[Any]) -> str:
        if field.default is not MISSING:
            return self.name(field.default)
        return "" if field.default_factory is MISSING else f"{self.name(field.default_factory)}()"

    def _call(self, function: Callable[[Any], Any], argument: str, each: str) -> str:
        if function is _same:
            return argument
        name = self.name(function)
        return each.format(f"{name}(each)", argument) if each else f"{name}({argument})"

    def function(self, make: Callable[..., Any], fields: list[str], *steps: str) -> Any:
        """Return the function that makes something of the fields of its argument."""
        made = f"made = {self.name(make)}({', '.join(fields)})"
        body = "\n    ".join([made, *steps, "return made"])
        exec(f"def convert(value):\n    {body}\n", self._names)
        return self._names.pop("convert")


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
