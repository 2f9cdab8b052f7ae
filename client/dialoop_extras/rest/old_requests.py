"""The middleware of a REST server that reads the forms of older documents.

Old field names, a single message in place of a history, and rows that are padded on demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop_services.rest.middleware import Body, Complete, Read
from dialoop_services.rest.problems import FieldsRefused
from dialoop_services.rest.routes import name_of

from dialoop_extras.rest.lenient_json import read_leniently
from dialoop_extras.rest.old_field_names import rename_old_fields
from dialoop_extras.rest.padded import (
    VIEWS,
    Padding,
    pad_answer,
    padded_schema,
    padding_of,
    padding_parameters,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor
    from google.protobuf.message import Message


class OldRequests:
    """Reads what today's reader refuses, warns about it, and pads answers."""

    description = (
        "Where the answer has `warnings`, JSON may give one message, or a list of messages, for a "
        "history."
    )

    def read(self, body: Body, read: Read) -> tuple[Message, Complete | None]:
        """Return the message; its answer gets the warnings, and the padded rows."""
        rpc = name_of(body.rpc)
        padding = padding_of(rpc, body.query, is_json=body.wants_json) if body.query else None
        content = rename_old_fields(rpc, body.content)
        warnings: Sequence[str] = ()
        try:
            message = read(content)
        except FieldsRefused:
            lenient = read_leniently(content, body.rpc.input_type) if _can_warn(body.rpc) else None
            if lenient is None:
                raise
            content, warnings = lenient
            message = read(content)
        if not warnings and padding is None:
            return message, None
        return message, partial(_complete, rpc, message, warnings, padding)

    def describe(self, rpc: MethodDescriptor, operation: dict[str, Any]) -> None:
        """Add the query of the padding, and the padded answer."""
        if name_of(rpc) in VIEWS:
            operation["parameters"] += padding_parameters()
            answer = operation["responses"]["200"]["content"]["application/json"]
            answer["schema"] = {"anyOf": [answer["schema"], padded_schema()]}


def _can_warn(rpc: MethodDescriptor) -> bool:
    return not {"warnings", "completed"}.isdisjoint(rpc.output_type.fields_by_name)


def _complete(
    rpc: str, request: Message, warnings: Sequence[str], padding: Padding | None, answer: Any
) -> Mapping[str, Any]:
    """Add the warnings to an answer, or to the last one of a stream; return its padded rows."""
    if warnings and "warnings" in answer.DESCRIPTOR.fields_by_name:
        answer.warnings.extend(warnings)
    elif warnings and answer.HasField("completed"):
        answer.completed.warnings.extend(warnings)
    return {} if padding is None else pad_answer(rpc, request, answer, padding)
