"""OpenEnv servers as environments: extra `dialoop-extras[openenv]`.

use = "dialoop_extras.foreign.openenv:openenv"
options = { name = "echo", url = "http://127.0.0.1:8000", action_key = "message" }

Each episode has its own WebSocket, with at most one request under way. The server's frames carry no
correlation id, so a late reply would look like the reply to the next request. After a request that
failed, timed out or was cancelled, the driver therefore closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dialoop.chat import History, Message
from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.source import TaskSource
from dialoop.errors import CapacityExhausted, InvalidConfig
from dialoop.reasons import Reason
from dialoop.user_functions import call

from dialoop_extras.foreign.driver import (
    ForeignEnvironment,
    ForeignReset,
    ForeignStep,
    NumberedTasks,
)

ToAction = Callable[[str], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]

_CLOSE_S = 1.0
_CAPACITY = "CAPACITY_REACHED"
_NOT_SHOWN = ("done", "reward", "metadata")


def openenv(  # noqa: PLR0913 - the options are the interface
    *,
    name: str,
    url: str,
    action_key: str = "message",
    observation_key: str = "",
    to_action: ToAction | None = None,
    tasks: TaskSource | None = None,
    num_tasks: int = 1000,
    num_heldout: int = 0,
    connect_timeout_s: float = 10.0,
    timeout_s: float = 60.0,
    max_observation: int = 100_000,
    **options: Any,
) -> ForeignEnvironment:
    """Return the environment behind an OpenEnv server; InvalidConfig (PACKAGE_MISSING).

    action_key: the field of the server's action that holds the policy's text; `to_action` replaces
    it by a function. observation_key: the field of the server's observation that the policy sees;
    by default it sees all of it as JSON. tasks: the arguments of resets; without them each task is
    a seed. options: those of ForeignEnvironment, such as system_prompt or max_turns.
    """
    driver = OpenEnvDriver(
        url=url,
        to_action=to_action or (lambda text: {action_key: text}),
        observation_key=observation_key,
        connect_timeout_s=connect_timeout_s,
        timeout_s=timeout_s,
        max_observation=max_observation,
    )
    fields: dict[str, Any] = {"reward_name": "openenv"} | options
    source = tasks or NumberedTasks(num_tasks, num_heldout)
    return ForeignEnvironment(name=name, driver=driver, tasks=source, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvDriver:
    """Plays episodes at an OpenEnv server, with OpenEnv's own client."""

    url: str
    to_action: ToAction
    observation_key: str = ""
    connect_timeout_s: float = 10.0
    timeout_s: float = 60.0
    max_observation: int = 100_000

    def __post_init__(self) -> None:
        _client_class()

    async def begin(self, task: TaskData, seed: int) -> ForeignReset:
        """Connect and reset; CapacityExhausted (CAPACITY) if the server has no free session."""
        connection = _Connection(
            _client_class()(
                base_url=self.url,
                connect_timeout_s=self.connect_timeout_s,
                message_timeout_s=self.timeout_s,
            )
        )
        arguments = {"seed": seed, "episode_id": uuid.uuid4().hex} | _facts_of(task)
        try:
            result = await connection.ask("reset", **arguments)
        except Exception as error:
            if _CAPACITY not in f"{error} {connection.parting_code}":
                raise
            raise CapacityExhausted(
                "All sessions of the OpenEnv server are in use.",
                reason=Reason.CAPACITY,
                remedy="Try again later, or raise its max_concurrent_envs.",
            ) from error
        return ForeignReset(place=connection, messages=(self._message(result),))

    async def move(self, place: _Connection, history: History) -> ForeignStep:
        """Step with the action made from the policy's text."""
        action = dict(await call(self.to_action, history[-1].text))
        result = await place.ask("step", action)
        reward = None if result.reward is None else float(result.reward)
        if result.done:
            return ForeignStep(reward=reward, terminated=True)
        return ForeignStep(messages=(self._message(result),), reward=reward)

    async def end(self, place: _Connection) -> None:
        """Close the WebSocket, which ends the server's session."""
        await place.close()

    def _message(self, result: Any) -> Message:
        shown = {k: v for k, v in dict(result.observation).items() if k not in _NOT_SHOWN}
        if self.observation_key:
            chosen = shown[self.observation_key]
            text = chosen if isinstance(chosen, str) else json.dumps(chosen)
        else:
            text = json.dumps(shown)
        if len(text) > self.max_observation:
            raise ValueError(f"an observation has {len(text)} characters; see max_observation")
        return Message(role="user", content=text)


class _Connection:
    """One WebSocket, which the first error closes."""

    def __init__(self, client: Any) -> None:
        self._client: Any = client
        self._is_asking = False
        # Code of the error that the server sent before it closed the connection.
        self.parting_code = ""

    async def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Send a request and return its reply; raise ConnectionError while another is under way."""
        if self._client is None:
            raise ConnectionError("the connection is closed")
        if self._is_asking:
            await self.close()
            raise ConnectionError("a request came while another was under way")
        self._is_asking = True
        try:
            return await getattr(self._client, method)(*arguments, **options)
        except BaseException as error:
            if "ConnectionClosed" in type(error).__name__:
                self.parting_code = await _parting_code(self._client)
            await self.close()
            raise
        finally:
            self._is_asking = False

    async def close(self) -> None:
        """Close the connection for good."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_S):
                    await client.disconnect()


async def _parting_code(client: Any) -> str:
    """Return the code of an unread error frame, since OpenEnv's client sends before it reads."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_S):
            frame = await client._receive()
            return str(frame["data"]["code"])
    return ""


def _facts_of(task: TaskData) -> dict[str, Any]:
    """Return the task's arguments of a reset; servers ignore those that they do not know."""
    facts: dict[str, Any] = {k: v for k, v in task.metadata.items() if k != "seed"}
    return facts | ({"question": task.question} if task.question else {})


def _client_class() -> Any:
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise InvalidConfig(
            "OpenEnv servers need the `openenv-core` package.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop-extras[openenv]"',
        ) from error
    return GenericEnvClient
