"""OpenAI's routes, plain and recorded, with bodies that are almost right and with random bytes.

DIALOOP_FUZZ_SEED chooses another seed; a failure prints the seed and the call.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from tests.contract.runtime.test_fuzz import HTTP_SERVER_ERRORS, NUMBERS, SEED, WORDS
from tests.support.rest_world import http_of, service

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
PROMPT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
]
CHAT = {
    "model": "bytes",
    "messages": [*PROMPT, {"role": "assistant", "content": "4"}, {"role": "user", "content": "u"}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "temperature": 1.0,
    "top_p": 0.9,
    "max_tokens": 5,
    "n": 2,
    "stop": ["x"],
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
}
WITH_TOOLS = CHAT | {
    "messages": [
        *PROMPT,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
}
COMPLETION = {
    "model": "bytes",
    "prompt": [1, 2, 3],
    "max_tokens": 5,
    "temperature": 0.5,
    "n": 1,
    "echo": True,
    "logprobs": 1,
    "stream": False,
    "stop": "x",
}
ROUTES = (
    ("chat/completions", CHAT),
    ("chat/completions", WITH_TOOLS),
    ("completions", COMPLETION),
)
JUNK: tuple[Any, ...] = (*WORDS, *NUMBERS, True, None, [], {}, [[]], {"a": {"b": []}}, ["x"] * 40)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside, and of the whole."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    paths = [path] if path else []
    for key, item in inner:
        is_nested = isinstance(item, (dict, list))
        paths += places_in(item, (*path, key)) if is_nested else [(*path, key)]
    return paths


def body_of(chance: random.Random, whole: dict[str, Any]) -> bytes:
    """A body with some fields left out, replaced or added; or bytes that are no JSON."""
    made = {name: value for name, value in copy.deepcopy(whole).items() if chance.random() < 0.25}
    made |= {name: whole[name] for name in ("model", "messages", "prompt") if name in whole}
    made = copy.deepcopy(made)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        *outer, last = chance.choice(places_in(made))
        target: Any = made
        for key in outer:
            target = target[key]
        choice = chance.random()
        if choice < 0.7:
            target[last] = copy.deepcopy(chance.choice(JUNK))
        elif isinstance(target, dict):
            target[chance.choice(WORDS)] = target.pop(last)
    text = bytearray(json.dumps(made).encode())
    if chance.random() < 0.2:
        for _ in range(chance.choice((1, 3))):
            text[chance.randrange(len(text))] = chance.choice(b'{}[]",:019ae\0\xff')
    return chance.randbytes(chance.choice((0, 1, 60))) if chance.random() < 0.05 else bytes(text)


async def new_recording(http: httpx.AsyncClient) -> str:
    """The path of a recording that is open."""
    answer = await http.post("/v1/recordings", json={})
    assert answer.status_code == 200, answer.text
    path: str = answer.json()["base_path"]
    return path


async def fuzz(num_calls: int, *, seed: int) -> tuple[Counter[int], list[str], list[int]]:
    """Return the statuses, what should not have come, and memory on the way."""
    chance, statuses, mistakes, memory = random.Random(seed), Counter[int](), list[str](), []
    async with service("inference") as server, http_of(server) as http:
        for index in range(num_calls):
            if index % 200 == 0:
                recorded = await new_recording(http)
                memory.append(psutil.Process().memory_info().rss)
            base = chance.choice(("/v1", recorded, "/recordings/%00/v1"))
            route, whole = chance.choice(ROUTES)
            body = body_of(chance, whole)
            if chance.random() < 0.05:
                path = f"{base}/models/{chance.choice(('bytes', '%00', '..%2fx', 'x' * 300))}"
                answer = await http.get(path)
            else:
                path = f"{base}/{route}"
                answer = await http.post(path, content=body)
            statuses[answer.status_code] += 1
            is_server_error = answer.status_code >= 500
            problem = answer.json() if answer.status_code >= 400 else {"reason": ""}
            is_typed = "reason" in problem or "code" in problem["error"]
            if not is_typed or (is_server_error and answer.status_code not in HTTP_SERVER_ERRORS):
                mistakes.append(f"{path} {body!r}: {answer.status_code} {answer.text[:300]}")
        assert (await http.get("/healthz")).status_code == 200
    return statuses, mistakes, memory


async def test_no_body_makes_the_openai_routes_fail() -> None:
    statuses, mistakes, _ = await fuzz(600, seed=SEED)
    assert not mistakes, (SEED, len(mistakes), *mistakes[:5])
    assert statuses[200] > 10  # some are answered
    assert statuses[400] > 100


@pytest.mark.heavy(reason="10,000 calls")
async def test_ten_thousand_bodies_neither_fail_nor_fill_memory() -> None:
    statuses, mistakes, memory = await fuzz(10_000, seed=SEED + 1)
    assert not mistakes, (SEED, len(mistakes), *mistakes[:5])
    assert sum(statuses.values()) == 10_000
    assert memory[-1] < memory[len(memory) // 2] * 1.05 + (8 << 20), memory
