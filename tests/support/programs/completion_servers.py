"""Servers of OpenAI's completions in other people's forms, in front of Dialoop's own door.

A form changes what the server takes and how it says it, never a token or a number, but for `raw`:
there the log-probs of sampled tokens are those of temperature 1, as vLLM's server gives by default.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

_OPENAI = {
    *("model", "prompt", "n", "logprobs", "echo", "max_tokens", "temperature", "top_p", "seed"),
    *("stop", "stream"),
}


@dataclass(kw_only=True)
class Form:
    """How a server talks.

    is_strict: it refuses fields that are not OpenAI's. ids: "field" for token_ids, "text" for
    "token_id:5" where it is asked for, "none" for the text of a token. scores: the field by which
    it scores given ids. is_raw: log-probs of temperature 1. names_longest: max_model_len in models.
    """

    is_strict: bool = False
    ids: str = "none"
    scores: str = "prompt_logprobs"
    is_raw: bool = False
    names_longest: bool = True


@dataclass(kw_only=True)
class Proxy:
    """A server of a form; its requests go on to `upstream`, Dialoop's own door."""

    form: Form
    upstream: str
    http: httpx.AsyncClient
    decode: Any
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def models(self, request: Request) -> JSONResponse:
        document = (await self.http.get(f"{self.upstream}/models")).json()
        if not self.form.names_longest:
            for model in document["data"]:
                del model["max_model_len"]
        return JSONResponse(document)

    async def completions(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.bodies.append(body)
        unknown = body.keys() - _OPENAI
        if self.form.is_strict and unknown:
            message = f"Unrecognized request argument supplied: {min(unknown)}"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        wanted = {name: value for name, value in body.items() if name != "echo"}
        as_text = wanted.pop("return_tokens_as_token_ids", False) and self.form.ids == "text"
        if self.form.scores != "prompt_logprobs":
            wanted.pop("prompt_logprobs", None)
        if self.form.ids != "field":
            wanted.pop("return_token_ids", None)
        wanted["return_token_ids"] = True
        echoes = body.get("echo", False) and self.form.scores == "echo"
        if echoes:
            wanted["prompt_logprobs"] = 0
        answer = await self.http.post(f"{self.upstream}/completions", json=wanted)
        if answer.status_code != httpx.codes.OK:
            return JSONResponse(answer.json(), status_code=answer.status_code)
        document = answer.json()
        if self.form.is_raw and body.get("logprobs") is not None:
            await self._make_raw(body, document)
        self._rewrite(document, as_text=as_text, echoes=echoes)
        return JSONResponse(document)

    async def _make_raw(self, body: dict[str, Any], document: dict[str, Any]) -> None:
        for choice in document["choices"]:
            ids = [*document["prompt_token_ids"], *choice["token_ids"]]
            fields = {"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
            answer = await self.http.post(
                f"{self.upstream}/completions", json={"model": body["model"]} | fields
            )
            if answer.status_code != httpx.codes.OK:
                continue  # the row fills the context
            rows = answer.json()["choices"][0]["prompt_logprobs"]
            values = [
                row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)
            ]
            logprobs = choice["logprobs"]
            logprobs["token_logprobs"] = values[-len(choice["token_ids"]) :]
            if logprobs["top_logprobs"]:
                logprobs["top_logprobs"] = [{"any": -1.5}] * len(choice["token_ids"])

    def _rewrite(self, document: dict[str, Any], *, as_text: bool, echoes: bool) -> None:
        prompt = document["prompt_token_ids"]
        for choice in document["choices"]:
            logprobs, ids = choice["logprobs"], choice["token_ids"]
            rows = choice.pop("prompt_logprobs", None) if echoes else None
            if rows is not None and logprobs is not None:
                scores = [
                    row and row[str(token)]["logprob"]
                    for row, token in zip(rows, prompt, strict=True)
                ]
                logprobs["token_logprobs"] = [*scores, *logprobs["token_logprobs"]]
                logprobs["tokens"] = [self.decode([t]) for t in prompt] + logprobs["tokens"]
            if as_text and logprobs is not None:
                logprobs["tokens"] = [f"token_id:{token}" for token in ids]
            if self.form.ids != "field":
                del choice["token_ids"]
        if self.form.ids != "field":
            del document["prompt_token_ids"]


@asynccontextmanager
async def completion_server(form: Form, upstream: str, decode: Any) -> AsyncIterator[Proxy]:
    """Serve a form in front of Dialoop's door; yields the proxy with its own address."""
    async with httpx.AsyncClient(timeout=60) as http:
        proxy = Proxy(form=form, upstream=upstream, http=http, decode=decode)
        routes = [
            Route("/v1/models", proxy.models),
            Route("/v1/completions", proxy.completions, methods=["POST"]),
        ]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started:
                    await asyncio.sleep(0.01)
                yield proxy
            finally:
                server.should_exit = True
                await serving
