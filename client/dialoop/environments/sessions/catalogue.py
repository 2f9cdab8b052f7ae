"""The environments that sessions can play, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dialoop.environments import Environment, refusals
from dialoop.errors import InvalidConfig


class Catalogue:
    """Environments by name, fixed from the start."""

    def __init__(self, environments: Iterable[Environment]) -> None:
        self._by_name: dict[str, Environment] = {}
        for environment in environments:
            if environment.name in self._by_name:
                raise InvalidConfig(
                    f"Two environments are named '{environment.name}'.",
                    remedy="Give one of them another name.",
                )
            self._by_name[environment.name] = environment

    def get(self, name: str) -> Environment:
        """Return the environment with this name; NotFound (ENVIRONMENT_NOT_FOUND)."""
        if name not in self._by_name:
            raise refusals.unknown_environment(name, self._by_name)
        return self._by_name[name]

    def __iter__(self) -> Iterator[Environment]:
        return iter(self._by_name.values())
