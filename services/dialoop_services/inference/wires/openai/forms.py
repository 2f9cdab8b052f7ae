"""What `response_format` and `tool_choice` demand of an answer, as a constraint on decoding."""

from __future__ import annotations

import json
from typing import Any

from dialoop.reasons import Reason

from dialoop_services.inference.engine import Engine, SupportsConstraints
from dialoop_services.inference.wires.bodies import field_error
from dialoop_services.inference.wires.openai.models import ChatBody, NamedTool, ToolBody
from dialoop_services.inference.wires.reading import CALL_END, CALL_START

_OTHER_ENGINE = 'Leave it out, or serve with engine = "vllm".'


def constraint_of(body: ChatBody, engine: Engine) -> str:
    """Return the constraint of the answer as `SamplingParams` has it; empty where it is free.

    Raise FieldsRefused: UNSUPPORTED_TOOL_CHOICE or UNSUPPORTED_RESPONSE_FORMAT where the engine
    cannot hold an answer to it, INVALID_FIELD where the request contradicts itself.
    """
    forces_call = body.tool_choice not in ("auto", "none")
    form = body.response_format
    has_form = form is not None and form.type != "text"
    for is_asked, field, reason in (
        (forces_call, "tool_choice", Reason.UNSUPPORTED_TOOL_CHOICE),
        (has_form, "response_format", Reason.UNSUPPORTED_RESPONSE_FORMAT),
    ):
        if is_asked and not isinstance(engine, SupportsConstraints):
            why = f"the engine {engine.name} does not hold answers to a form"
            raise field_error(field, why, remedy=_OTHER_ENGINE, reason=reason)
    if forces_call:
        if has_form:
            why = "the answer cannot be a tool call and of that form"
            raise field_error("response_format", why, remedy="Leave it or tool_choice out.")
        return _calls(_forced_tools(body), is_single=not body.parallel_tool_calls)
    if form is None or not has_form:
        return ""
    if body.tools and body.tool_choice != "none":
        why = "an answer of that form could call no tool"
        raise field_error(
            "response_format", why, remedy="Leave tools out, or set tool_choice none."
        )
    if form.json_schema is None:
        return json.dumps({"type": "json_object"})
    return json.dumps({"type": "json_schema", "schema": form.json_schema.schema_})


def _forced_tools(body: ChatBody) -> list[ToolBody]:
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
    if not tools:
        why = "there is no such tool in tools"
        raise field_error("tool_choice", why, remedy="Send the tool that is to be called.")
    return tools


def _calls(tools: list[ToolBody], *, is_single: bool) -> str:
    """Return the constraint to calls as `tool_calls` reads them: Hermes's and Qwen's."""
    tags: list[dict[str, Any]] = [
        {
            "begin": f"{CALL_START}\n"
            f'{{"name": {json.dumps(tool.function.name, ensure_ascii=False)}, "arguments": ',
            "schema": {"type": "object", **tool.function.parameters},
            "end": f"}}\n{CALL_END}",
        }
        for tool in tools
    ]
    return json.dumps({"type": "tagged", "tags": tags, "is_single": is_single})
