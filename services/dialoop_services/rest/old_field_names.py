"""Old field names that REST still reads, because the users' documents show them.

POST /v1/sessions/s/reset  {"episode": 1, "text": "What is 3+4?"}          text -> query
POST /v1/sessions/s/step   {"episode": 1, "text_response": ["Result=7"]}   text_response -> history
POST /v1/generate          {"sampling": {"max_tokens": 8, "n": 2}}         dialoop.compat.sampling
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from dialoop.compat.sampling import read_generate_options
from dialoop.v1 import trajectory_pb2

_Fields = dict[str, Any]
_SAMPLING = frozenset(trajectory_pb2.SamplingParams.DESCRIPTOR.fields_by_name.keys())
# What older names put among the parameters of sampling, and the proto beside them.
_BESIDE = ("num_samples", "skip_special_tokens")


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


def modern_sampling(request: _Fields) -> tuple[_Fields, Sequence[str]] | None:
    """A GenerateRequest with today's names in its `sampling`; None where they are already.

    Raises what `read_generate_options` does.
    """
    sampling = request.get("sampling")
    if not isinstance(sampling, dict):
        return None
    if sampling.keys() <= _SAMPLING and isinstance(sampling.get("stop", []), list):
        return None
    beside = {name: request[name] for name in _BESIDE if request.get(name)}
    options = read_generate_options(sampling | beside)
    made = asdict(options.sampling)
    fields = {name: value for name, value in made.items() if value not in (None, ())}
    modern_fields = {
        "sampling": fields,
        "num_samples": options.num_samples,
        "skip_special_tokens": options.skip_special_tokens,
    }
    return request | modern_fields, options.warnings


def _one(value: Any) -> Any:
    """The documents give a list with one text for a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_OLD: Mapping[str, tuple[bytes, Callable[[_Fields], _Fields]]] = MappingProxyType(
    {
        "EnvironmentService.Reset": (b'"text"', _reset),
        "EnvironmentService.Step": (b'"text_response"', _step),
    }
)
