"""Errors over REST: RFC 9457 problem documents from the one error tree.

{"type": "about:blank", "title": "Not Found", "status": 404, "detail": "There is no session 's'...",
 "reason": "SESSION_LOST", "remedy": "Create a session and play the task again from its start."}
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from dialoop.errors import (
    CapacityExhausted,
    DialoopError,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unsupported,
)
from dialoop.reasons import Reason

from dialoop_services.runtime.errors import LoggedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

MEDIA_TYPE = b"application/problem+json"
_MAX_FIELDS = 10
_MAX_LISTED = 1000


class FieldsRefused(InvalidInput):
    """Fields of a body or query are unknown, of the wrong type or out of range."""

    default_reason = Reason.INVALID_FIELD

    def __init__(self, message: str, *, reason: Reason, remedy: str, fields: Sequence[str]) -> None:
        super().__init__(message, reason=reason, remedy=remedy)
        self.fields = tuple(fields)


class BodyTooLarge(CapacityExhausted):
    """The body is above the limit, as sent or decompressed; over gRPC it is RESOURCE_EXHAUSTED."""

    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    retryable = False
    default_reason = Reason.MESSAGE_TOO_LARGE


class RequestTooSlow(InvalidInput):
    """A request began and did not come in time."""

    http_status = HTTPStatus.REQUEST_TIMEOUT
    default_reason = Reason.REQUEST_TOO_SLOW


class UnsupportedMediaType(InvalidInput):
    """The service does not read this type or encoding of bodies."""

    http_status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    default_reason = Reason.UNSUPPORTED_MEDIA_TYPE


class VersionNotServed(Unsupported):
    """The request is of a version of HTTP that is not served."""

    http_status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
    default_reason = Reason.INVALID_HTTP


class RouteNotFound(NotFound):
    """No rpc has that path."""

    default_reason = Reason.ROUTE_NOT_FOUND


class MethodNotAllowed(Unsupported):
    """The path exists with another method."""

    http_status = HTTPStatus.METHOD_NOT_ALLOWED
    default_reason = Reason.METHOD_NOT_ALLOWED


class ForeignCaller(PermissionDenied):
    """A web page of another origin is calling."""

    default_reason = Reason.FOREIGN_ORIGIN


def require_few_errors(error: ValidationError, where: str) -> None:
    """Raise FieldsRefused for a body or query with so many errors that to list them takes long."""
    if error.error_count() > _MAX_LISTED:
        raise FieldsRefused(
            f"The {where} has {error.error_count()} wrong fields.",
            reason=Reason.INVALID_FIELD,
            remedy="Compare with /docs.",
            fields=(),
        )


def fields_refused(error: ValidationError, *, where: str) -> FieldsRefused:
    """Return an error that names every wrong field of `where` ("body" or "query"), no values."""
    require_few_errors(error, where)
    details = error.errors(include_url=False, include_input=False, include_context=False)
    names = [".".join(map(str, detail["loc"])) for detail in details]
    kinds = {detail["type"] for detail in details}
    if kinds == {"json_invalid"}:
        return FieldsRefused(
            f"The {where} is not valid JSON: {details[0]['msg']}.",
            reason=Reason.INVALID_JSON,
            remedy="Send one JSON object.",
            fields=(),
        )
    sentences = [
        f"{name or where}: {_sentence(detail)}" for name, detail in zip(names, details, strict=True)
    ]
    more = f" (and {len(names) - _MAX_FIELDS} more)" if len(names) > _MAX_FIELDS else ""
    return FieldsRefused(
        "; ".join(sentences[:_MAX_FIELDS]) + more + ".",
        reason=Reason.UNKNOWN_FIELD if kinds == {"extra_forbidden"} else Reason.INVALID_FIELD,
        remedy="Compare with /docs.",
        fields=names[:_MAX_FIELDS],
    )


def _sentence(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        return "there is no such field"
    text = detail["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def problem(error: DialoopError) -> dict[str, Any]:
    """Return the document of an error that a caller may see."""
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(error.http_status).phrase,
        "status": int(error.http_status),
        "detail": error.message,
        "reason": error.reason,
        "remedy": error.remedy,
    }
    if isinstance(error, LoggedError):
        document["error_id"] = error.error_id
    if isinstance(error, FieldsRefused):
        document["fields"] = list(error.fields)
    return document


def problem_body(error: DialoopError) -> bytes:
    """Return the document as bytes, escaped to ASCII so that lone surrogates are valid too."""
    return json.dumps(problem(error)).encode()


def problem_headers(error: DialoopError) -> list[tuple[bytes, bytes]]:
    """Return the headers that the error's status needs."""
    headers = [(b"content-type", MEDIA_TYPE)]
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.reason == Reason.UNSUPPORTED_ENCODING:
        headers.append((b"accept-encoding", b"gzip"))
    if error.retryable and error.http_status in (429, 503):
        headers.append((b"retry-after", b"1"))
    return headers


class WholeAnswer(NamedTuple):
    """An answer that is there as a whole; the headers include its length."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def problem_answer(error: DialoopError) -> WholeAnswer:
    """Return an error's document with its status and headers."""
    body = problem_body(error)
    headers = [*problem_headers(error), (b"content-length", b"%d" % len(body))]
    return WholeAnswer(int(error.http_status), headers, body)


def problem_schema() -> dict[str, Any]:
    """Return the document's JSON schema."""
    texts = {name: {"type": "string"} for name in ("type", "title", "detail", "reason", "remedy")}
    return {
        "type": "object",
        "description": "RFC 9457. `reason` is the machine-readable name, the same as over gRPC; "
        "match on it, never on `detail`.",
        "properties": {
            **texts,
            "status": {"type": "integer"},
            "error_id": {
                "type": "string",
                "description": "Only of an internal error: find it in the service's log.",
            },
            "fields": {
                "type": "array",
                "items": {"type": "string"},
                "description": "The wrong fields, such as history.response.messages.0.role.",
            },
        },
        "required": ["type", "title", "status", "detail", "reason", "remedy"],
    }
