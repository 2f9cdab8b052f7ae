"""OpenAI's routes on the REST door: plain, and under the URL of a recording.

service = OpenAiService(replica, renderer, store, model_name="policy", max_new_tokens=256)
for route in openai_routes(service):
    server.add_route(route)
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError
from dialoop.v1.scope_pb2 import SCOPE_ROLLOUT

from dialoop_services.inference.openai.calls import Answering
from dialoop_services.inference.openai.documents import OPERATIONS, operation
from dialoop_services.inference.openai.errors import UnknownModel, error_answer
from dialoop_services.inference.openai.jobs import Jobs, parse_body
from dialoop_services.inference.openai.models import ChatBody, CompletionBody
from dialoop_services.rest.http_routes import HttpRoute
from dialoop_services.runtime.logs import add_log_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_services.inference.openai.calls import AnswerJob
    from dialoop_services.inference.recordings.store import Recording, RecordingStore
    from dialoop_services.inference.rendering import Renderer
    from dialoop_services.inference.replica.replica import Replica
    from dialoop_services.rest.http_routes import HttpAnswer, HttpRequest

_RECORDED = "/recordings/{recording_id}"


class OpenAiService:
    """Chat and plain completions of one replica, and its models."""

    def __init__(
        self,
        replica: Replica,
        renderer: Renderer,
        store: RecordingStore,
        *,
        model_name: str,
        max_new_tokens: int,
    ) -> None:
        self._replica = replica
        self._store = store
        self._model_name = model_name
        self._answering = Answering(replica, renderer)
        self._jobs = Jobs(
            replica=replica,
            renderer=renderer,
            model_name=model_name,
            max_new_tokens=max_new_tokens,
        )

    async def chat(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """POST chat/completions."""
        recording = self._recording(request)
        body = parse_body(ChatBody, request.body)
        await self._answer(self._jobs.chat(body, recording), body.stream, request, answer)

    async def completion(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """POST completions."""
        recording = self._recording(request)
        body = parse_body(CompletionBody, request.body)
        await self._answer(self._jobs.completion(body, recording), body.stream, request, answer)

    async def models(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """GET models."""
        self._recording(request)
        await answer.json({"object": "list", "data": list(self._models().values())})

    async def model(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """GET models/{model}."""
        self._recording(request)
        model = self._models().get(request.parameters["model"])
        if model is None:
            raise UnknownModel(
                "The model of that name is not served here.",
                remedy=f"Ask for '{self._model_name}'.",
            )
        await answer.json(model)

    def admits(self, parameters: Mapping[str, str], key: bytes) -> bool:
        """Return whether a key is that of the recording in a route's path."""
        return self._store.has_key(parameters["recording_id"], key)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Return the policy, and each adapter on it, by name."""
        engine = self._replica.engine
        versions = {self._model_name: engine.policy_version, **self._replica.adapters}
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

    def _recording(self, request: HttpRequest) -> Recording | None:
        recording_id = request.parameters.get("recording_id")
        if recording_id is None:
            return None
        add_log_fields({"recording_id": recording_id})
        recording = self._store.find(recording_id)
        recording.require_open()
        return recording

    async def _answer(
        self, job: AnswerJob, is_stream: bool, request: HttpRequest, answer: HttpAnswer
    ) -> None:
        if not is_stream:
            await answer.json(await self._answering.whole(job, request))
            return
        async with aclosing(self._answering.stream(job, request)) as chunks:
            async for chunk in chunks:
                await answer.event(chunk)
        await answer.end()


def openai_routes(service: OpenAiService) -> tuple[HttpRoute, ...]:
    """Return all routes of the service, plain and recorded."""
    handlers = {
        "ChatCompletions": ("POST", "/v1/chat/completions", service.chat),
        "Completions": ("POST", "/v1/completions", service.completion),
        "ListModels": ("GET", "/v1/models", service.models),
        "GetModel": ("GET", "/v1/models/{model}", service.model),
    }
    assert handlers.keys() == OPERATIONS.keys()
    return tuple(
        HttpRoute(
            name=f"OpenAI.{'Recorded' if prefix else ''}{name}",
            scope=SCOPE_ROLLOUT,
            method=method,
            path=prefix + path,
            handle=handle,
            errors=_errors,
            operation=operation(name, prefix + path),
            admits=service.admits if prefix else None,
        )
        for prefix in ("", _RECORDED)
        for name, (method, path, handle) in handlers.items()
    )


def _errors(error: DialoopError) -> Any:
    return error_answer(error)
