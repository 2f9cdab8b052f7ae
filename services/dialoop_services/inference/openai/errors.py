"""Errors in the words of OpenAI's API, from the one error tree.

{"error": {"message": "...", "type": "invalid_request_error", "param": "messages.0.role",
           "code": "invalid_field"}}
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidInput, NotFound
from dialoop.reasons import Reason

from dialoop_services.rest.http_routes import ErrorAnswer
from dialoop_services.rest.problems import FieldsRefused, problem_headers
from dialoop_services.runtime.errors import LoggedError

if TYPE_CHECKING:
    from dialoop.errors import DialoopError
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_MAX_FIELDS = 10
# How pydantic names the kinds of a union.
_KIND = re.compile(r"str|int|float|bool|.*\[.*|[A-Z]\w+|constrained-\w+")
_FOUND = {
    "str": "a string",
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "list": "a list",
    "dict": "an object",
    "NoneType": "null",
}


class UnknownModel(NotFound):
    """No policy or adapter of that name is served."""

    default_reason = Reason.MODEL_NOT_FOUND


class ContextTooLong(InvalidInput):
    """The prompt leaves no room for an answer."""

    default_reason = Reason.CONTEXT_LENGTH_EXCEEDED


def error_answer(error: DialoopError) -> ErrorAnswer:
    """The document and headers of an error that a caller may see."""
    status = int(error.http_status)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    fields = error.fields if isinstance(error, FieldsRefused) else ()
    told: dict[str, Any] = {
        "message": str(error),
        "type": kind,
        "param": fields[0] if fields else None,
        "code": error.reason.lower(),
    }
    if isinstance(error, LoggedError):
        told["error_id"] = error.error_id
    obliged = {name.decode(): value.decode() for name, value in problem_headers(error)}
    del obliged["content-type"]
    # OpenAI's clients would else repeat every 409, 429 and 5xx, whatever its cause.
    obliged["x-should-retry"] = "true" if error.retryable else "false"
    return ErrorAnswer(document={"error": told}, headers=obliged)


def refused(
    field: str, message: str, *, remedy: str, reason: Reason = Reason.INVALID_FIELD
) -> Exception:
    """A field that is well typed and cannot be had."""
    return FieldsRefused(f"{field}: {message}.", reason=reason, remedy=remedy, fields=[field])


def body_refused(error: ValidationError) -> FieldsRefused:
    """What was expected of every wrong field, and what was found; values stay out."""
    details = error.errors(include_url=False, include_context=False)
    if details[0]["type"] == "json_invalid":
        return FieldsRefused(
            f"The body is no JSON: {details[0]['msg']}.",
            reason=Reason.INVALID_JSON,
            remedy="Send one JSON object.",
            fields=(),
        )
    by_name: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_name.setdefault(_name(detail), []).append(detail)
    told = [_said(name, found) for name, found in by_name.items()]
    unknown = all(detail["type"] == "extra_forbidden" for detail in details)
    return FieldsRefused(
        "; ".join(told[:_MAX_FIELDS]) + ".",
        reason=Reason.UNKNOWN_FIELD if unknown else Reason.INVALID_FIELD,
        remedy="Compare with /docs.",
        fields=list(by_name)[:_MAX_FIELDS],
    )


def _name(detail: ErrorDetails) -> str:
    """messages.0.content, without the kinds of a union that were tried."""
    parts = (part for part in detail["loc"] if not _KIND.fullmatch(str(part)))
    return ".".join(map(str, parts))


def _said(name: str, details: list[ErrorDetails]) -> str:
    """One sentence of one field, whatever kinds it might have been of."""
    where = name or "the body"
    kinds = {detail["type"] for detail in details}
    if "extra_forbidden" in kinds:
        return f"{where}: this field is not supported"
    if kinds == {"missing"}:
        return f"{where}: expected a value, found none"
    if "value_error" in kinds:
        return f"{where}: {details[0]['msg'].removeprefix('Value error, ')}"
    expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
    found = _FOUND.get(type(details[0]["input"]).__name__, "something else")
    return f"{where}: expected {expected}, found {found}"


def _expected(detail: ErrorDetails) -> str:
    text = detail["msg"].removeprefix("Input should be ")
    return text[:1].lower() + text[1:]
