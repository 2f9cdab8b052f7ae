"""The descriptions of OpenAI's routes on the OpenAPI page."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from dialoop_services.inference.wires.base import path_parameter
from dialoop_services.inference.wires.openai.models import ChatBody, CompletionBody
from dialoop_services.rest.requests import TIMEOUT_HEADER

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
