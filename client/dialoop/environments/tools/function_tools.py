"""Python functions as tools of chat models: a JSON schema from their annotations.

A parameter may be a number, a text, a list, a dict, a Literal, an Enum, a dataclass, a TypedDict,
a pydantic model, or a union of these; without a type it takes any value. A parameter of type
`Episode` gets the running episode, which the policy does not see.

def search(query: str, limit: int = 3) -> str:
    '''Search the library.'''

FunctionTool(search).definition.parameters_json
# {"type": "object", "properties": {"query": {"type": "string"}, ...}, "required": ["query"]}
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.chat import ToolDefinition
from dialoop.environments.episode import current_episode
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.user_functions import call, name_of

if TYPE_CHECKING:
    from dialoop.environments.tools.function_schema import Arguments

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
        """Return name, description and JSON schema of the arguments."""

    def run(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str | Awaitable[str]:
        """Return the answer; ToolInputError for bad arguments, TimeoutError after `timeout_s`.

        It may be async; a sync one runs in a thread of its own. One that goes on for seconds after
        `timeout_s` is cut.
        """


@dataclass(frozen=True, slots=True, init=False)
class FunctionTool:
    """A plain function, sync or async, or a callable object, as a tool."""

    function: Callable[..., Any]
    definition: ToolDefinition
    timeout_s: float | None
    _arguments: Arguments = field(repr=False, compare=False)

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        description: str = "",
        timeout_s: float | None = None,
    ) -> None:
        from dialoop.environments.tools.function_schema import Arguments

        arguments = Arguments(function)
        definition = ToolDefinition(
            name=name or name_of(function),
            description=description or (inspect.getdoc(function) or "").partition("\n\n")[0],
            parameters_json=json.dumps(arguments.schema),
        )
        for attribute, value in (
            ("function", function),
            ("definition", definition),
            ("timeout_s", timeout_s),
            ("_arguments", arguments),
        ):
            object.__setattr__(self, attribute, value)

    async def run(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        """Check the arguments, call the function, and return the result as text."""
        check_arguments(arguments, self._arguments.schema)
        converted = self._arguments.convert(arguments)
        if self._arguments.episode_parameters:
            episode = current_episode()
            converted |= dict.fromkeys(self._arguments.episode_parameters, episode)
        limit_s = timeout_s if self.timeout_s is None else self.timeout_s
        # An argument may have any name, so it must not meet those of `call`.
        function = partial(self.function, **converted)
        return _text(await call(function, timeout_s=limit_s))


def check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise ToolInputError, with a text for the policy, unless the arguments fit the schema."""
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
            raise ToolInputError(f"argument {name} must be {_describe_type(properties[name])}.")


def sample_of(schema: Mapping[str, Any]) -> Any:
    """Return a small value that fits a JSON schema, with its required properties alone."""
    return _sample(schema, schema.get("$defs", {}), depth=8)


def _sample(schema: Mapping[str, Any], definitions: Mapping[str, Any], *, depth: int) -> Any:
    within = partial(_sample, definitions=definitions, depth=depth - 1)
    if not depth:
        return None
    if "$ref" in schema:
        return within(definitions.get(schema["$ref"].rpartition("/")[2], {}))
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return within(options[0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: within(properties.get(name, {})) for name in schema.get("required", ())}
    if kind == "array":
        return [within(schema.get("items", {})) for _ in range(schema.get("minItems", 0))]
    values = {"integer": 1, "number": 1, "boolean": True, "null": None}
    return schema.get("minimum", values[kind]) if kind in values else "1"


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in _CHECKS:
        return True  # the tool itself has to check other types
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    if not isinstance(value, _CHECKS[kind]):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"]) for item in value)
    return True


def _describe_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_describe_type(option) for option in schema["anyOf"])
    return str(schema.get("type", "different"))


def _text(result: Any) -> str:
    """Return a text unchanged and other results as JSON, or as `str` if JSON cannot hold them."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
