"""Read and print a job config. A mistake in it becomes one sentence with the file and the key.

config = load_config(Path("job.toml"), environment=os.environ)
print(toml_of(config))       # num_steps = 50  # Number of train steps; ... Allowed: at least 0.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from pydantic import BaseModel, ValidationError

from dialoop_services.config.derived import DEVICES, LENGTHS, derived_from
from dialoop_services.config.job import SCHEMA, JobConfig
from dialoop_services.config.presets import PRESETS, with_preset
from dialoop_services.config.values import (
    allowed_values,
    did_you_mean,
    resolve_paths,
    table_of,
)
from dialoop_services.runtime.settings import old_import_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails


SET = "--set"
"""Origin of what the command line sets."""
_WORDS = {
    "missing": "it should have so many values",
    "tuple_type": "it should be a list, as [...]",
    "model_type": "it should be a table",
    "dict_type": "it should be a table",
}
"""What pydantic says in Python's words, in those of TOML."""
_EXAMPLES: dict[Any, str] = {str: '"..."', int: "1", float: "1.0", bool: "true"}
STANDARD_INPUT = Path("-")
"""Stands for a config that is read from the standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A value that replaces the file's: the key's path, and where the value is from."""

    path: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config, and where keys not at their default are from: {"train.loss": "job.toml"}.

    Relative paths in the config, and modules that it names, are looked up from `folder`.
    """

    config: JobConfig
    origins: Mapping[str, str]
    folder: Path


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
    folder: Path | None = None,
) -> LoadedConfig:
    """Return the config of a file, or all defaults, under `overrides`, and where values are from.

    SEED and `run` override everything else. Relative paths in the file are relative to `folder`, or
    else to the file. Those in an override, or in a config from the standard input, are relative to
    the current folder.
    """
    here = Path.cwd()
    if folder is None:
        folder = here if path is None or path == STANDARD_INPUT else here / path.parent
    values = {} if path is None else _read(path)
    resolve_paths(values, JobConfig, folder)
    source = "the command line" if path is None else _source_of(path)
    origins = dict.fromkeys(_leaves(values), source)
    last = [
        Override(path="seed", value=environment.get("SEED"), origin="SEED"),
        Override(path="run", value=run, origin="--run"),
    ]
    for override in (*overrides, *(override for override in last if override.value)):
        override_in(values, override)
        origins[override.path] = override.origin
    resolve_paths(values, JobConfig, here)
    preset = values.get("preset", "")
    for leaf in _leaves(PRESETS.get(preset, {}) if isinstance(preset, str) else {}):
        origins.setdefault(leaf, f"preset {preset}")
    origins |= {path: each.source for path, each in derived_from(with_preset(values)).items()}
    config = parse_config(values, source=source, origins=origins)
    return LoadedConfig(config=config, origins=origins, folder=folder)


def overrides_of_words(words: Iterable[str]) -> list[Override]:
    """Return what `--set KEY=VALUE` says; VALUE is a value of TOML, or text where it is none.

    Raises InvalidConfig for a word that is not KEY=VALUE.
    """
    overrides = []
    for word in words:
        path, equals, text = word.partition("=")
        path = path.strip()
        if not (equals and path and all(path.split("."))):
            raise InvalidConfig(
                f"--set {word} is not KEY=VALUE.",
                remedy="Write it as --set train.learning_rate=1e-5.",
            )
        overrides.append(Override(path=path, value=_value_of(text), origin=SET))
    return overrides


def _value_of(text: str) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def override_in(values: dict[str, Any], override: Override) -> None:
    """Set one value in a mapping of tables; InvalidConfig where the path leads through a value."""
    *tables, key = override.path.split(".")
    for table in tables:
        inner = values.setdefault(table, {})
        if not isinstance(inner, dict):
            raise InvalidConfig(
                f"{override.origin} sets {override.path}, and {table} is no table here.",
                remedy=f"Set {table} as a whole.",
            )
        values = inner
    values[key] = override.value


def parse_config(
    values: dict[str, Any], *, source: str, origins: Mapping[str, str] | None = None
) -> JobConfig:
    """Return the checked config; InvalidConfig names the first mistake in one sentence.

    It names the origin of the key, or else the source.
    """
    old = old_import_in(values)
    if old:
        raise InvalidConfig(f"{source}: {old}.", remedy="Use the new name.")
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # What is missing may be there under a mistyped name, so it is said last.
        detail = next((each for each in details if each["type"] != "missing"), details[0])
        key = ".".join(str(part) for part in detail["loc"])
        raise _mistake(_source_of_key(key, origins or {}) or source, detail) from None


def _source_of_key(key: str, origins: Mapping[str, str]) -> str:
    """Return where a key is from, or all that was set in a table of its name; "" for several."""
    below = {origin for path, origin in origins.items() if path.startswith(f"{key}.")}
    return origins.get(key) or (below.pop() if len(below) == 1 else "")


def toml_of(
    config: JobConfig, origins: Mapping[str, str] | None = None, *, whole: bool = True
) -> str:
    """Return the config as TOML, with the meaning of each key in a comment.

    A key without a value is commented out. With `origins` the comments say where values are from.
    Unless `whole`, only keys that differ from their defaults are there, without comments.
    """
    if not whole:  # the values of a preset are written out
        plain = config.model_copy(update={"preset": ""})
        # Left out, these would follow from the model.
        kept = LENGTHS if config.model.directory else ()
        return "\n".join(_bare_lines(plain, "", kept)).strip() + "\n"
    head = f"schema = {SCHEMA}  # Version of this file's keys."
    return "\n".join([head, *_lines(config, "", origins)]) + "\n"


def chosen_values(loaded: LoadedConfig) -> list[str]:
    """Return the sizes and devices that a job has, each with where it is from."""
    config, lines = loaded.config, []
    rows = config.train.row_tokens(config.inference.max_model_len)
    for path in (*LENGTHS, "train.max_row_tokens", *DEVICES):
        table, key = path.split(".")
        value, source = getattr(getattr(config, table), key), _origin_of(path, loaded.origins)
        if value is None:
            value, source = rows, "max_model_len, or 1024 if more"
        is_used = config.engine == "vllm" or path != "inference.kv_cache_mib"
        lines += [f"{path} = {toml_value(value)} ({source})"] if is_used else []
    return lines


def _bare_lines(section: BaseModel, path: str, kept: Collection[str]) -> list[str]:
    """Return a section's keys that differ or are `kept`, then the sections inside it."""
    lines, inside = [], []
    for name, field in type(section).model_fields.items():
        value, table = getattr(section, name), f"{path}.{name}" if path else name
        is_default = value == field.get_default(call_default_factory=True)
        if is_default and not any(f"{key}.".startswith(f"{table}.") for key in kept):
            continue
        if isinstance(value, BaseModel):
            below = _bare_lines(value, table, kept)
            inside += (["", f"[{table}]"] if below[0][:1] not in ("", "[") else []) + below
        else:
            skips = not is_default  # of the keys in a table of its own
            plain = section.model_dump(mode="json", include={name}, exclude_defaults=skips)[name]
            lines.append(f"{name} = {toml_value(plain)}")
    return lines + inside


def read_values(path: Path) -> dict[str, Any]:
    """Return what a TOML file says, with its relative paths made absolute."""
    values = _read(path)
    resolve_paths(values, JobConfig, Path.cwd() / path.parent)
    return values


def _source_of(path: Path) -> str:
    return "the standard input" if path == STANDARD_INPUT else str(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"The config {path} cannot be read: {getattr(error, 'strerror', None) or error}.",
            remedy="Name a TOML file, such as infra/configs/demo.toml.",
        ) from None
    return values_in(text, str(path))


def values_in(text: str, source: str) -> dict[str, Any]:
    """Return what TOML says; InvalidConfig where it is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(
            f"{source} is not valid TOML: {error}.", remedy="Correct that line."
        ) from None


def _leaves(values: Mapping[str, Any], path: str = "") -> list[str]:
    leaves = []
    for name, value in values.items():
        inner = f"{path}.{name}" if path else name
        leaves += _leaves(value, inner) if isinstance(value, dict) and value else [inner]
    return leaves


def _mistake(source: str, detail: ErrorDetails) -> InvalidConfig:
    """Return pydantic's finding as a sentence, with what to write instead."""
    kind, value = detail["type"], detail["input"]
    table, path, field = _place_of(detail["loc"])
    if kind == "extra_forbidden":
        return _unknown_key(source, table, [part for part in path if not part.isdecimal()])
    key, name = ".".join(path) or "the file", path[-1] if path else ""
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error" or field is None:
        remedy = f"Correct {key}."
    else:
        message = _WORDS.get(kind, message)
        remedy = f"Correct {key}. {_meaning_of(field)}"
    if kind == "missing" and isinstance(value, dict) and field is not None:
        example = _EXAMPLES.get(field.annotation, "...")
        where = f" in {'.'.join(path[:-1])}"
        return InvalidConfig(
            f"{source} has no {name}{where}.",
            remedy=f"Add {name} = {example}. {_meaning_of(field)}",
        )
    shown = "" if isinstance(value, (dict, BaseModel)) else f" is {value!r}"
    separator = ": " if shown else ", "
    return InvalidConfig(
        f"{source}, {key}{shown}{separator}{message[0].lower()}{message[1:]}.", remedy=remedy
    )


def _place_of(
    location: tuple[int | str, ...],
) -> tuple[type[BaseModel], list[str], FieldInfo | None]:
    """Return the table, the path and the field of a place; field None where it is no key of ours.

    What follows a key in a place of pydantic is a part of its value, or a kind that it may have.
    """
    table: type[BaseModel] = JobConfig
    path: list[str] = []
    field: FieldInfo | None = None
    for place, part in enumerate(location):
        path.append(str(part))
        if isinstance(part, int):
            continue
        field = table.model_fields.get(part)
        inner = None if field is None else table_of(field)
        if inner is None:
            is_open = field is not None and get_origin(field.annotation) is dict
            path += [str(p) for p in location[place + 1 :] if is_open or isinstance(p, int)]
            break
        table = inner
    return table, path, field


def _unknown_key(source: str, table: type[BaseModel], path: list[str]) -> InvalidConfig:
    *sections, key = path
    keys = list(table.model_fields)
    near = did_you_mean(key, keys).strip()
    hint = f"; {near}" if near else "."
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
        meaning = _meaning_of(field)
        if isinstance(value, BaseModel):
            title = f"[{inner}]  # {(type(value).__doc__ or '').strip().splitlines()[0]}"
            inside += ["", title, *_lines(value, inner, origins)]
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for table in value:
                inside += ["", f"[[{inner}]]  # {meaning}", *_lines(table, inner, origins)]
        else:
            assignment = f"# {name} =" if value is None else f"{name} = {toml_value(value)}"
            comment = meaning if origins is None else _origin_of(inner, origins)
            lines.append(f"{assignment}  # {comment}")
    return lines + inside


def _meaning_of(field: FieldInfo) -> str:
    """Return the meaning of a key, and what it may be."""
    meaning = " ".join((field.description or "").split())
    allowed = allowed_values(field)
    return f"{meaning} Allowed: {allowed}." if allowed else meaning


def _origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Return where a key is from, or the table or mapping around or below it."""
    near = (o for p, o in origins.items() if p == path or path.startswith(f"{p}."))
    below = (o for p, o in origins.items() if p.startswith(f"{path}."))
    return next(near, None) or next(below, "default")


def toml_value(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
