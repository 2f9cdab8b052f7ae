"""Padded arrays of an answer's rows, for callers of REST that ask for them in the query.

POST /v1/generate?pad_output=true&pad_token_id=0      prompt left-padded, response right, full both
POST /v1/logprob?pad_output=true&pad_token_id=0&padding_side=right

The answer keeps its ragged rows and gains `padded`. For each part that holds the values [B, W], and
for each row the start and the number of its real values. Use these to tell padding from tokens: the
pad id may be a token as well. A log-prob is null where it is unknown or padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from dialoop.clients.inference_messages import samples_from_proto
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.views.views import LogProbRow, LogProbs, Masks, Tokens, TurnView
from dialoop.wire.messages import logprobs_from_proto
from dialoop.wire.sequences import columns_of, sequence_from_proto
from dialoop_services.rest.problems import fields_refused
from dialoop_services.rest.queries import read_query
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dialoop_extras.padding import PaddedOutput, PaddedRows, pad_output

_PARTS = ("prompt", "response", "full")


class Padding(BaseModel):
    """How rows are padded; the fields of the query."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    pad_output: bool = False
    """Add `padded` to the JSON answer: arrays [B, W] with starts and lengths of the rows."""
    pad_token_id: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Id that fills padded positions; it may be a token as well."""
    padding_side: Literal["left", "right"] = "left"
    """Side of the padding in rows whose prompt is not known.

    Elsewhere prompts are padded left and responses right.
    """


def padding_of(rpc: str, query: bytes, *, is_json: bool) -> Padding | None:
    """Return the padding a query asks for, or None. Raise InvalidInput where it cannot be done."""
    if rpc not in VIEWS:
        raise _padding_error("This route's answers have no rows.", remedy="Leave the query out.")
    try:
        padding = Padding.model_validate_strings(read_query(query))
    except ValidationError as error:
        raise fields_refused(error, where="query") from None
    if padding.pad_output != (padding.pad_token_id is not None):
        raise _padding_error(
            "The query has only one of pad_output and pad_token_id.",
            remedy="Give both, for example ?pad_output=true&pad_token_id=0.",
        )
    if padding.pad_output and not is_json:
        raise _padding_error("Only JSON answers can be padded.", remedy="Accept application/json.")
    return padding if padding.pad_output else None


def pad_answer(rpc: str, request: Any, answer: Any, padding: Padding) -> dict[str, Any]:
    """Return the JSON field `padded` with the answer's rows."""
    output = pad_output(
        VIEWS[rpc](request, answer),
        pad_token_id=padding.pad_token_id or 0,
        padding_side=padding.padding_side,
    )
    return {"padded": _encode(output)}


def _rows_of_samples(request: Any, answer: Any) -> list[TurnView]:
    context = sequence_from_proto(request.context) if request.HasField("context") else None
    return [TurnView.of_sample(sample, context=context) for sample in samples_from_proto(answer)]


def _rows_of_logprobs(request: Any, answer: Any) -> list[TurnView]:
    rows = [row.values for row in request.token_ids] or [
        columns_of(s)["token_ids"].values.tolist() for s in answer.sequences
    ]
    return [
        TurnView(
            tokens=Tokens(full=tuple(ids)),
            log_probs=LogProbs(full=LogProbRow(values=values, start=1)),
            masks=Masks(all_attention_mask=np.ones(len(ids), dtype=np.bool_)),
        )
        for ids, values in zip(rows, logprobs_from_proto(answer.logprobs), strict=True)
    ]


VIEWS: Mapping[str, Callable[[Any, Any], list[TurnView]]] = MappingProxyType(
    {"InferenceService.Generate": _rows_of_samples, "InferenceService.LogProb": _rows_of_logprobs}
)
"""Rpcs whose answers can be padded, and the rows of their answers."""


def _encode(output: PaddedOutput) -> dict[str, Any]:
    tokens = {name: getattr(output.tokens, name) for name in _PARTS}
    masks = {
        "all_attention_mask": output.masks.all_attention_mask,
        "all_assistant_mask": output.masks.all_assistant_mask,
    }
    return {
        "pad_token_id": output.pad_token_id,
        "padding_side": output.padding_side,
        "tokens": {name: _rows(rows) for name, rows in tokens.items() if rows is not None},
        "masks": {name: mask.tolist() for name, mask in masks.items() if mask is not None},
        "log_probs": {name: _rows(rows) for name, rows in output.log_probs.items()},
    }


def _rows(rows: PaddedRows) -> dict[str, Any]:
    return {
        "values": rows.values.tolist(),
        "starts": rows.starts.tolist(),
        "lengths": rows.lengths.tolist(),
    }


def _padding_error(message: str, *, remedy: str) -> InvalidInput:
    return InvalidInput(message, reason=Reason.BAD_PADDING, remedy=remedy)


def padding_parameters() -> list[dict[str, Any]]:
    """Return the query's fields as parameters of OpenAPI."""
    properties = Padding.model_json_schema()["properties"]
    return [
        {
            "name": name,
            "in": "query",
            "description": field["description"],
            "schema": {k: v for k, v in field.items() if k not in ("description", "title")},
        }
        for name, field in properties.items()
    ]


def padded_schema() -> dict[str, Any]:
    """Return the JSON schema of an answer with `padded`."""
    numbers = {"type": "array", "items": {"type": "integer"}}

    def rows(item: dict[str, Any]) -> dict[str, Any]:
        values = {"type": "array", "items": {"type": "array", "items": item}}
        fields = {"values": values, "starts": numbers, "lengths": numbers}
        return {"type": "object", "properties": fields, "required": list(fields)}

    def parts(item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": rows(item)}

    mask = {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}
    fields = {
        "pad_token_id": {"type": "integer"},
        "padding_side": {"enum": ["left", "right"]},
        "tokens": parts({"type": "integer"}),
        "masks": {"type": "object", "additionalProperties": mask},
        "log_probs": parts({"type": ["number", "null"]}),
    }
    inner = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"padded": inner}, "required": ["padded"]}
