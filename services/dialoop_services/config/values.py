"""Say what a key of the job file may be, for its check and for `dialoop config print`.

loss: Annotated[str, AfterValidator(NameOf("loss", LOSSES))]       # "grop": did you mean 'grpo'?
file: FilePath = ""                                                # relative to the config's folder
allowed_values(TrainSection.model_fields["mode"])                  # 'one of "rl", "sft"'
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from dialoop.import_paths import nearest
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pydantic.fields import FieldInfo

_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


class Section(BaseModel):
    """A table of the job file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _require_numbers(cls, values: Any) -> Any:
        """Refuse true and false where a number is meant: pydantic takes them for 1 and 0."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and not _takes(bool, field.annotation):
                meaning = (field.description or "").removesuffix(".")
                raise ValueError(f"{name} is {str(value).lower()}, which it cannot be: {meaning}")
        return values


@dataclass(frozen=True, slots=True)
class NameOf:
    """Accept the name of something built in, or the import path of the user's own."""

    what: str
    built_in: Collection[str]
    own: str = "module:function"

    def __call__(self, name: str) -> str:
        """Return the name; ValueError with the nearest built-in one if it is neither."""
        module, _, attribute = name.partition(":")
        if name in self.built_in or (module and attribute):
            return name
        raise ValueError(
            f"there is no such {self.what}; {did_you_mean(name, self.built_in)}"
            f"Use {', '.join(self.built_in)} or the import path of your own, {self.own}"
        )

    def __str__(self) -> str:
        names = ", ".join(map(json.dumps, self.built_in))
        return f'one of {names}, or your own as "{self.own}"'


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return "did you mean 'grpo'? " where one of the names is near, else an empty text."""
    near = nearest(name, names)
    return f"did you mean {near!r}? " if near else ""


@dataclass(frozen=True, slots=True)
class _IsPath:
    """Marks a key whose value is a file or a folder."""


FilePath = Annotated[str, _IsPath()]
"""A file or a folder; a relative one is looked up from the folder of the config."""


def resolve_paths(values: dict[str, Any], model: type[BaseModel], folder: Path) -> None:
    """Make the relative paths in the values of a table, and of tables in it, absolute."""
    for table, name, _ in _paths(values, model, ""):
        table[name] = str(folder / table[name])


def paths_in(section: BaseModel) -> dict[str, Path]:
    """Return the files and folders that a table names, and tables in it, by their keys."""
    paths = _paths(section.model_dump(), type(section), "")
    return {path: Path(table[name]) for table, name, path in paths}


def _paths(
    values: dict[str, Any], model: type[BaseModel], path: str
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each file or folder: the table that names it, its key there, and the whole key."""
    for name, field in model.model_fields.items():
        value, inner = values.get(name), table_of(field)
        if value and isinstance(value, str) and any(isinstance(m, _IsPath) for m in field.metadata):
            yield values, name, f"{path}{name}"
        for table in value if isinstance(value, (list, tuple)) else [value]:
            if inner is not None and isinstance(table, dict):
                yield from _paths(table, inner, f"{path}{name}.")


def _takes(kind: type, annotation: Any) -> bool:
    """Return whether a key's annotation is of a kind, or anything."""
    inner = get_args(annotation)
    return annotation in (kind, Any) or any(_takes(kind, each) for each in inner)


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a key that may be a table or an array of tables, else None."""
    annotation = field.annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def allowed_values(field: FieldInfo) -> str:
    """Return what a key may be besides its type: its choices or bounds; empty if anything."""
    for extra in field.metadata:
        if isinstance(extra, AfterValidator) and isinstance(extra.func, NameOf):
            return str(extra.func)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if choices:
        return f"one of {', '.join(map(json.dumps, choices))}"
    bounds = [
        f"{words} {getattr(extra, name):g}"
        for kind, name, words in _BOUNDS
        for extra in field.metadata
        if isinstance(extra, kind)
    ]
    return " and ".join(bounds)
