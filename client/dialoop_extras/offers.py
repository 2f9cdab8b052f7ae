"""What lower packages find here through the entry points of `dialoop.extras`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

AGENTS: Final[Mapping[str, str]] = MappingProxyType(
    {"verifiers": "dialoop_extras.compat.verifiers:verifiers_agent"}
)
ENVIRONMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "calculator": "dialoop_extras.text_environment.setups:calculator",
        "twenty_questions": "dialoop_extras.games:twenty_questions",
        "verifiers": "dialoop_extras.compat.verifiers:verifiers",
    }
)
TASK_PLAYERS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("trial", "text"), "dialoop_extras.task_players:load_token_player")
)
