"""Tools that take one text, how a message calls them, and the transform that runs them.

The policy writes `<request><Calculator>35+40<call>`, and the answer is `75<response>`.

def capital(country: str) -> str:
    if country not in CAPITALS:
        raise ToolInputError(f"no country {country}")      # the policy's mistake: it reads this
    return CAPITALS[country]                               # any other exception is a failure

ToolCalls([capital, Calculator()])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dialoop.chat import Message
from dialoop.environments.episode import Outcome, playing
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.representations import cut
from dialoop.trajectory import Failure, Owner
from dialoop.user_functions import call, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The markers of calls; a policy's message stops at `call` and at `submit`."""

    request: str = "<request>"
    call: str = "<call>"
    response: str = "<response>"
    submit: str = "<submit>"

    def spans(self, text: str) -> list[str]:
        """Return each text between `request` and `call`."""
        pattern = f"{re.escape(self.request)}(.*?){re.escape(self.call)}"
        return re.findall(pattern, text, re.DOTALL)


def parse_span(span: str) -> tuple[str | None, str | None]:
    """Return tool and query of one span; (None, None) when it has no `<tool>`.

    The tool is in the first `<...>`; the query is all that follows the first `>`.
    """
    tool = re.search(r"<(.*?)>", span)
    if tool is None:
        return None, None
    return tool.group(1), span.partition(">")[2]


def parse_call(text: str, syntax: CallSyntax | None = None) -> tuple[str | None, str | None]:
    """Return tool and query of the first call in a text; (None, None) when there is none."""
    spans = (syntax or CallSyntax()).spans(text)
    return parse_span(spans[0]) if spans else (None, None)


class ToolInputError(Exception):
    """A mistake of the policy in a tool call; the error's text becomes the tool's answer."""


class Tool(Protocol):
    """A named tool. A plain function is one too, under its own name. Either may be async."""

    @property
    def name(self) -> str:
        """Return the name that the policy uses."""

    def __call__(self, query: str) -> Any:
        """Return the answer, of which `str` is used; raise ToolInputError for a bad query."""


ToolFunction = Tool | Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class ToolCalls(Transform):
    """Run the calls in the policy's message and append one message per call.

    It reads only the policy's own message, so nothing in a tool's text can call or submit. If a
    tool fails (any exception but ToolInputError, or a timeout), the episode ends as an error.
    """

    tools: Mapping[str, ToolFunction] | Sequence[ToolFunction]
    syntax: CallSyntax = field(default_factory=CallSyntax, kw_only=True)
    role: str = field(default="tool", kw_only=True)
    max_tool_response: int = field(default=100, kw_only=True)
    max_calls: int = field(default=8, kw_only=True)
    timeout_s: float = field(default=10.0, kw_only=True)
    # Whether tools use `Episode.remember`; a step then needs its session.
    remembers: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if len(self._by_name()) != len(self.tools):
            raise InvalidConfig(
                f"Two tools have the same name: {', '.join(map(name_of, self.tools))}.",
                remedy="Give the tools as a dict with a name for each.",
            )
        if self.max_tool_response < 1 or self.max_calls < 1 or self.timeout_s <= 0:
            raise InvalidConfig(
                "`max_tool_response`, `max_calls` or `timeout_s` of ToolCalls is not above 0.",
                remedy="Set max_tool_response, max_calls and timeout_s above 0.",
            )

    @property
    def traits(self) -> Traits:
        """Return the tools' names, role and stop string, and whether a step needs its session."""
        return Traits(
            stop=(self.syntax.call,),
            tools=tuple(self._by_name()),
            roles=(self.role,),
            needs_session=self.remembers,
        )

    def sample_calls(self, role: str) -> tuple[Message, ...]:
        """Return a message for each tool, which calls it with the text 1."""
        request, call = self.syntax.request, self.syntax.call
        texts = (f"{request}<{name}>1{call}" for name in self._by_name())
        return tuple(Message(role=role, content=text) for text in texts)

    async def step(self, outcome: Outcome) -> Outcome:
        """Run each call in turn, up to the first tool that fails."""
        if outcome.episode.done:
            return outcome
        for number, span in enumerate(self.syntax.spans(outcome.episode.answer_text)):
            if number == self.max_calls:
                return self._answer(outcome, "Too many calls.")
            outcome = await self._run(outcome, span)
            if outcome.episode.done:
                return outcome
        return outcome

    async def _run(self, outcome: Outcome, span: str) -> Outcome:
        name, query = parse_span(span)
        if name is None or query is None:
            return self._answer(outcome, "Unknown tool call.")
        tool = self._by_name().get(name)
        if tool is None:
            return self._answer(outcome, f"Unknown tool {name}.")
        outcome = replace(outcome, num_tool_calls=outcome.num_tool_calls + 1)
        try:
            # str() is inside the `try` because it runs the tool's code too.
            with playing(outcome.episode, remembers=self.remembers) as run:
                text = str(await call(tool, query, timeout_s=self.timeout_s))
            return self._answer(replace(outcome, episode=run.episode), text)
        except ToolInputError as error:
            return self._answer(outcome, f"Tool error: {error}")
        except Exception as error:
            return outcome.fail(self._failure(error, name))

    def _answer(self, outcome: Outcome, text: str) -> Outcome:
        content = cut(text, self.max_tool_response) + self.syntax.response
        return outcome.append(Message(role=self.role, content=content))

    def _failure(self, error: Exception, name: str) -> Failure:
        reason = Reason.TOOL_TIMEOUT if isinstance(error, TimeoutError) else Reason.TOOL_FAILED
        return failure_of(error, owner=Owner.TOOL, reason=reason, what=f"Tool {name}")

    def _by_name(self) -> dict[str, ToolFunction]:
        if isinstance(self.tools, Mapping):
            return dict(self.tools)
        return {name_of(tool): tool for tool in self.tools}
