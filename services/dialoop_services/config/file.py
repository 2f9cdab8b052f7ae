"""Read and print a job config. A mistake in it becomes one sentence with the file and the key.

config = load_config(Path("job.toml"), environment=os.environ)
print(toml_of(config))       # engine = "vllm"  # Engine that samples: "vllm" or "transformers".
"""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from pydantic import BaseModel, ValidationError

from dialoop_services.config.job import SCHEMA, JobConfig
from dialoop_services.runtime.settings import old_import_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

_PATHS = {
    "model": ("directory",),
    "environment": ("task_file", "heldout_file"),
    "warm_start": ("file",),
    "scorer": ("reference_model",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A value that replaces the file's: the key's path, and where the value is from."""

    path: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config, and where keys not at their default are from: {"train.loss": "job.toml"}."""

    config: JobConfig
    origins: Mapping[str, str]


def load_config(path: Path, *, environment: Mapping[str, str], run: str = "") -> JobConfig:
    """Return the config in a TOML file; SEED and `run` override what it says.

    Relative paths in the file are relative to it. InvalidConfig names the first mistake.
    """
    return load_with_origins(path, environment=environment, run=run).config


def load_with_origins(
    path: Path | None,
    *,
    environment: Mapping[str, str],
    run: str = "",
    overrides: Iterable[Override] = (),
) -> LoadedConfig:
    """Return the config of a file, or all defaults, under `overrides`, and where values are from.

    SEED and `run` override everything else.
    """
    values = {} if path is None else _read(path)
    source = "the command line" if path is None else str(path)
    origins = dict.fromkeys(_leaves(values), source)
    last = [
        Override(path="seed", value=environment.get("SEED"), origin="SEED"),
        Override(path="run", value=run, origin="--run"),
    ]
    for override in (*overrides, *(override for override in last if override.value)):
        override_in(values, override)
        origins[override.path] = override.origin
    return LoadedConfig(config=parse_config(values, source=source), origins=origins)


def override_in(values: dict[str, Any], override: Override) -> None:
    """Set one value in a mapping of tables."""
    *tables, key = override.path.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[key] = override.value


def parse_config(values: dict[str, Any], *, source: str) -> JobConfig:
    """Return the checked config; InvalidConfig names the first mistake in one sentence."""
    old = old_import_in(values)
    if old:
        raise InvalidConfig(f"{source}: {old}.", remedy="Use the new name.")
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise _mistake(source, error.errors(include_url=False)[0]) from None


def toml_of(config: JobConfig, origins: Mapping[str, str] | None = None) -> str:
    """Return the whole config as TOML, with the meaning of each key in a comment.

    A key without a value is commented out. With `origins` the comments say where values are from.
    """
    head = f"schema = {SCHEMA}  # Version of this file's keys."
    return "\n".join([head, *_lines(config, "", origins)]) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"The config {path} cannot be read: {getattr(error, 'strerror', None) or error}.",
            remedy="Name a TOML file, such as infra/configs/demo.toml.",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(
            f"{path} is not valid TOML: {error}.", remedy="Correct that line."
        ) from None
    for section, keys in _PATHS.items():
        for table in (*_tables([values.get(section)]), *_tables(values.get(f"{section}s"))):
            for key in keys:
                if table.get(key):
                    table[key] = str(path.parent / str(table[key]))
    return values


def _tables(value: Any) -> list[dict[str, Any]]:
    """Return the tables of an array; JobConfig refuses anything else in that place."""
    return [t for t in value if isinstance(t, dict)] if isinstance(value, list) else []


def _leaves(values: Mapping[str, Any], path: str = "") -> list[str]:
    leaves = []
    for name, value in values.items():
        inner = f"{path}.{name}" if path else name
        leaves += _leaves(value, inner) if isinstance(value, dict) and value else [inner]
    return leaves


def _mistake(source: str, detail: ErrorDetails) -> InvalidConfig:
    location = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        return _unknown_key(source, location)
    key = ".".join(location) or "the file"
    message = detail["msg"].removeprefix("Value error, ")
    value = detail["input"]
    shown = "" if isinstance(value, (dict, BaseModel)) else f" is {value!r}"
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
    keys = list(kind.model_fields)
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    where = f" in [{'.'.join(sections)}]" if sections else ""
    return InvalidConfig(
        f"{source} has an unknown key {key!r}{where}{hint}",
        reason=Reason.UNKNOWN_KEY,
        remedy=f"Known keys: {', '.join(keys)}.",
    )


def _lines(section: BaseModel, path: str, origins: Mapping[str, str] | None) -> list[str]:
    """Return a section's own keys, then the sections inside it, in the order that TOML needs."""
    lines, inside = [], []
    for name, field in type(section).model_fields.items():
        value, inner = getattr(section, name), f"{path}.{name}" if path else name
        meaning = " ".join((field.description or "").split())
        if isinstance(value, BaseModel):
            title = f"[{inner}]  # {(type(value).__doc__ or '').strip().splitlines()[0]}"
            inside += ["", title, *_lines(value, inner, origins)]
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for table in value:
                inside += ["", f"[[{inner}]]  # {meaning}", *_lines(table, inner, origins)]
        else:
            assignment = f"# {name} =" if value is None else f"{name} = {_text(value)}"
            comment = meaning if origins is None else _origin_of(inner, origins)
            lines.append(f"{assignment}  # {comment}")
    return lines + inside


def _origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Return where a key is from, or the table or mapping around or below it."""
    near = (o for p, o in origins.items() if p == path or path.startswith(f"{p}."))
    below = (o for p, o in origins.items() if p.startswith(f"{path}."))
    return next(near, None) or next(below, "default")


def _text(value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)} = {_text(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
