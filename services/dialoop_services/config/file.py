"""Reading a job config; every mistake becomes one sentence that names the file and the key."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from dialoop.errors import InvalidConfig
from pydantic import BaseModel, ValidationError

from dialoop_services.config.job import JobConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

_PATHS = {
    "model": ("directory",),
    "environment": ("task_file", "heldout_file"),
    "warm_start": ("file",),
    "scorer": ("reference_model",),
}


def load_config(path: Path, *, environment: Mapping[str, str], run: str = "") -> JobConfig:
    """The config in a TOML file; SEED and `run` override what it says.

    Relative paths in the file are relative to it.
    """
    values = _read(path)
    if environment.get("SEED"):
        values["seed"] = environment["SEED"]
    if run:
        values["run"] = run
    for section, keys in _PATHS.items():
        for key in keys:
            if isinstance(values.get(section), dict) and values[section].get(key):
                values[section][key] = str(path.parent / str(values[section][key]))
    for table in _tables(values.get("environments")):
        for key in _PATHS["environment"]:
            if table.get(key):
                table[key] = str(path.parent / str(table[key]))
    return parse_config(values, source=str(path))


def _tables(found: Any) -> list[dict[str, Any]]:
    """The tables of an array; whatever else stands there is refused by the config itself."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def parse_config(values: dict[str, Any], *, source: str) -> JobConfig:
    """Check the values; InvalidConfig with one sentence about the first thing that is wrong."""
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise _mistake(source, error.errors(include_url=False)[0]) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"The config {path} cannot be read: {getattr(error, 'strerror', None) or error}.",
            remedy="Name a TOML file, as infra/configs/demo.toml.",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{path} is not TOML: {error}.", remedy="Correct that line.") from None


def _mistake(source: str, detail: ErrorDetails) -> InvalidConfig:
    location = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        return _unknown_key(source, location)
    key = ".".join(location) or "the file"
    message = detail["msg"].removeprefix("Value error, ")
    given = detail["input"]
    shown = "" if isinstance(given, (dict, BaseModel)) else f" is {given!r}"
    separator = ": " if shown else ", "
    return InvalidConfig(
        f"{source}, {key}{shown}{separator}{message[0].lower()}{message[1:]}.",
        remedy=f"Correct {key}.",
    )


def _unknown_key(source: str, location: list[str]) -> InvalidConfig:
    *sections, key = [part for part in location if not part.isdecimal()]
    kind: type[BaseModel] = JobConfig
    for section in sections:
        annotation = kind.model_fields[section].annotation
        if get_origin(annotation) is tuple:  # an array of tables
            annotation = get_args(annotation)[0]
        assert isinstance(annotation, type)
        kind = annotation
    known = list(kind.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    where = f" in [{'.'.join(sections)}]" if sections else ""
    return InvalidConfig(
        f"{source} has an unknown key {key!r}{where}{hint}",
        reason="UNKNOWN_KEY",
        remedy=f"Known keys: {', '.join(known)}.",
    )
