"""Pydantic models and JSON encoders made from protobuf descriptors: one schema for both servers.

model = models().model(pb.StepRequest.DESCRIPTOR)                   # for the OpenAPI document
request = models().reader(pb.StepRequest.DESCRIPTOR)(body)          # rejects unknown fields
encode = models().encoder(pb.StepResponse.DESCRIPTOR)
pydantic_core.to_json(encode(response))

The JSON has field names as in the protos, int64 as numbers, bytes as base64, and enums by their
proto names ("STAGE_SCORED"); the bytes of a token column are the list of its numbers. Optional
fields, messages and members of a oneof are left out while they are unset; other fields are always
there. A float that is not finite is left out too, because absent means unknown.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.v1.trajectory_pb2 import Column
from dialoop.wire.sequences import DATA_TYPES, FIXED_COLUMNS
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel, ConfigDict, Field, create_model, field_serializer, model_validator

from dialoop_services.runtime.calls import MAX_ITEMS

Encoder: TypeAlias = Callable[[Any], Any]


class _Plan(NamedTuple):
    """How a message is encoded.

    empty: values of the fields that every answer shows, where they are not set. fields: by number
    the name of a field and how its value is encoded; None: unchanged.
    """

    empty: Mapping[str, Any]
    fields: Mapping[int, tuple[str, Encoder | None]]


_F = FieldDescriptor
_MAX_FLOAT32 = 3.4028234663852886e38
_SIX_DIGITS = 1e6  # a whole number below it is its own shortest decimal


@cache
def comments() -> Mapping[str, str]:
    """Return the protos' comments by the full name of message, field or rpc."""
    text = resources.files("dialoop.v1").joinpath("comments.json").read_text("utf-8")
    texts: dict[str, str] = json.loads(text)
    return texts


@cache
def models() -> Models:
    """Return this process's models. Making one takes milliseconds, so servers share them."""
    return Models(comments())


def decode(value: BaseModel, kind: type[Message]) -> Message:
    """Return the protobuf message of a validated model; arrays are copied as a whole."""
    return kind(**value.model_dump(exclude_unset=True))


class Models:
    """The models and encoders of messages, each made once."""

    def __init__(self, comments: Mapping[str, str]) -> None:
        self._comments = comments
        self._models: dict[tuple[str, frozenset[str]], type[BaseModel]] = {}
        self._plans: dict[str, _Plan] = {}

    def model(
        self, descriptor: Descriptor, without: frozenset[str] = frozenset()
    ) -> type[BaseModel]:
        """Return a message's model, `without` the fields (dotted names) that come from elsewhere.

        Messages that contain themselves are not supported; the protos have none.
        """
        key = (descriptor.full_name, without)
        if key not in self._models:
            self._models[key] = self._make(descriptor, without)
        return self._models[key]

    def reader(
        self, descriptor: Descriptor, without: frozenset[str] = frozenset()
    ) -> Callable[[bytes], Message]:
        """Return a function from JSON to the message; it raises pydantic's ValidationError."""
        model, kind = self.model(descriptor, without), GetMessageClass(descriptor)
        return lambda body: decode(model.model_validate_json(body), kind)

    def encoder(self, descriptor: Descriptor) -> Encoder:
        """Return a function from a message to a value that can be written as JSON."""
        if descriptor is Column.DESCRIPTOR:
            return encode_column
        return partial(_encode, self._plan(descriptor))

    def _make(self, descriptor: Descriptor, without: frozenset[str]) -> type[BaseModel]:
        fields = {
            field.name: self._field(field, _inner(without, field.name))
            for field in descriptor.fields
            if field.name not in without
        }
        if descriptor is Column.DESCRIPTOR:
            data = ColumnBody.model_fields["data"].annotation
            text = self._comments.get(f"{descriptor.full_name}.data")
            fields["data"] = (data, Field(default_factory=list, description=text))
            doc = self._comments.get(descriptor.full_name)
            return create_model(descriptor.name, __base__=ColumnBody, __doc__=doc, **fields)
        oneofs = {o.name: [f.name for f in o.fields] for o in descriptor.oneofs if _is_real(o)}
        return create_model(
            descriptor.name + ("Body" if without else ""),
            __config__=CONFIG,
            __doc__=self._comments.get(descriptor.full_name),
            __validators__={f"one_{n}": _at_most_one(n, members) for n, members in oneofs.items()},
            **fields,
        )

    def _field(self, field: FieldDescriptor, without: frozenset[str]) -> Any:
        described = partial(Field, description=self._comments.get(field.full_name))
        if _is_map(field):
            item = self._item(_value_of(field), without)
            return (dict[str, item], described(default_factory=dict))  # type: ignore[valid-type]
        item = self._item(field, without)
        if field.is_repeated:
            # There may be thousands of numbers: of those the first wrong one is named.
            is_plain = field.message_type is None
            limit = {"fail_fast": True} if is_plain else {"max_length": MAX_ITEMS}
            several = described(default_factory=list, **limit)
            return (list[item], several)  # type: ignore[valid-type]
        if field.has_presence:
            return (item | None, described(default=None))
        default: Any = field.default_value
        if field.enum_type is not None:
            default = field.enum_type.values_by_number[default].name
        return (item, described(default=default))

    def _item(self, field: FieldDescriptor, without: frozenset[str]) -> Any:
        if field.message_type is not None:
            return self.model(field.message_type, without)
        if field.enum_type is not None:
            return Literal[tuple(value.name for value in field.enum_type.values)]
        return _scalar(field)

    def _plan(self, descriptor: Descriptor) -> _Plan:
        if descriptor.full_name not in self._plans:
            always = [field for field in descriptor.fields if not field.has_presence]
            self._plans[descriptor.full_name] = _Plan(
                empty={field.name: _empty_of(field) for field in always},
                fields={f.number: (f.name, self._encoder_of(f)) for f in descriptor.fields},
            )
        return self._plans[descriptor.full_name]

    def _encoder_of(self, field: FieldDescriptor) -> Encoder | None:
        if _is_map(field):
            return partial(_encode_map, self._encoder_of_item(_value_of(field)))
        encode_item = self._encoder_of_item(field)
        if encode_item is None or not field.is_repeated:
            return list if field.is_repeated else encode_item
        # Floats of arrays go to the JSON writer unchanged: a Python call for each is too slow.
        is_float = field.type in (_F.TYPE_FLOAT, _F.TYPE_DOUBLE)
        return list if is_float else partial(_encode_all, encode_item)

    def _encoder_of_item(self, field: FieldDescriptor) -> Encoder | None:
        if field.message_type is not None:
            return self.encoder(field.message_type)
        if field.enum_type is not None:
            return partial(_enum_name, field.enum_type)
        by_type: dict[int, Encoder] = {
            _F.TYPE_BYTES: lambda value: base64.urlsafe_b64encode(value).decode(),
            _F.TYPE_FLOAT: _shortest,
            _F.TYPE_DOUBLE: lambda value: value if math.isfinite(value) else None,
        }
        return by_type.get(field.type)


def _encode(plan: _Plan, message: Message) -> dict[str, Any]:
    encoded = {**plan.empty}
    # Reading an empty field of the message would cost as much as reading one that is set.
    for field, value in message.ListFields():
        name, convert = plan.fields[field.number]
        encoded[name] = value if convert is None else convert(value)
        if encoded[name] is None:
            del encoded[name]
    return encoded


def _empty_of(field: FieldDescriptor) -> Any:
    """Return what a field that is not set is encoded as; nobody changes it."""
    if field.is_repeated:
        return {} if _is_map(field) else []
    if field.enum_type is not None:
        return field.enum_type.values_by_number[field.default_value].name
    return "" if field.type == _F.TYPE_BYTES else field.default_value


def _encode_all(convert: Encoder, values: Any) -> list[Any]:
    return [convert(value) for value in values]


def _encode_map(convert: Encoder | None, values: Mapping[Any, Any]) -> dict[str, Any]:
    encoded = {str(k): v if convert is None else convert(v) for k, v in values.items()}
    return {name: value for name, value in encoded.items() if value is not None}


def _enum_name(enum: EnumDescriptor, number: int) -> str | int:
    value = enum.values_by_number.get(number)
    return number if value is None else value.name


def _shortest(value: float) -> float | None:
    """Return the shortest decimal of the same float32: 0.1 and not 0.10000000149011612."""
    if value.is_integer() and abs(value) < _SIX_DIGITS:
        return value
    if not math.isfinite(value):
        return None
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return float(f"{value:.9g}")


def _scalar(field: FieldDescriptor) -> Any:
    bits = {
        _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        _F.CPPTYPE_UINT32: (0, 2**32 - 1),
        _F.CPPTYPE_UINT64: (0, 2**64 - 1),
    }.get(field.cpp_type)
    if bits is not None:
        return Annotated[int, Field(ge=bits[0], le=bits[1])]
    if field.cpp_type == _F.CPPTYPE_FLOAT:
        return Annotated[float, Field(ge=-_MAX_FLOAT32, le=_MAX_FLOAT32)]
    if field.type == _F.TYPE_BYTES:
        return bytes
    return {_F.CPPTYPE_DOUBLE: float, _F.CPPTYPE_BOOL: bool}.get(field.cpp_type, str)


def _at_most_one(name: str, members: list[str]) -> Any:
    def check(self: BaseModel) -> BaseModel:
        present = [member for member in members if getattr(self, member, None) is not None]
        if len(present) > 1:
            raise ValueError(f"{' and '.join(present)} exclude each other: give one as {name}")
        return self

    return model_validator(mode="after")(check)


def _inner(without: frozenset[str], name: str) -> frozenset[str]:
    """Return the names that are left out inside the field `name`."""
    inside = f"{name}."
    return frozenset(path[len(inside) :] for path in without if path.startswith(inside))


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def _value_of(field: FieldDescriptor) -> FieldDescriptor:
    entry = field.message_type
    assert entry is not None  # a map's entries are messages
    return entry.fields_by_name["value"]


def _is_real(oneof: Any) -> bool:
    """Return whether the proto file has the oneof; `optional` makes one of its own."""
    return not oneof.name.startswith("_")


CONFIG = ConfigDict(
    extra="forbid",
    strict=True,
    val_json_bytes="base64",
    allow_inf_nan=False,
    hide_input_in_errors=True,
    protected_namespaces=(),
)
# Of a list with wrong numbers the first one is named: there may be thousands.
_Ints: TypeAlias = Annotated[list[int], Field(fail_fast=True)]
_Floats: TypeAlias = Annotated[list[float], Field(fail_fast=True)]
_Bools: TypeAlias = Annotated[list[bool], Field(fail_fast=True)]
Numbers: TypeAlias = _Ints | _Floats | _Bools
_NO_TYPE, _NO_TOKENS = pb.DataType.Name(0), pb.Along.Name(0)


def encode_column(column: pb.Column) -> dict[str, Any]:
    """Return a column as a value that can be written as JSON; of an unknown type without data."""
    fields = {
        "name": column.name,
        "data_type": pb.DataType.Name(column.data_type),
        "along": pb.Along.Name(column.along),
        "shape": list(column.shape),
    }
    dtype = DATA_TYPES.get(column.data_type)
    if dtype is not None:
        fields["data"] = np.frombuffer(column.data, dtype).tolist()
    return fields


class ColumnBody(BaseModel):
    """Completes a column and turns its numbers to bytes; the fields come from the proto.

    {"name": "token_ids", "data_type": "DATA_TYPE_INT32", "along": "ALONG_TOKENS", "shape": [3],
     "data": [12, 7, 9]}

    A body may leave out `shape` where each token has one number, and also `data_type` and `along`
    of the columns whose names fix them.
    """

    model_config = CONFIG
    name: str
    data_type: str
    along: str
    shape: list[int]
    data: Numbers

    @model_validator(mode="after")
    def _complete(self) -> ColumnBody:
        if self.name in FIXED_COLUMNS:
            data_type, along = FIXED_COLUMNS[self.name]
            if self.data_type == _NO_TYPE:
                self.data_type = pb.DataType.Name(data_type)
            if self.along == _NO_TOKENS:
                self.along = pb.Along.Name(along)
        dtype = DATA_TYPES.get(pb.DataType.Value(self.data_type))
        if dtype is None:
            raise ValueError("give data_type")
        if not _holds(dtype, self.data):
            raise ValueError(f"data has a number that {dtype.name} does not have")
        self.shape = self.shape or [len(self.data)]
        return self

    @field_serializer("data", when_used="always")
    def _bytes(self, numbers: Numbers) -> Any:
        return np.array(numbers, DATA_TYPES[pb.DataType.Value(self.data_type)]).tobytes()


def _holds(dtype: np.dtype[Any], numbers: Numbers) -> bool:
    """Return whether the type has these numbers; a float is rounded to it."""
    if not numbers:
        return True
    kinds = set(map(type, numbers))
    if dtype.kind == "b" or bool in kinds:
        return dtype.kind == "b" and kinds == {bool}
    if dtype.kind == "f":
        return max(map(abs, numbers)) <= float(np.finfo(dtype).max)
    bounds = np.iinfo(dtype)
    return kinds == {int} and bounds.min <= min(numbers) and max(numbers) <= bounds.max
