"""Serve an echo with openenv-core, as its own echo environment; environment_doors runs it.

PYTHON_WITH_OPENENV benchmarks/servers/openenv_echo.py PORT
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State


class EchoAction(Action):
    """What to echo."""

    message: str


class EchoObservation(Observation):
    """The echo."""

    echoed_message: str
    message_length: int = 0


class EchoEnvironment(Environment):
    """Echoes, with a reward for long messages."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="e", step_count=0)

    def reset(self, *_: Any, **__: Any) -> EchoObservation:
        """Begin."""
        self._state = State(episode_id="e", step_count=0)
        return EchoObservation(echoed_message="ready", done=False, reward=0.0)

    def step(self, action: EchoAction, *_: Any, **__: Any) -> EchoObservation:
        """Echo."""
        self._state.step_count += 1
        length = len(action.message)
        return EchoObservation(
            echoed_message=action.message, message_length=length, done=False, reward=length * 0.1
        )

    @property
    def state(self) -> State:
        """How far it is."""
        return self._state


def main() -> None:
    """Serve until killed."""
    concurrency = ConcurrencyConfig(max_concurrent_envs=64, session_timeout=None)
    app = create_fastapi_app(
        EchoEnvironment, EchoAction, EchoObservation, concurrency_config=concurrency
    )
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)


if __name__ == "__main__":
    main()
