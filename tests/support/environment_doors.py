"""One environment service behind every door: gRPC, REST, the SDK, and none at all (in process)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import Environment
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.episode import ResetResult, StepResult
from dialoop.errors import DialoopError, NotFound
from dialoop.local.client import LocalEnvironmentClient
from dialoop.v1 import environment_service_pb2 as pb
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings
from google.protobuf.message import Message as Proto

from tests.support.rest_world import GrpcDoor, Refusal, RestServer

DOORS = ("grpc", "rest", "sdk", "in_process")


class Refused(DialoopError):
    """What a raw door refused, by its reason."""


class RawChannel:
    """A Channel for EnvironmentClient whose calls go through a raw door, gRPC or REST in JSON."""

    def __init__(self, door: GrpcDoor | RestServer) -> None:
        self._door = door

    async def call(self, rpc: Any, request: Proto) -> Any:
        answer = await self._door(rpc.path.removeprefix("/dialoop.v1.").replace("/", "."), request)
        if isinstance(answer, Refusal):
            raise Refused("refused", reason=answer[1])
        return answer


@asynccontextmanager
async def at(door: str, *environments: Environment, **settings: Any) -> AsyncIterator[Any]:
    """A client of the environments through one door; all have EnvironmentClient's methods."""
    if door == "in_process":
        async with LocalEnvironmentClient(*environments) as client:
            yield client
        return
    all_settings = EnvironmentSettings(rest_port=0, drain_s=1, **settings)
    async with serving(all_settings, Catalogue(environments)) as server:
        if door == "sdk":
            async with Channel(server.address, retry=RetryPolicy(max_attempts=1)) as channel:
                yield EnvironmentClient(channel)
            return
        raw: GrpcDoor | RestServer
        if door == "grpc":
            raw = GrpcDoor(grpc.aio.insecure_channel(server.address))
        else:
            raw = RestServer(server)
        try:
            yield EnvironmentClient(RawChannel(raw))  # type: ignore[arg-type]
        finally:
            await raw.close()


def say(text: str, **fields: Any) -> ChatHistory:
    """A response alone."""
    return ChatHistory(response=History((Message(role="assistant", content=text, **fields),)))


async def open_session(
    client: Any, environment: str, session: str = "s", **reset: Any
) -> ResetResult:
    """A fresh session at the start of its first episode."""
    await client.create_session(session, environment)
    return await client.reset(session, episode=1, **reset)


async def play(client: Any, *texts: Any, session: str = "s", episode: int = 1) -> list[StepResult]:
    """The outcomes of texts (or ready answers), one step each."""
    return [
        await client.step(
            session,
            episode=episode,
            step_index=index,
            history=say(text) if isinstance(text, str) else text,
        )
        for index, text in enumerate(texts)
    ]


async def reason_of(awaitable: Any) -> str:
    """The reason of the refusal; a failure of the test where there is none."""
    try:
        await awaitable
    except DialoopError as error:
        return error.reason
    raise AssertionError("nothing was refused")


def roles(outcome: ResetResult | StepResult) -> list[str]:
    """Who spoke, in order."""
    return [message.role for message in outcome.history.require_prompt()]


def texts(outcome: ResetResult | StepResult) -> list[str]:
    """What was said, in order."""
    return [message.text for message in outcome.history.require_prompt()]


__all__ = [
    "DOORS",
    "NotFound",
    "at",
    "open_session",
    "pb",
    "play",
    "reason_of",
    "roles",
    "say",
    "texts",
]
