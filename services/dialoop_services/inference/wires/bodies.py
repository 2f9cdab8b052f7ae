"""Bodies of requests in any wire, and what is said of those that are not served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from dialoop.errors import InvalidInput, NotFound
from dialoop.reasons import Reason
from pydantic import BaseModel, ValidationError

from dialoop_services.rest.problems import FieldsRefused, require_few_errors

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_B = TypeVar("_B", bound=BaseModel)
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


def parse_body(kind: type[_B], body: bytes) -> _B:
    """Return the body; FieldsRefused says for each wrong field what was expected and found."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise body_error(error) from None


def field_error(
    field: str, message: str, *, remedy: str, reason: Reason = Reason.INVALID_FIELD
) -> Exception:
    """Return the error of a field that has the right type and a value that is not served."""
    return FieldsRefused(f"{field}: {message}.", reason=reason, remedy=remedy, fields=[field])


def body_error(error: ValidationError) -> FieldsRefused:
    """Return an error that says of each wrong field what was expected and found; no values."""
    require_few_errors(error, "body")
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
