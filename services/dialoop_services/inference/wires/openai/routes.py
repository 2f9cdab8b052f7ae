"""OpenAI's wire on the REST server: chat completions, completions and models.

for route in openai_routes(host):
    server.add_route(route)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from dialoop.errors import DialoopError
from dialoop.v1.scope_pb2 import SCOPE_ROLLOUT
from pydantic import BaseModel

from dialoop_services.inference.wires.base import AnswerJob, WireHost, path_parameter
from dialoop_services.inference.wires.bodies import UnknownModel, parse_body
from dialoop_services.inference.wires.openai.answers import Shape
from dialoop_services.inference.wires.openai.jobs import Jobs
from dialoop_services.inference.wires.openai.models import ChatBody, CompletionBody
from dialoop_services.rest.http_routes import ErrorAnswer, HttpAnswer, HttpRequest, HttpRoute
from dialoop_services.rest.problems import FieldsRefused, problem_headers
from dialoop_services.rest.requests import TIMEOUT_HEADER
from dialoop_services.runtime.errors import LoggedError

_DONE = b"data: [DONE]\n\n"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class _OpenAi:
    """Chat and plain completions of one replica, and its models."""

    def __init__(self, host: WireHost) -> None:
        self._host = host
        self._jobs = Jobs(host=host)

    async def chat(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """POST chat/completions."""
        recording = self._host.recording_of(request)
        body = parse_body(ChatBody, request.body)
        job, shape = await self._jobs.chat(body, recording, size=len(request.body))
        await self._answer(job, shape, body.stream, request, answer)

    async def completion(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """POST completions."""
        recording = self._host.recording_of(request)
        body = parse_body(CompletionBody, request.body)
        job, shape = await self._jobs.completion(body, recording, size=len(request.body))
        await self._answer(job, shape, body.stream, request, answer)

    async def models(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """GET models."""
        self._host.recording_of(request)
        await answer.json({"object": "list", "data": list(self._models().values())})

    async def model(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """GET models/{model}."""
        self._host.recording_of(request)
        model = self._models().get(request.parameters["model"])
        if model is None:
            raise UnknownModel(
                "The model of that name is not served here.",
                remedy=f"Ask for '{self._host.model_name}'.",
            )
        await answer.json(model)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return the policy, and each adapter on it, by name."""
        engine = self._host.replica.engine
        versions = {self._host.model_name: engine.policy_version, **self._host.replica.adapters}
        return {
            name: {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "dialoop",
                "max_model_len": engine.max_model_len,
                "policy_version": str(version),
            }
            for name, version in versions.items()
        }

    async def _answer(
        self,
        job: AnswerJob,
        shape: Shape,
        is_stream: bool,
        request: HttpRequest,
        answer: HttpAnswer,
    ) -> None:
        answering = self._host.answering
        if not is_stream:
            await answer.json(shape.whole(job, await answering.whole(job, request)))
            return
        async with aclosing(answering.stream(job, request)) as events:
            async for chunk in shape.chunks(job, events):
                await answer.event(chunk)
        await answer.end(_DONE)


def openai_routes(host: WireHost) -> tuple[HttpRoute, ...]:
    """Return all routes of the wire, plain and recorded."""
    service = _OpenAi(host)
    handlers = {
        "ChatCompletions": ("POST", "/v1/chat/completions", service.chat),
        "Completions": ("POST", "/v1/completions", service.completion),
        "ListModels": ("GET", "/v1/models", service.models),
        "GetModel": ("GET", "/v1/models/{model}", service.model),
    }
    assert handlers.keys() == OPERATIONS.keys()
    routes = [
        host.routes(
            HttpRoute(
                name=f"OpenAI.{name}",
                scope=SCOPE_ROLLOUT,
                method=method,
                path=path,
                handle=handle,
                errors=error_answer,
                operation=operation(name),
            )
        )
        for name, (method, path, handle) in handlers.items()
    ]
    return tuple(route for pair in zip(*routes, strict=True) for route in pair)


def error_answer(error: DialoopError) -> ErrorAnswer:
    """Return an error that a caller may see as OpenAI's API writes it.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "messages.0.role",
               "code": "invalid_field"}}
    """
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


_TAG = "OpenAI"
_CHAT = {"model": "policy", "messages": [{"role": "user", "content": "What is 3+4?"}]}
_COMPLETION = {"model": "policy", "prompt": "3+4=", "max_tokens": 8}
_REFUSALS = {
    400: "The request is wrong, or the prompt leaves no room in the context.",
    401: "The bearer token is missing or wrong.",
    403: "A web page of another origin is calling.",
    404: "There is no such model or recording.",
    409: "The recording is closed or full.",
    413: "The body is too large, as sent or unpacked.",
    415: "The body's type or encoding is not read here.",
    429: "No room now: try again later.",
    500: "Our fault: error_id names the log record.",
    503: "Not now: try again later.",
    504: "No answer within the time the caller gave.",
}
_PARAMETERS = {"GetModel": [path_parameter("model", "A name that ListModels gave.")]}
_TIMEOUT = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "description": "Seconds until you want an answer; 504 after that. Absent: no limit.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "error_id": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

OPERATIONS: Mapping[str, tuple[str, type[BaseModel] | None, dict[str, Any] | None]] = (
    MappingProxyType(
        {
            "ChatCompletions": ("Answer a conversation; whole or as a stream.", ChatBody, _CHAT),
            "Completions": ("Continue a prompt as it stands.", CompletionBody, _COMPLETION),
            "ListModels": ("The policy that is served.", None, None),
            "GetModel": ("One of them.", None, None),
        }
    )
)


def operation(name: str) -> dict[str, Any]:
    """Return the OpenAPI operation of a route, without its id."""
    summary, body, example = OPERATIONS[name]
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if body is not None:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    made: dict[str, Any] = {
        "tags": [_TAG],
        "summary": name,
        "description": summary,
        "parameters": [*_PARAMETERS.get(name, ()), _TIMEOUT],
        "responses": {
            "200": {"description": "OK.", "content": answers},
            **{str(status): _refusal(text) for status, text in _REFUSALS.items()},
        },
    }
    if body is not None:
        media = {"schema": _inline(body), "example": example}
        made["requestBody"] = {"content": {"application/json": media}, "required": True}
    return made


def _refusal(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ERROR}}}


def _inline(body: type[BaseModel]) -> dict[str, Any]:
    """Return the body's schema with every reference replaced by what it refers to."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            name = value["$ref"].rpartition("/")[2]
            return resolve(definitions[name] | {k: v for k, v in value.items() if k != "$ref"})
        return {key: resolve(item) for key, item in value.items() if key != "title"}

    inlined: dict[str, Any] = resolve(schema)
    return inlined
