"""The parameters of a function: their JSON schema, and the check and conversion of arguments.

It imports pydantic, so other modules import it only when a tool is declared.
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

from dialoop.environments.episode import Episode
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.user_functions import name_of


class Arguments:
    """A function's parameters; InvalidConfig (TOOL_UNANNOTATED) if JSON cannot express one.

    A parameter without a type takes any value, and `**options` takes further arguments. One of type
    `Episode` gets the running episode; the policy does not see it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        called = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(called, include_extras=True)
        fields: dict[str, Any] = {}
        self.episode_parameters: tuple[str, ...] = ()
        takes_more = False
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise _unusable(function, f"takes '{name}' by position alone")
            hint = hints.get(name, Any)
            if parameter.kind is parameter.VAR_KEYWORD:
                takes_more = True
            elif hint is Episode:
                self.episode_parameters += (name,)
            else:
                is_required = parameter.default is parameter.empty
                fields[name] = hint if is_required else NotRequired[hint]
        # A TypedDict leaves absent arguments out, so that the function's own defaults hold.
        make: Any = TypedDict  # mypy cannot know the fields
        kind = make("Arguments", fields)
        kind.__pydantic_config__ = ConfigDict(
            extra="allow" if takes_more else "forbid", strict=True
        )
        try:
            self._adapter = TypeAdapter(kind)
            plain_schema = self._adapter.json_schema(schema_generator=_PlainSchema)
        except PydanticUserError as error:
            why = str(error).partition("\n")[0]
            raise _unusable(function, f"has a type that JSON cannot express: {why}") from error
        self.schema: dict[str, Any] = {
            "type": "object",
            "properties": plain_schema["properties"] if fields else {},
            "required": plain_schema.get("required", []),
            "additionalProperties": takes_more,
            **({"$defs": plain_schema["$defs"]} if "$defs" in plain_schema else {}),
        }

    def convert(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function's types; ToolInputError names a wrong one."""
        try:
            # Validate as JSON, so that "2" is not a number and a list can be a tuple.
            converted = self._adapter.validate_json(json.dumps(arguments))
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            where = ".".join(map(str, wrong["loc"])) or "s"
            what = wrong["msg"][:1].lower() + wrong["msg"][1:]
            raise ToolInputError(f"argument {where}: {what}.") from error
        kept: dict[str, Any] = _keep_whole_numbers(converted, arguments)
        return kept


def _keep_whole_numbers(converted: Any, original: Any) -> Any:
    """Return the converted value, but with an int where the caller passed one for a float."""
    if type(converted) is float and type(original) is int:
        return original
    if type(converted) is list:
        pairs = zip(converted, original, strict=True)
        return [_keep_whole_numbers(new, old) for new, old in pairs]
    if type(converted) is dict and isinstance(original, Mapping):
        return {key: _keep_whole_numbers(new, original.get(key)) for key, new in converted.items()}
    return converted


class _PlainSchema(GenerateJsonSchema):
    """Short schemas for a prompt: the type first, and no titles."""

    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        plain: dict[str, Any] = _without_titles(super().generate(schema, mode))
        return plain

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        values = (v.value if isinstance(v, Enum) else v for v in schema["expected"])
        return {"enum": list(values)}

    def list_schema(self, schema: Any) -> dict[str, Any]:
        plain = super().list_schema(schema)
        return plain if plain.get("items") else {"type": "array"}

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        return {"type": "object"}


def _without_titles(schema: Any) -> Any:
    """Return the schema without titles, but keep properties with the name `title`."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(each) for name, each in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title"
    }


def _unusable(function: Callable[..., Any], why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The tool {name_of(function)} {why}.",
        reason=Reason.TOOL_UNANNOTATED,
        remedy="Let each parameter have a name, and a type that JSON can express: str, int, float, "
        "bool, list, dict, Literal, None, an Enum, a dataclass, a TypedDict or a pydantic model.",
    )
