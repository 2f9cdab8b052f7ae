"""Python functions as tools of chat models: a JSON schema from their annotations.

def search(query: str, limit: int = 3) -> str:
    '''Search the library.'''

FunctionTool(search).definition.parameters_json
# {"type": "object", "properties": {"query": {"type": "string"}, ...}, "required": ["query"]}
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from dialoop.chat import ToolDefinition
from dialoop.environments.tools.calling import call, name_of
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.errors import InvalidConfig

_SIMPLE: Mapping[Any, str] = types.MappingProxyType(
    {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
)
_CHECKS: Mapping[str, tuple[type, ...]] = types.MappingProxyType(
    {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "array": (list,),
        "object": (dict,),
        "null": (type(None),),
    }
)


class ArgumentTool(Protocol):
    """A tool that takes named arguments."""

    @property
    def definition(self) -> ToolDefinition:
        """Name, description and JSON schema of the arguments."""
        ...

    async def run(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        """The answer; ToolInputError for arguments that make no sense, TimeoutError when late."""
        ...


@dataclass(frozen=True, slots=True, init=False)
class FunctionTool:
    """A plain function, sync or async, or an object that can be called."""

    function: Callable[..., Any]
    definition: ToolDefinition
    timeout_s: float | None
    _schema: Mapping[str, Any]

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        description: str = "",
        timeout_s: float | None = None,
    ) -> None:
        schema = schema_of(function)
        text = description or (inspect.getdoc(function) or "").partition("\n\n")[0]
        definition = ToolDefinition(
            name=name or name_of(function), description=text, parameters_json=json.dumps(schema)
        )
        for field, value in (
            ("function", function),
            ("definition", definition),
            ("timeout_s", timeout_s),
            ("_schema", schema),
        ):
            object.__setattr__(self, field, value)

    async def run(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        """Check the arguments, call, and give the result's text."""
        checked(arguments, self._schema)

        def bound(given: Mapping[str, Any]) -> Any:
            return self.function(**given)

        limit_s = timeout_s if self.timeout_s is None else self.timeout_s
        if _is_async(self.function):
            return _text(await call(self._awaited, arguments, timeout_s=limit_s))
        return _text(await call(bound, arguments, timeout_s=limit_s))

    async def _awaited(self, given: Mapping[str, Any]) -> Any:
        return await self.function(**given)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function's parameters; InvalidConfig (TOOL_UNANNOTATED)."""
    called = function if inspect.isroutine(function) else type(function).__call__
    hints = get_type_hints(called)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _unusable(function, f"takes *{name}")
        if name not in hints:
            raise _unusable(function, f"has no type on '{name}'")
        properties[name] = _schema(hints[name], function)
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False}


def checked(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise ToolInputError, in words for the policy, unless the arguments fit the schema."""
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        raise ToolInputError(f"missing argument {', '.join(missing)}.")
    for name, value in arguments.items():
        if name not in properties:
            if schema.get("additionalProperties", True):
                continue
            raise ToolInputError(f"unknown argument {name[:40]}.")
        if not _fits(value, properties[name]):
            raise ToolInputError(f"argument {name} must be {_said(properties[name])}.")


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in _CHECKS:
        return True  # what this check does not know, the tool has to check
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    if not isinstance(value, _CHECKS[kind]):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"]) for item in value)
    return True


def _said(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_said(option) for option in schema["anyOf"])
    return str(schema.get("type", "different"))


def _schema(hint: Any, function: Callable[..., Any]) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(option, function) for option in arguments]}
    if hint is list or origin is list:
        items = {"items": _schema(arguments[0], function)} if arguments else {}
        return {"type": "array", **items}
    if hint is dict or origin is dict:
        return {"type": "object"}
    raise _unusable(function, f"has a type that JSON has no word for: {hint}")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is inspected
    )


def _text(result: Any) -> str:
    """Text as it is; what JSON can say as JSON, so that no policy reads Python's spelling."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _unusable(function: Callable[..., Any], why: str) -> InvalidConfig:
    return InvalidConfig(
        f"The tool {name_of(function)} {why}.",
        reason="TOOL_UNANNOTATED",
        remedy="Annotate each parameter with str, int, float, bool, list, dict, Literal or None.",
    )
