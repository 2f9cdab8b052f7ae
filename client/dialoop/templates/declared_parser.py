r"""A parser as data, for templates that are registered over the wire, which carries no code.

TemplateParser(
    message_pattern=r"<s>\[(?P<role>\w+)\](?P<content>.*?)(?:</s>|$)", end_markers=("</s>",)
)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from dialoop.errors import InvalidInput
from dialoop.messages import Message
from dialoop.reasons import Reason
from dialoop.templates.parsing import (
    not_parseable,
    split_calls,
    split_reasoning,
    split_responses,
)

if TYPE_CHECKING:
    from dialoop.templates.parsing import SpecialTokens

MAX_PATTERN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateParser:
    """How to read a rendered conversation back.

    message_pattern: regular expression (`.` matches newlines) of one message, with the named groups
    role and content. roles: role as written -> role of the message. end_markers: what ends a
    message; one without it is incomplete. The pairs stand around the JSON of a tool call at the
    end of a message, around a tool's answer, and around the reasoning before the content.
    """

    message_pattern: str
    roles: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    end_markers: tuple[str, ...] = ()
    tool_call_start: str = ""
    tool_call_end: str = ""
    tool_response_start: str = ""
    tool_response_end: str = ""
    reasoning_start: str = ""
    reasoning_end: str = ""

    def __post_init__(self) -> None:
        require_pattern(self.message_pattern)
        for name in ("tool_call", "tool_response", "reasoning"):
            if bool(getattr(self, f"{name}_start")) != bool(getattr(self, f"{name}_end")):
                raise _invalid(f"{name}_start and {name}_end must be set together.")

    def parse(self, text: str, special_tokens: SpecialTokens) -> tuple[Message, ...]:
        """Return the messages that the pattern finds; only special tokens may lie between."""
        messages: list[Message] = []
        position = 0
        for match in re.finditer(self.message_pattern, text, re.DOTALL):
            if match.end() == match.start():
                continue
            self._require_glue(text[position : match.start()], special_tokens)
            messages += self._messages(match["role"], match["content"], self._is_ended(match))
            position = match.end()
        self._require_glue(text[position:], special_tokens)
        if not messages:
            raise not_parseable("message_pattern finds no message.")
        return tuple(messages)

    def _is_ended(self, match: re.Match[str]) -> bool:
        after = match.string[match.end("content") :]
        return not self.end_markers or after.lstrip().startswith(self.end_markers)

    def _require_glue(self, text: str, special_tokens: SpecialTokens) -> None:
        for marker in (*self.end_markers, *special_tokens.values()):
            text = text.replace(marker, "")
        if text.strip():
            raise not_parseable(f"{text.strip()[:40]!r} belongs to no message.")

    def _messages(self, role: str, content: str, is_complete: bool) -> list[Message]:
        role = self.roles.get(role, role)
        if self.tool_response_start:
            responses = split_responses(content, self.tool_response_start, self.tool_response_end)
            if responses is not None:
                messages = [Message(role=role, content=answer) for answer in responses]
                return [*messages[:-1], replace(messages[-1], is_complete=is_complete)]
        message = Message(role=role, content=content, is_complete=is_complete)
        if self.tool_call_start:
            content, calls = split_calls(content, self.tool_call_start, self.tool_call_end)
            message = replace(message, content=content, tool_calls=calls)
        if self.reasoning_start:
            reasoning, content = split_reasoning(
                message.text, self.reasoning_start, self.reasoning_end
            )
            message = replace(message, content=content, reasoning=reasoning)
        return [message]


def require_pattern(pattern: str) -> None:
    """Raise InvalidInput (TEMPLATE_INVALID) for a message_pattern that cannot work."""
    if len(pattern) > MAX_PATTERN:
        raise _invalid(f"message_pattern has more than {MAX_PATTERN} characters.")
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, RecursionError, OverflowError) as error:
        raise _invalid(f"message_pattern is not a regular expression: {error}.") from None
    if not {"role", "content"} <= groups.keys():
        raise _invalid("message_pattern lacks the group role or content.")


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason=Reason.TEMPLATE_INVALID,
        remedy="See TemplateParser in template_service.proto for what each field means.",
    )
