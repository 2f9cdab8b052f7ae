"""Templates and parsers that nobody trusts: they run in a process with limits, which can be killed.

registry = TemplateRegistry(TemplateConfinement())
registry.add_chat_template("theirs", source)      # compiles and tries it, in the other process

A source such as `{{ 9 ** (9 ** 9) }}` never ends, and a regular expression can take longer than
anybody waits. Neither can be stopped inside this process. Calls block their thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dialoop.errors import DialoopError, InvalidConfig, InvalidInput
from dialoop.messages import Message, ToolCall
from dialoop.reasons import Reason
from dialoop.sandbox.killable import LimitedFunction, LimitExceeded
from dialoop.templates.chat_template import (
    GenerationBlocks,
    cannot_render,
    compile_template,
    words_of,
)
from dialoop.templates.declared_parser import TemplateParser, require_pattern
from dialoop.templates.parsing import SpecialTokens

MAX_TEXT = 1 << 22
"""Longest text that a foreign template may write, in characters."""
_MAX_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What one rendering, or one reading back, may take."""

    time_s: float = 2.0
    max_memory_bytes: int = 256 << 20
    max_processes: int = 2


class TemplateConfinement:
    """Compiles, renders and reads back in processes with limits; safe to use from threads."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        limits = limits or TemplateLimits()
        self._limits = limits
        self._call = LimitedFunction(
            "dialoop.templates.confinement:answer",
            max_memory_bytes=limits.max_memory_bytes,
            max_processes=limits.max_processes,
        )

    def renderer(self, source: str) -> ConfinedRenderer:
        """Return the renderer of a source, which compiles when it is used."""
        return ConfinedRenderer(source, self.ask)

    def parser(self, parser: TemplateParser) -> ConfinedParser:
        """Return a parser that does what `parser` says in the other process."""
        return ConfinedParser(parser=parser, ask=self.ask)

    def require_compilable(self, pattern: str) -> None:
        """Raise InvalidInput for a regular expression that does not compile within the limits."""
        self.ask("pattern", pattern=pattern)

    def require_renderable(self, source: str) -> None:
        """Raise InvalidInput for a source that does not compile, or exceeds the limits at once."""
        self.ask("compile", source=source)
        renderer = self.renderer(source)
        try:
            renderer.render(messages=[{"role": "user", "content": "hi"}], tools=None)
        except InvalidInput as error:
            if error.reason == Reason.TEMPLATE_LIMIT:
                raise

    def ask(self, task: str, **arguments: Any) -> dict[str, Any]:
        """Return the other process's answer, or raise the error that it reports."""
        try:
            result = self._call(
                {"task": task, "arguments": arguments}, timeout_s=self._limits.time_s
            )
        except LimitExceeded as error:
            raise _limit_error(error.what) from None
        if "refusal" in result:
            message, reason, remedy = result["refusal"]
            kind = InvalidConfig if reason == Reason.TEMPLATE_INVALID else InvalidInput
            raise kind(message, reason=Reason(reason), remedy=remedy)
        if "failure" in result:
            raise cannot_render(result["failure"])
        if "num_characters" in result:
            raise _limit_error(f"{MAX_TEXT} characters of text")
        answer: dict[str, Any] = result["answer"]
        return answer

    def close(self) -> None:
        """End the idle processes."""
        self._call.close()


class ConfinedRenderer:
    """A `TextRenderer` that sends the variables, as JSON, to a process with limits."""

    def __init__(self, source: str, ask: Callable[..., dict[str, Any]]) -> None:
        self._source = source
        self._ask = ask

    def render(self, **variables: Any) -> str:
        """Return the text; raise InvalidInput (TEMPLATE_LIMIT, TEMPLATE_REFUSED)."""
        blocks = variables.pop("_generation_blocks", None)
        mark = blocks.mark if isinstance(blocks, GenerationBlocks) else ""
        answer = self._ask("render", source=self._source, variables=variables, mark=mark)
        if mark:
            blocks.count += answer["num_blocks"]
        return str(answer["text"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfinedParser:
    """A declared parser whose regular expression runs in a process with limits."""

    parser: TemplateParser
    ask: Callable[..., dict[str, Any]] = field(compare=False, repr=False)

    def parse(self, text: str, special_tokens: SpecialTokens) -> tuple[Message, ...]:
        """Return the messages; raise InvalidInput (NOT_PARSEABLE, TEMPLATE_LIMIT)."""
        fields = {name: getattr(self.parser, name) for name in TemplateParser.__slots__}
        fields["roles"] = dict(self.parser.roles)
        answer = self.ask("parse", fields=fields, text=text, special_tokens=dict(special_tokens))
        return tuple(
            Message(**row, tool_calls=tuple(ToolCall(**call) for call in calls))
            for row, calls in answer["messages"]
        )


def answer(task: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Do a task in the process with limits: compile, render or parse."""
    try:
        result = _TASKS[task](**arguments)
        if len(result.get("text", "")) > MAX_TEXT:
            return {"num_characters": len(result["text"])}
    except DialoopError as error:
        refusal = (error.message[:_MAX_ERROR], str(error.reason), error.remedy[:_MAX_ERROR])
        return {"refusal": refusal}
    except MemoryError:
        raise
    except Exception as error:  # whatever their template does is their template's failure
        return {"failure": words_of(error)[:_MAX_ERROR]}
    return {"answer": result}


def _compile(source: str) -> dict[str, Any]:
    compile_template(source)
    return {}


def _compile_pattern(pattern: str) -> dict[str, Any]:
    require_pattern(pattern)
    return {}


def _render(source: str, variables: dict[str, Any], mark: str) -> dict[str, Any]:
    blocks = GenerationBlocks(mark)
    marks = {"_generation_blocks": blocks} if mark else {}
    text = compile_template(source).render(**variables, **marks)
    text.encode()  # UnicodeEncodeError: a lone surrogate is no text that anybody could be sent
    return {"text": text, "num_blocks": blocks.count}


def _parse(fields: dict[str, Any], text: str, special_tokens: dict[str, str]) -> dict[str, Any]:
    fields["end_markers"] = tuple(fields["end_markers"])
    messages = TemplateParser(**fields).parse(text, special_tokens)
    return {"messages": [_as_row(message) for message in messages]}


def _as_row(message: Message) -> tuple[dict[str, Any], list[dict[str, str]]]:
    calls = [
        {"id": call.id, "name": call.name, "arguments_json": call.arguments_json}
        for call in message.tool_calls
    ]
    row = {
        "role": message.role,
        "content": message.text,
        "reasoning": message.reasoning,
        "is_complete": message.is_complete,
    }
    return row, calls


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "compile": _compile,
    "pattern": _compile_pattern,
    "render": _render,
    "parse": _parse,
}


def _limit_error(what: str) -> InvalidInput:
    return InvalidInput(
        f"The registered template or its parser needs more than {what} here.",
        reason=Reason.TEMPLATE_LIMIT,
        remedy="Register one that does less, or put it into the model's directory.",
    )
