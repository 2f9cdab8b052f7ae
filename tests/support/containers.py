"""Reads docker-compose.yml and the Dockerfile, so that tests can run what they say without them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
GPU = ROOT / "infra" / "docker" / "gpu.yml"
DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"

# The innermost ${...} first, so that defaults may hold others.
_VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?:(?P<kind>:[-+])(?P<rest>[^${}]*))?\}")


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Replace `${NAME}` with `:-default` or `:+instead` as compose does; `$$` is `$`."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match["name"], match["kind"], match["rest"]
        if kind == ":+":
            return (rest or "") if variables.get(name) else ""
        if variables.get(name):
            return variables[name]
        return rest or ""

    while (replaced := _VARIABLE.sub(value, text)) != text:
        text = replaced
    return text.replace("$$", "$")


def compose_file(file: Path = COMPOSE, **variables: str) -> dict[str, Any]:
    """A compose file as compose reads it with these variables set."""

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return interpolate(node, variables) if isinstance(node, str) else node

    read: dict[str, Any] = walk(yaml.safe_load(file.read_text("utf-8")))
    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One stage of the Dockerfile with all it is built from, oldest instruction first."""

    name: str
    instructions: tuple[tuple[str, str], ...]

    def all_of(self, kind: str) -> list[str]:
        """The arguments of every instruction of one kind."""
        return [text for name, text in self.instructions if name == kind]

    def last(self, kind: str) -> str:
        """The one that counts where the last wins: CMD, USER, HEALTHCHECK."""
        return self.all_of(kind)[-1]

    @property
    def lists(self) -> list[str]:
        """The lists of infra/requirements/locked whose packages it installs."""
        return re.findall(r"-r locked/([\w-]+)\.txt", " ".join(self.all_of("RUN")))

    @property
    def variables(self) -> dict[str, str]:
        """What ENV sets."""
        pairs = (word.partition("=") for line in self.all_of("ENV") for word in shlex.split(line))
        return {name: value for name, _, value in pairs}

    @property
    def command(self) -> list[str]:
        """CMD, word by word."""
        words: list[str] = json.loads(self.last("CMD"))
        return words

    @property
    def probe(self) -> list[str]:
        """The command of HEALTHCHECK, word by word."""
        words: list[str] = json.loads(self.last("HEALTHCHECK").partition(" CMD ")[2])
        return words


def targets() -> dict[str, Target]:
    """Every stage by its name."""
    stages: dict[str, list[tuple[str, str]]] = {}
    own: list[tuple[str, str]] = []
    for kind, text in _instructions():
        if kind == "FROM":
            parent, _, name = text.partition(" AS ")
            own = stages[name] = list(stages.get(parent, ()))
        own.append((kind, text))
    return {name: Target(name=name, instructions=tuple(own)) for name, own in stages.items()}


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    split = (line.partition(" ") for line in lines if line.strip())
    return [(kind, rest.strip()) for kind, _, rest in split]
