"""The keys of another trainer's config: which became ours, and why the others did not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dialoop.environments.tasks.files import joined_rows
from dialoop.errors import DialoopError
from dialoop_services.config.values import did_you_mean

To = str | tuple[str, Callable[[Any], Any]]
"""Our key, and perhaps what makes its value; ValueError from that is why the key is left out."""

_NONE = "it is not set"


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the packages' defaults and versions, as infra/foreign_defaults.py read them."""
    content: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("defaults.json").read_text("utf-8")
    )
    return content


@dataclass(slots=True, kw_only=True)
class ForeignKeys:
    """Keys by their dotted names. `take` reads one; what nobody takes is left out.

    given: what the file says. defaults: what the other package takes for all else. title: of the
    config. folder: where the file's relative paths begin. to_fill_in, assumed: our keys, and why.
    """

    given: dict[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    folder: Path = field(default_factory=Path)
    mapped: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, tuple[Any, str]] = field(default_factory=dict)
    to_fill_in: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(init=False)
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.values = {**self.defaults, **self.given}

    def take(self, name: str, default: Any = None) -> Any:
        """Return a key's value, which counts as read; the default where it is absent or null."""
        self._taken.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: Any = None) -> Any:
        """Return a key's number, as `take`; what is none is left out, and the default stands.

        The default is the package's, where it has one.
        """
        known = self.defaults.get(name)
        default = known if isinstance(known, (int, float)) else default
        value = self.take(name, default)
        if value is None or isinstance(value, (int, float)):
            return value
        self.leave(name, f"it is no number; {default} stands in its place")
        return default

    def leave(self, name: str, reason: str) -> None:
        """Say why a key, or what stands for it where the file has none, is not mapped."""
        if name in self.values:
            self._taken.add(name)
            self.left_out[name] = (self.values[name], reason)

    def map(self, table: Mapping[str, To]) -> None:
        """Map keys one by one, as a table says."""
        for name, to in table.items():
            if self.values.get(name) is None:
                continue
            path, make = (to, None) if isinstance(to, str) else to
            value = self.take(name)
            try:
                if isinstance(value, str) and "${" in value:
                    raise ValueError("it is an expression, whose value only its own program knows")
                self.mapped[path] = value if make is None else make(value)
            except (ValueError, TypeError) as error:
                self.leave(name, str(error))

    def map_options_of_vllm(self, table: Mapping[str, str]) -> None:
        """Map keys to vLLM's own options, where vLLM samples; the engine must be mapped before."""
        if self.mapped.get("engine", "vllm") == "vllm":
            self.map({name: f"inference.engine.{option}" for name, option in table.items()})
        for name in table.keys() & self.given.keys() - self._taken:
            self.leave(name, "it is an option of vLLM, and transformers samples here")

    def num_rows(self, files: Any, split: str = "train") -> int | None:
        """Return how many rows the files have; None where they cannot be read here."""
        names = [files] if isinstance(files, str) else files or []
        try:
            return len(joined_rows([self.folder / name for name in names], split=split)) or None
        except (DialoopError, TypeError):
            return None

    def finish(self, reasons: Mapping[str, str], otherwise: str) -> ForeignKeys:
        """Leave out the rest of the file: each for the reason of the longest name it begins with.

        A key that the package does not have is named as such.
        """
        for name, value in self.given.items():
            if name in self._taken:
                continue
            near = [start for start in reasons if name == start or name.startswith(f"{start}.")]
            reason = reasons[max(near, key=len)] if near else otherwise
            is_known = any(f"{name}.".startswith(f"{key}.") for key in self.defaults)
            if not near and not is_known:
                hint = did_you_mean(name, self.defaults)
                reason = f"{self.title} has no such key; {hint}".rstrip("; ")
            self.left_out[name] = (value, _NONE if value is None and not near else reason)
        return self


def steps_of_epochs(keys: ForeignKeys, epochs: float, rows: int | None, a_step: int) -> None:
    """Map a number of epochs to train steps of whole batches; to be filled in for unknown rows."""
    if rows is None:
        keys.to_fill_in["train.num_steps"] = (
            f"it is {epochs:g} epochs of (rows of the data // {a_step}) steps, and the rows cannot "
            "be counted here"
        )
        return
    keys.mapped["train.num_steps"] = max(1, math.ceil(epochs * (rows // a_step)))


def whole(value: Any) -> int:
    """Return a whole number; ValueError for anything else."""
    if not isinstance(value, int):
        raise ValueError("it is no whole number, and Dialoop keeps its default")
    return value


def positive(value: Any) -> int:
    """Return a number of steps; ValueError for 0 and -1, which turn something off elsewhere."""
    if not isinstance(value, (int, float)) or value < 1:
        raise ValueError("it is turned off, and Dialoop keeps its default")
    return int(value)


def choice(options: Mapping[Any, Any], meaning: str) -> Callable[[Any], Any]:
    """Return a function from another trainer's choices to ours."""

    def make(value: Any) -> Any:
        if value not in options:
            raise ValueError(f"Dialoop has no such {meaning}")
        return options[value]

    return make


def run_name(value: Any) -> str:
    """Return a name that a run's directory may have."""
    last = str(value).rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-._")[:64]
    if not name:
        raise ValueError("it is no name for a directory")
    return name


def trackers_in(keys: ForeignKeys, name: str) -> None:
    """Map a list of trackers to the ones that Dialoop has."""
    value = keys.take(name, ())
    for tracker in [value] if isinstance(value, str) else value:
        if tracker in ("wandb", "tensorboard", "trackio"):
            keys.mapped[f"trackers.{tracker}"] = True
        elif tracker not in ("console", "none"):
            keys.leave(name, f"Dialoop has no tracker {tracker}; [trackers] use names your own")
