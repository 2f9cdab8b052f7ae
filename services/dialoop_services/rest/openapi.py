"""The OpenAPI document of a service, from its routes, its models and the comments of its protos."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dialoop.errors import (
    AlreadyExists,
    Busy,
    CapacityExhausted,
    DataLost,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from dialoop_services.rest.examples import EXAMPLES
from dialoop_services.rest.problems import problem_schema
from dialoop_services.rest.requests import TIMEOUT_HEADER
from dialoop_services.rest.routes import Route, name_of
from dialoop_services.rest.schema import Models, comments

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from pydantic import BaseModel

    from dialoop_services.rest.http_routes import HttpRoute
    from dialoop_services.rest.middleware import Middleware

_REFUSALS = {
    400: "The request is wrong whatever the state of the service.",
    401: "The bearer token is missing or wrong.",
    403: "The token lacks the scope, or a web page of another origin is calling.",
    404: "The named thing does not exist (any more).",
    409: "The request does not fit the present state, or another caller changes the same thing.",
    413: "The body is too large, as sent or decompressed.",
    415: "The service does not read this type or encoding of bodies.",
    429: "No room now: try again later.",
    500: "An internal error: look for error_id in the service's log.",
    501: "This service, engine or store cannot do it.",
    503: "Not now: try again later.",
    504: "No answer within the time the caller gave.",
}
_HTTP = {
    kind.status.name: kind.http_status
    for kind in (
        AlreadyExists,
        Busy,
        CapacityExhausted,
        DataLost,
        DeadlineExceeded,
        InvalidInput,
        NotFound,
        PreconditionFailed,
        Unavailable,
        Unsupported,
    )
}
_STATUSES = re.compile(r"(?:^|(?<=[.:;] ))OK[.,].*$", re.DOTALL)
_STATUS = re.compile(r"([A-Z][A-Z_]+)(?: \(([^()]*)\))?")
_SAME_STATUSES = re.compile(r"Statuses of (.*?)\.$")
_ERRORS = {str(status): {"$ref": f"#/components/responses/{status}"} for status in _REFUSALS}
_REFERENCES = "#/components/schemas/{model}"
_BINARY = {"schema": {"type": "string", "format": "binary"}}


class _Plain(GenerateJsonSchema):
    """Makes schemas without a title on every field."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def openapi(
    routes: Sequence[Route],
    models: Models,
    *,
    needs_token: bool,
    http_routes: Sequence[HttpRoute] = (),
    middleware: Middleware | None = None,
) -> dict[str, Any]:
    """Return the whole document, OpenAPI 3.1."""
    texts = comments()
    definitions = _definitions(routes, models)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, models, definitions, texts)
        if middleware is not None:
            middleware.describe(route.rpc, operation)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    for added in http_routes:
        operation = {"operationId": added.name, **added.operation}
        paths.setdefault(added.path, {})[added.method.lower()] = operation
    services = _services_of(routes)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title_of(routes),
            "version": "1",
            "description": "The same servicers as over gRPC. Field names are those of the protos, "
            "int64 are numbers, bytes base64, enums their proto names. Each route also reads and "
            "writes application/x-protobuf."
            + ("" if middleware is None else f" {middleware.description}"),
        },
        "paths": paths | _pages(),
        "components": {
            "schemas": {**definitions, "Problem": problem_schema()},
            "responses": {str(status): _refusal(text) for status, text in _REFUSALS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}] if needs_token else [],
        "tags": [{"name": s.name, "description": texts.get(s.full_name, "")} for s in services],
    }


def title_of(routes: Sequence[Route]) -> str:
    """Return the document's title, which names the services."""
    return "Dialoop: " + ", ".join(service.name for service in _services_of(routes))


def _services_of(routes: Sequence[Route]) -> list[ServiceDescriptor]:
    services = {route.rpc.containing_service for route in routes}
    return sorted(services, key=lambda service: str(service.name))


def _definitions(routes: Sequence[Route], models: Models) -> dict[str, Any]:
    used = [
        model
        for route in routes
        for model in (_request_model(route, models), _answer_model(route, models))
    ]
    pairs = [(model, "validation") for model in dict.fromkeys(used)]
    made = models_json_schema(
        pairs,  # type: ignore[arg-type]
        ref_template=_REFERENCES,
        schema_generator=_Plain,
    )
    definitions: dict[str, Any] = made[1].get("$defs", {})
    return definitions


def _request_model(route: Route, models: Models) -> type[BaseModel]:
    return models.model(route.rpc.input_type, frozenset(route.bindings.values()))


def _answer_model(route: Route, models: Models) -> type[BaseModel]:
    return models.model(route.rpc.output_type)


def _operation(
    route: Route, models: Models, definitions: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, Any]:
    rpc = route.rpc
    text, reasons = _split(texts.get(rpc.full_name, ""))
    body = _request_model(route, models).__name__
    operation: dict[str, Any] = {
        "operationId": name_of(rpc),
        "tags": [rpc.containing_service.name],
        "summary": rpc.name,
        "description": text,
        "parameters": [*_path_parameters(route, texts), _timeout()],
        "responses": {"200": _answer(route, models), **_ERRORS, **_refusals_of(reasons)},
    }
    if route.reads_query:
        operation["parameters"] += _query_parameters(definitions[body])
        return operation
    reference = {"$ref": _REFERENCES.format(model=body)}
    example = EXAMPLES.get(name_of(rpc), {})
    operation["requestBody"] = {
        "content": {
            "application/json": {"schema": reference, "example": example},
            "application/x-protobuf": _BINARY,
        }
    }
    return operation


def _split(comment: str) -> tuple[str, dict[int, list[str]]]:
    """Return the sentences of an rpc's comment, and the reasons that it names by HTTP status.

    A comment ends with the statuses of gRPC: "OK, NOT_FOUND (TASK_NOT_FOUND), ABORTED (BUSY)."
    """
    match = _STATUSES.search(comment)
    prose = comment if match is None else comment[: match.start()]
    prose = _SAME_STATUSES.sub(r"Its errors are those of \1.", prose.strip())
    reasons: dict[int, list[str]] = {}
    for status, detail in _STATUS.findall(match[0] if match else ""):
        if status in _HTTP and detail:
            reasons.setdefault(_HTTP[status], []).append(detail)
    return prose, reasons


def _refusals_of(reasons: Mapping[int, list[str]]) -> dict[str, Any]:
    """Return the responses whose reasons are known."""
    return {
        str(status): _refusal(f"{_REFUSALS[status]} Reasons: {', '.join(details)}.")
        for status, details in reasons.items()
    }


def _answer(route: Route, models: Models) -> dict[str, Any]:
    schema = {"$ref": _REFERENCES.format(model=_answer_model(route, models).__name__)}
    if not route.is_stream:
        content = {"application/json": {"schema": schema}, "application/x-protobuf": _BINARY}
        return {"description": f"The answer: {route.rpc.output_type.name}.", "content": content}
    events = {"schema": {"type": "string"}}
    return {
        "description": "One message per line or event.",
        "content": {
            "application/x-ndjson": {"schema": schema},
            "text/event-stream": events,
            "application/x-protobuf; delimited=true": _BINARY,
        },
    }


def _path_parameters(route: Route, texts: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for parameter in route.bindings:
        yield {
            "name": parameter,
            "in": "path",
            "required": True,
            "description": texts.get(f"{route.rpc.input_type.full_name}.{parameter}", ""),
            "schema": {"type": "string", "minLength": 1, "pattern": "^[^/]+$"},
        }


def _query_parameters(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, field in schema.get("properties", {}).items():
        described = {key: value for key, value in field.items() if key != "description"}
        text = field.get("description", "")
        yield {"name": name, "in": "query", "description": text, "schema": described}


def _timeout() -> dict[str, Any]:
    return {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "description": "Seconds until you want an answer; 504 after that. Absent: no limit.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }


def _refusal(text: str) -> dict[str, Any]:
    problem = {"schema": {"$ref": _REFERENCES.format(model="Problem")}}
    return {"description": text, "content": {"application/problem+json": problem}}


def _pages() -> dict[str, Any]:
    """Return the routes that every service has beside its rpcs."""
    states = {"schema": {"type": "object", "properties": {"status": {"type": "string"}}}}
    state = {"description": "The state.", "content": {"application/json": states}}
    text = {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    def page(summary: str, answers: dict[str, Any], **more: Any) -> dict[str, Any]:
        name = summary.partition(":")[0]
        return {"get": {"summary": summary, "operationId": name, "responses": answers, **more}}

    refused = {status: _ERRORS[status] for status in ("401", "403")}
    return {
        "/healthz": page(
            "Health: the process lives.", {"200": state, "403": _ERRORS["403"]}, security=[]
        ),
        "/readyz": page(
            "Readiness: whether every service of the process serves.",
            {"200": state, "503": state, "403": _ERRORS["403"]},
            security=[],
        ),
        "/metrics": page("Metrics: in the text format of Prometheus.", {"200": text, **refused}),
    }
