"""Token columns in JSON: their numbers as a list, in place of bytes.

{"name": "token_ids", "data_type": "DATA_TYPE_INT32", "along": "ALONG_TOKENS", "shape": [3],
 "data": [12, 7, 9]}

A body may leave out `shape` where each token has one number, and also `data_type` and `along` of
the columns whose names fix them.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.sequences import DATA_TYPES, FIXED_COLUMNS
from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

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
    """Completes a column and turns its numbers to bytes; the fields come from the proto."""

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
