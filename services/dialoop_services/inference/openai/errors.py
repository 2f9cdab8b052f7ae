"""Errors as OpenAI's API writes them.

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
    """Return the document and headers of an error that a caller may see."""
    status = int(error.http_status)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    fields = error.fields if isinstance(error, FieldsRefused) else ()
    document: dict[str, Any] = {
        "message": str(error),
        "type": kind,
        "param": fields[0] if fields else None,
        "code": error.reason.lower(),
    }
    if isinstance(error, LoggedError):
        document["error_id"] = error.error_id
    headers = {name.decode(): value.decode() for name, value in problem_headers(error)}
    del headers["content-type"]
    # Without this header OpenAI's clients repeat every 409, 429 and 5xx, whatever its cause.
    headers["x-should-retry"] = "true" if error.retryable else "false"
    return ErrorAnswer(document={"error": document}, headers=headers)


def field_error(
    field: str, message: str, *, remedy: str, reason: Reason = Reason.INVALID_FIELD
) -> Exception:
    """Return the error of a field that has the right type and a value that is not served."""
    return FieldsRefused(f"{field}: {message}.", reason=reason, remedy=remedy, fields=[field])


def body_error(error: ValidationError) -> FieldsRefused:
    """Return an error that says of each wrong field what was expected and found; no values."""
    details = error.errors(include_url=False, include_context=False)
    if details[0]["type"] == "json_invalid":
        return FieldsRefused(
            f"The body is not JSON: {details[0]['msg']}.",
            reason=Reason.INVALID_JSON,
            remedy="Send one JSON object.",
            fields=(),
        )
    by_name: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        by_name.setdefault(_name(detail), []).append(detail)
    problems = [_problem_of(name, group) for name, group in by_name.items()]
    unknown = all(detail["type"] == "extra_forbidden" for detail in details)
    return FieldsRefused(
        "; ".join(problems[:_MAX_FIELDS]) + ".",
        reason=Reason.UNKNOWN_FIELD if unknown else Reason.INVALID_FIELD,
        remedy="Compare with /docs.",
        fields=list(by_name)[:_MAX_FIELDS],
    )


def _name(detail: ErrorDetails) -> str:
    """Return a field's path, such as messages.0.content, without the kinds of a union."""
    parts = (part for part in detail["loc"] if not _KIND.fullmatch(str(part)))
    return ".".join(map(str, parts))


def _problem_of(name: str, details: list[ErrorDetails]) -> str:
    """Return one clause about a field that may be of several kinds."""
    where = name or "the body"
    kinds = {detail["type"] for detail in details}
    if "extra_forbidden" in kinds:
        return f"{where}: this field is not supported"
    if kinds == {"missing"}:
        return f"{where}: expected a value, found none"
    if "value_error" in kinds:
        return f"{where}: {details[0]['msg'].removeprefix('Value error, ')}"
    expected = " or ".join(dict.fromkeys(_expectation_of(detail) for detail in details))
    kind = _FOUND.get(type(details[0]["input"]).__name__, "something else")
    return f"{where}: expected {expected}, found {kind}"


def _expectation_of(detail: ErrorDetails) -> str:
    text = detail["msg"].removeprefix("Input should be ")
    return text[:1].lower() + text[1:]
