"""Old field names that REST still reads, because the users' documents show them.

POST /v1/sessions/s/reset  {"episode": 1, "text": "What is 3+4?"}          text -> query
POST /v1/sessions/s/step   {"episode": 1, "text_response": ["Result=7"]}   text_response -> history
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

_Fields = dict[str, Any]


def modern(rpc: str, body: bytes) -> bytes:
    """The body of a rpc ("EnvironmentService.Reset") with today's names; any other as it is."""
    if rpc not in _OLD:
        return body
    mark, rename = _OLD[rpc]
    if mark not in body:  # nearly always; nothing is parsed twice then
        return body
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body  # refused, with its reason, where bodies are validated
    if not isinstance(fields, dict):
        return body
    return json.dumps(rename(fields)).encode()


def _reset(fields: _Fields) -> _Fields:
    text = _one(fields.get("text"))
    if "query" in fields or not isinstance(text, str):
        return fields
    return {**{k: v for k, v in fields.items() if k != "text"}, "query": text}


def _step(fields: _Fields) -> _Fields:
    text = _one(fields.get("text_response"))
    if "history" in fields or not isinstance(text, str):
        return fields
    history = {"response": {"messages": [{"role": "assistant", "content": text}]}}
    return {**{k: v for k, v in fields.items() if k != "text_response"}, "history": history}


def _one(value: Any) -> Any:
    """The documents give a list with one text for a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_OLD: Mapping[str, tuple[bytes, Callable[[_Fields], _Fields]]] = MappingProxyType(
    {
        "EnvironmentService.Reset": (b'"text"', _reset),
        "EnvironmentService.Step": (b'"text_response"', _step),
    }
)
