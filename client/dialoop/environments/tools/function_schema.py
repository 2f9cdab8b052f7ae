"""The parameters of a function: their JSON schema, and arguments checked and converted by it.

Imported when a tool is declared, and not before: it brings pydantic.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from dialoop.environments.tools.calling import name_of
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason


class Arguments:
    """What a function takes; InvalidConfig (TOOL_UNANNOTATED) when JSON cannot say it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        called = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(called, include_extras=True)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise _unusable(function, f"takes *{name}")
            if name not in hints:
                raise _unusable(function, f"has no type on '{name}'")
            is_required = parameter.default is parameter.empty
            fields[name] = hints[name] if is_required else NotRequired[hints[name]]
        # A TypedDict says which were given, so that the function's own defaults hold.
        make: Any = TypedDict  # of fields that only this function knows
        kind = make("Arguments", fields)
        kind.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
        try:
            self._adapter = TypeAdapter(kind)
            given = self._adapter.json_schema(schema_generator=_PlainSchema)
        except PydanticUserError as error:
            why = str(error).partition("\n")[0]
            raise _unusable(function, f"has a type that JSON has no word for: {why}") from error
        self.schema: dict[str, Any] = {
            "type": "object",
            "properties": given["properties"] if fields else {},
            "required": given.get("required", []),
            "additionalProperties": False,
            **({"$defs": given["$defs"]} if "$defs" in given else {}),
        }

    def converted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function's types; ToolInputError names the wrong one."""
        try:
            # As JSON, so that "2" is no number, and a list may well be a tuple.
            converted = self._adapter.validate_json(json.dumps(arguments))
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            where = ".".join(map(str, wrong["loc"])) or "s"
            what = wrong["msg"][:1].lower() + wrong["msg"][1:]
            raise ToolInputError(f"argument {where}: {what}.") from error
        kept: dict[str, Any] = _whole_numbers_kept(converted, arguments)
        return kept


def _whole_numbers_kept(converted: Any, given: Any) -> Any:
    """Return the converted value with 2 where 2 was given for a float, as a call by hand would."""
    if type(converted) is float and type(given) is int:
        return given
    if type(converted) is list:
        pairs = zip(converted, given, strict=True)
        return [_whole_numbers_kept(new, old) for new, old in pairs]
    if type(converted) is dict and isinstance(given, Mapping):
        return {key: _whole_numbers_kept(new, given.get(key)) for key, new in converted.items()}
    return converted


class _PlainSchema(GenerateJsonSchema):
    """Schemas as short as a prompt wants them: the type first, and no titles."""

    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        untitled: dict[str, Any] = _untitled(super().generate(schema, mode))
        return untitled

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        values = (v.value if isinstance(v, Enum) else v for v in schema["expected"])
        return {"enum": list(values)}

    def list_schema(self, schema: Any) -> dict[str, Any]:
        found = super().list_schema(schema)
        return found if found.get("items") else {"type": "array"}

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        return {"type": "object"}


def _untitled(schema: Any) -> Any:
    """Return the schema without titles, except of properties that are called so."""
    if isinstance(schema, list):
        return [_untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _untitled(each) for name, each in value.items()}
        if key in ("properties", "$defs")
        else _untitled(value)
        for key, value in schema.items()
        if key != "title"
    }


def _unusable(function: Callable[..., Any], why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The tool {name_of(function)} {why}.",
        reason=Reason.TOOL_UNANNOTATED,
        remedy="Annotate each parameter with a type that JSON can say: str, int, float, bool, "
        "list, dict, Literal, None, an Enum, a dataclass, a TypedDict or a pydantic model.",
    )
