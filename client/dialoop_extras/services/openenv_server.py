"""Serve environments by OpenEnv's protocol, with DIALOOP_ENVIRONMENT_OPENENV=true.

    async with GenericEnvClient(base_url="http://127.0.0.1:8000/openenv/arithmetic") as client:
        result = await client.reset(task_key="35+40")
        result = await client.step({"message": "Result=75<submit>"})

An action is the policy's message. An observation has all messages so far, the rewards by name, and
the episode and step that it answers. A WebSocket is a session. Over plain HTTP each reset makes a
session, and a step names it by `episode_id` of the observation. With a token the URL is
ws://any:TOKEN@host, because OpenEnv's client sets no headers.
"""

from __future__ import annotations

import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pydantic_core
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments import Given, InputMode, Managed, TaskChoice, Text
from dialoop.environments.sessions.records import ResetCall, StepCall
from dialoop.errors import CapacityExhausted, DialoopError, InvalidInput, NotFound, Unsupported
from dialoop.reasons import Reason
from dialoop.v1.scope_pb2 import SCOPE_ENV
from dialoop_services.rest.http_routes import ErrorAnswer, HttpRoute
from dialoop_services.rest.problems import problem_headers
from dialoop_services.rest.socket_routes import SocketRoute
from dialoop_services.runtime.errors import public_error
from dialoop_services.runtime.logs import add_log_fields
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dialoop_extras.services.openenv_documents import SCHEMAS, operation, reply_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop.environments.sessions.catalogue import Catalogue
    from dialoop.environments.sessions.engine import SessionEngine
    from dialoop_services.environment.serving import ServedEnvironments
    from dialoop_services.hosting.server import GrpcServer
    from dialoop_services.rest.http_routes import HttpAnswer, HttpRequest
    from dialoop_services.rest.socket_routes import Socket

_PREFIX = "/openenv/{environment}"


class ResetBody(BaseModel):
    """Body of a reset: a task, or a question of the caller's own."""

    model_config = ConfigDict(extra="ignore")

    seed: int | None = Field(default=None, ge=0, lt=2**63)
    split: str = ""
    task_key: str = ""
    question: str = ""

    @property
    def choice(self) -> TaskChoice:
        """Return the task that the body chooses."""
        question = Given(query=self.question)
        return TaskChoice(
            split=self.split, task_key=self.task_key, seed=self.seed or 0, question=question
        )


class Hints(BaseModel):
    """Optional metadata of an action, with which a client can repeat a step safely."""

    model_config = ConfigDict(extra="ignore")

    step_index: int | None = Field(default=None, ge=0)
    episode_id: str = ""


class OpenEnvAction(BaseModel):
    """An action: the policy's message."""

    model_config = ConfigDict(extra="forbid", title="Action")

    message: str
    metadata: Hints = Hints()


class StepBody(BaseModel):
    """Body of a step over HTTP."""

    model_config = ConfigDict(extra="ignore")

    action: OpenEnvAction
    episode_id: str = ""


@dataclass(slots=True)
class _Player:
    """One session of a client; `episode` is 0 before its first reset."""

    session_id: str
    environment: str
    episode: int = 0
    num_steps: int = 0


class OpenEnvServer:
    """Serves every environment of a catalogue to clients of OpenEnv."""

    def __init__(self, catalogue: Catalogue, sessions: SessionEngine) -> None:
        self._catalogue = catalogue
        self._sessions = sessions

    def add_to(self, server: GrpcServer) -> None:
        """Add the routes to a server, which serves them if it has a REST server."""
        routes = {
            ("POST", "reset"): self.reset,
            ("POST", "step"): self.step,
            ("GET", "state"): self.state,
            ("GET", "state/{episode_id}"): self.state,
            ("GET", "metadata"): self.metadata,
            ("GET", "schema"): self.schema,
            ("GET", "health"): self.health,
        }
        for (method, name), handle in routes.items():
            route = HttpRoute(
                name=f"OpenEnv.{name.partition('/')[0].title()}{'Of' if '/' in name else ''}",
                scope=SCOPE_ENV,
                method=method,
                path=f"{_PREFIX}/{name}",
                handle=handle,
                errors=_error_answer,
                operation=operation(name),
            )
            server.add_route(route)
        path = f"{_PREFIX}/ws"
        server.add_socket(
            SocketRoute(name="OpenEnv.Socket", scope=SCOPE_ENV, path=path, handle=self.converse)
        )

    async def converse(self, socket: Socket) -> None:
        """Answer the requests of one session until the client disconnects."""
        player = _Player(f"openenv-{uuid.uuid4().hex}", socket.parameters["environment"])
        add_log_fields({"session_id": player.session_id})
        try:
            while (text := await socket.receive()) is not None:
                reply = await self._reply_to(player, text)
                if reply is None:
                    return
                await socket.send(reply)
        finally:
            self._sessions.close(player.session_id)

    async def reset(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Open a session and start its episode."""
        body = _parse(ResetBody, _json(request.body or b"{}"))
        player = _Player(f"openenv-{uuid.uuid4().hex}", request.parameters["environment"])
        await answer.json(await self._reset(player, body))

    async def step(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Take a step in the session that `episode_id` names."""
        body = _parse(StepBody, _json(request.body))
        session = self._session(
            request.parameters["environment"], body.episode_id or body.action.metadata.episode_id
        )
        player = _Player(session.session_id, session.environment.name)
        player.episode = session.episode_number
        player.num_steps = session.current.episode.step_index if session.current else 0
        await answer.json(await self._step(player, body.action))

    async def state(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Return a session's episode and number of steps; without `episode_id` none and 0."""
        name, episode_id = request.parameters["environment"], request.parameters.get("episode_id")
        self._catalogue.get(name)
        session = self._session(name, episode_id) if episode_id else None
        current = session.current if session else None
        steps = current.episode.step_index if current else 0
        await answer.json({"episode_id": episode_id, "step_count": steps})

    async def metadata(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Return the environment's name, description and version."""
        served = self._catalogue.get(request.parameters["environment"])
        await answer.json(
            {"name": served.name, "description": served.description, "version": served.version}
        )

    async def schema(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Return the schemas of action, observation and state, the same for each environment."""
        self._catalogue.get(request.parameters["environment"])
        await answer.json({"action": OpenEnvAction.model_json_schema()} | SCHEMAS)

    async def health(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Return whether the environment can work at the moment."""
        served = self._catalogue.get(request.parameters["environment"])
        is_ill = isinstance(served, Managed) and served.problem()
        await answer.json({"status": "unhealthy" if is_ill else "healthy"})

    async def _reply_to(self, player: _Player, text: str) -> dict[str, Any] | None:
        """Return the reply to one message, or None to `close`."""
        try:
            message = _json(text)
            kind, data = message.get("type"), message.get("data") or {}
            if kind == "close":
                return None
            if kind == "reset":
                answer = await self._reset(player, _parse(ResetBody, data))
                return {"type": "observation", "data": answer}
            if kind == "step":
                answer = await self._step(player, _parse(OpenEnvAction, data))
                return {"type": "observation", "data": answer}
            if kind == "state":
                state = {"episode_id": _episode_id(player), "step_count": player.num_steps}
                return {"type": "state", "data": state}
            return _error_frame("There is no message of that type.", "UNKNOWN_TYPE", "UNKNOWN_TYPE")
        except Exception as error:
            public = public_error(error)
            return _error_frame(str(public), _code(public), public.reason)

    async def _reset(self, player: _Player, body: ResetBody) -> dict[str, Any]:
        self._sessions.create(player.session_id, player.environment)
        call = ResetCall(
            session_id=player.session_id, episode=player.episode + 1, choice=body.choice
        )
        opening = await self._sessions.reset(call)
        player.episode, player.num_steps = call.episode, 0
        return reply_of(opening.episode, _episode_id(player), info=opening.info)

    async def _step(self, player: _Player, action: OpenEnvAction) -> dict[str, Any]:
        if not player.episode:
            raise InvalidInput(
                "No episode runs.", reason=Reason.NOT_RESET, remedy="Send reset first."
            )
        index = action.metadata.step_index
        call = StepCall(
            session_id=player.session_id,
            episode=player.episode,
            step_index=player.num_steps if index is None else index,
            answered=self._response_of(player.environment, action.message),
        )
        outcome = (await self._sessions.step(call)).outcome
        player.num_steps = max(player.num_steps, call.step_index + 1)
        return reply_of(outcome.episode, _episode_id(player), outcome=outcome, info=outcome.info)

    def _response_of(self, environment: str, message: str) -> ChatHistory | Text:
        served: Any = self._catalogue.get(environment)
        mode = getattr(served, "input_mode", InputMode.HISTORY)
        if mode is InputMode.TOKENS:
            raise Unsupported(
                f"Environment {environment} reads token ids.",
                reason=Reason.WRONG_MODE,
                remedy="Play it through the environment service.",
            )
        if mode is InputMode.TEXT:
            return Text(response=message)
        role = getattr(served, "policy_role", "assistant")
        return ChatHistory(response=History((Message(role=role, content=message),)))

    def _session(self, environment: str, episode_id: str) -> Any:
        """Return the session of an observation's episode_id; raise NotFound (SESSION_LOST)."""
        if not episode_id:
            raise InvalidInput(
                "The step has no `episode_id`.",
                reason=Reason.EPISODE_MISSING,
                remedy="Send episode_id of the reset's observation, or use the WebSocket.",
            )
        session = self._sessions.get(episode_id.partition("/")[0])
        if session.environment.name != environment:
            raise InvalidInput(
                "The episode belongs to another environment.",
                reason=Reason.SESSION_CONFLICT,
                remedy="Use the URL where it was reset.",
            )
        return session


def _episode_id(player: _Player) -> str | None:
    return player.session_id if player.episode else None


def _json(text: str | bytes) -> dict[str, Any]:
    try:
        fields = pydantic_core.from_json(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidInput(
            "The text is not a JSON object.",
            reason=Reason.INVALID_JSON,
            remedy="Send one JSON object.",
        )
    return fields


def _parse(kind: type[Any], data: Any) -> Any:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, e["loc"])) for e in error.errors()[:5])
        raise InvalidInput(
            f"These fields are wrong: {places}.",
            reason=Reason.INVALID_FIELDS,
            remedy="See /schema of the environment.",
        ) from error


def _code(error: DialoopError) -> str:
    """Return OpenEnv's name for the kind of error."""
    if error.reason == Reason.INVALID_JSON:
        return error.reason
    kinds = {
        CapacityExhausted: "CAPACITY_REACHED",
        InvalidInput: "VALIDATION_ERROR",
        NotFound: "SESSION_ERROR",
    }
    return next(
        (code for kind, code in kinds.items() if isinstance(error, kind)), "EXECUTION_ERROR"
    )


def _error_frame(message: str, code: str, reason: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, "reason": reason}}


def _error_answer(error: DialoopError) -> ErrorAnswer:
    headers = {k.decode(): v.decode() for k, v in problem_headers(error) if k != b"content-type"}
    return ErrorAnswer(document={"detail": str(error), "reason": error.reason}, headers=headers)


@asynccontextmanager
async def serve_openenv(served: ServedEnvironments) -> AsyncIterator[None]:
    """Add OpenEnv's routes to the environment service's server, if its settings say so."""
    if served.settings.openenv:
        OpenEnvServer(served.catalogue, served.sessions).add_to(served.server)
    yield
