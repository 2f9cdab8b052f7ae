"""What lower packages find here through the entry points of `dialoop.extras`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop_services.environment.serving import ServedEnvironments

AGENTS: Final[Mapping[str, str]] = MappingProxyType(
    {"verifiers": "dialoop_extras.compat.verifiers:verifiers_agent"}
)
ENVIRONMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "calculator": "dialoop_extras.text_environment.setups:calculator",
        "messages": "dialoop_extras.importers.messages:messages",
        "trl": "dialoop_extras.importers.trl:trl",
        "twenty_questions": "dialoop_extras.games:twenty_questions",
        "verifiers": "dialoop_extras.compat.verifiers:verifiers",
        "verl": "dialoop_extras.importers.verl:verl",
    }
)
TASK_PLAYERS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("trial", "text"), "dialoop_extras.task_players:load_token_player")
)


@asynccontextmanager
async def serve_environments(served: ServedEnvironments) -> AsyncIterator[None]:
    """Add to the environment service what is here: whole runs, and OpenEnv's protocol."""
    from dialoop_extras.services.openenv_server import serve_openenv
    from dialoop_extras.services.run_servicer import serve_runs

    async with serve_runs(served), serve_openenv(served):
        yield
