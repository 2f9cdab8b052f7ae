"""What installed extras offer: the entry points of the group `dialoop.extras`, by name.

Core, learning and services reach no extra in any other way. Each name is a seam with a type of its
own, which its reader gives:

    agents               mapping of names to `module:attribute`     dialoop.agents
    environments         the same                                   environments.loading
    rest_middleware      type of a Middleware                       dialoop_services.rest
    task_players         mapping of `play` to `module:function`     dialoop_services.collector
    environment_service  `ServeExtra`                              dialoop_services.environment
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from dialoop.errors import InvalidConfig

GROUP: Final = "dialoop.extras"


@cache
def offered(name: str) -> tuple[Any, ...]:
    """Return what each installed package offers under a name; empty without extras."""
    return tuple(point.load() for point in entry_points(group=GROUP, name=name))


@cache
def offered_paths(name: str) -> dict[str, str]:
    """Return the mappings that are offered under a name as one: names to `module:attribute`.

    Raise InvalidConfig for a key that two packages offer.
    """
    paths: dict[str, str] = {}
    for mapping in offered(name):
        if twice := sorted(paths.keys() & mapping.keys()):
            raise InvalidConfig(
                f"Two installed packages offer '{twice[0]}' among {GROUP}'s {name}.",
                remedy="Uninstall one of them.",
            )
        paths |= mapping
    return paths


def more_names(name: str) -> str:
    """Return what a remedy adds where no extra offers names of this kind, or ""."""
    return "" if offered(name) else " More names come with: pip install dialoop-extras."
