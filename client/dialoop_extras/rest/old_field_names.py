"""Old field names that REST still reads because documents of its users show them.

POST /v1/sessions/s/reset  {"episode": 1, "text": "What is 3+4?"}          text -> query
POST /v1/sessions/s/step   {"episode": 1, "text_response": ["Result=7"]}   text_response -> history,
                                                                    and whole_prompt
POST /v1/generate          {"sampling": {"max_tokens": 8, "n": 2}}    dialoop_extras.compat.sampling
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from dialoop.v1 import trajectory_pb2

from dialoop_extras.compat.sampling import read_generate_options

_Fields = dict[str, Any]
_SAMPLING = frozenset(trajectory_pb2.SamplingParams.DESCRIPTOR.fields_by_name.keys())
# Old requests have these among the sampling parameters, the proto has them in the request.
_REQUEST_FIELDS = ("num_samples", "skip_special_tokens")


def rename_old_fields(rpc: str, body: bytes) -> bytes:
    """Return a rpc's body with today's field names; `rpc` is "EnvironmentService.Reset".

    A body that has no old names, or is not JSON, is returned unchanged.
    """
    if rpc not in _OLD:
        return body
    mark, rename = _OLD[rpc]
    if mark not in body:  # nearly always: then nothing is parsed twice
        return body
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body  # validation rejects it later and says why
    if not isinstance(fields, dict):
        return body
    return json.dumps(rename(fields)).encode()


def _reset(fields: _Fields) -> _Fields:
    text = _unwrap(fields.get("text"))
    if "query" in fields or not isinstance(text, str):
        return fields
    return {**{k: v for k, v in fields.items() if k != "text"}, "query": text}


def _step(fields: _Fields) -> _Fields:
    text = _unwrap(fields.get("text_response"))
    if "history" in fields or not isinstance(text, str):
        return fields
    history = {"response": {"messages": [{"role": "assistant", "content": text}]}}
    today = {k: v for k, v in fields.items() if k != "text_response"}
    return {"whole_prompt": True, **today, "history": history}  # those documents read it whole


def rename_old_sampling(request: _Fields) -> tuple[_Fields, Sequence[str]] | None:
    """Return a GenerateRequest with today's names in its `sampling`, and warnings.

    Return None where it has no old names. Raise what `read_generate_options` raises.
    """
    sampling = request.get("sampling")
    if not isinstance(sampling, dict):
        return None
    if sampling.keys() <= _SAMPLING and isinstance(sampling.get("stop", []), list):
        return None
    request_fields = {name: request[name] for name in _REQUEST_FIELDS if request.get(name)}
    options = read_generate_options(sampling | request_fields)
    parameters = asdict(options.sampling)
    today = {
        "sampling": {k: v for k, v in parameters.items() if v not in (None, ())},
        "num_samples": options.num_samples,
        "skip_special_tokens": options.skip_special_tokens,
    }
    return request | today, options.warnings


def _unwrap(value: Any) -> Any:
    """Return the text of a batch of one, which old documents write as a list."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_OLD: Mapping[str, tuple[bytes, Callable[[_Fields], _Fields]]] = MappingProxyType(
    {
        "EnvironmentService.Reset": (b'"text"', _reset),
        "EnvironmentService.Step": (b'"text_response"', _step),
    }
)
