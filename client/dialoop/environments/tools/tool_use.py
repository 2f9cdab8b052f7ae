"""Tools with named arguments: find the calls in the policy's message, run them, answer each.

ToolUse([search, FunctionTool(lookup, timeout_s=2.0)], syntax=NativeCalls())
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from dialoop.answers import AnswerForm
from dialoop.chat import Message, ToolCall
from dialoop.environments.episode import Outcome, playing
from dialoop.environments.tools.function_tools import ArgumentTool, FunctionTool, sample_of
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.environments.tools.tool_syntaxes import (
    NativeCalls,
    ParsedCall,
    ToolSyntax,
    bound_to,
)
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.representations import cut
from dialoop.trajectory import DoneReason, Failure, Owner
from dialoop.user_functions import call

ToolFailures = Literal["end", "tell"]

TOO_LONG = "it took too long."
"""What the policy reads of a tool that took longer than its time limit."""

# A tool keeps its time limit itself, as a sandbox that ends its process; then it is cut.
_STOPS_ITSELF_IN_S = 2.0


class ToolUse(Transform):
    """Run the calls of the policy's message in order and append one message per call.

    The answer to a call reports the policy's mistakes (an unknown tool, bad arguments,
    ToolInputError) and the tool's failures (any other exception, a timeout). After a tool's failure
    the episode ends with `tool_failures="end"` as an error that is never scored. It goes on with
    "tell", for tools whose failures the policy causes. `stop_on_error` skips the calls after one
    that went wrong.

    The chat template shows the policy the tools of a model's own syntax, NativeCalls. A prompt that
    you write has to tell it the others. `tools_in_prompt` says otherwise. `remembers` says that
    tools put something into the episode's state, by `Episode.remember`.
    """

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        tools: Sequence[ArgumentTool | Callable[..., Any]],
        *,
        syntax: ToolSyntax | None = None,
        role: str = "tool",
        timeout_s: float = 10.0,
        stop_on_error: bool = False,
        tool_failures: ToolFailures = "end",
        max_calls: int = 16,
        max_tool_response: int = 10_000,
        show_outcome: bool = False,
        tools_in_prompt: bool | None = None,
        remembers: bool = False,
    ) -> None:
        if timeout_s <= 0 or max_calls < 1 or max_tool_response < 1:
            raise InvalidConfig(
                "`timeout_s`, `max_calls` or `max_tool_response` of ToolUse is not above 0.",
                remedy="Set timeout_s, max_calls and max_tool_response above 0.",
            )
        if tool_failures not in ("end", "tell"):
            raise InvalidConfig(
                f"tool_failures is '{tool_failures}'.", remedy="Choose 'end' or 'tell'."
            )
        self._tools = _by_name(tools)
        self._syntax = _typed(syntax or NativeCalls(), self._tools)
        self._role = role
        self._timeout_s = timeout_s
        self._stop_on_error = stop_on_error
        self._tool_failures = tool_failures
        self._max_calls = max_calls
        self._max_tool_response = max_tool_response
        # Whether each answer begins with whether the call worked; McpTools needs this.
        self._show_outcome = show_outcome
        if tools_in_prompt is None:
            tools_in_prompt = isinstance(self._syntax, NativeCalls)
        self._tools_in_prompt = tools_in_prompt
        # Whether tools use `Episode.remember`; a step then needs its session.
        self._remembers = remembers

    @property
    def traits(self) -> Traits:
        """Return the tools' names and schemas, and that it needs messages."""
        definitions = tuple(tool.definition for tool in self._tools.values())
        native = self._syntax if isinstance(self._syntax, NativeCalls) else None
        return Traits(
            tools=tuple(self._tools),
            tool_definitions=definitions,
            prompt_tools=definitions if self._tools_in_prompt else (),
            needs_tool_template=self._tools_in_prompt,
            call_grammar=native.form.calls
            if native and native.form and self._tools_in_prompt
            else "",
            roles=(self._role,),
            needs_messages=True,
            needs_session=self._remembers,
        )

    def sample_calls(self, role: str) -> tuple[Message, ...]:
        """Return a message for each tool, which calls it with small values of its schema."""
        messages = []
        for name, tool in self._tools.items():
            arguments = json.dumps(sample_of(json.loads(tool.definition.parameters_json or "{}")))
            if write := getattr(self._syntax, "write", None):
                messages.append(Message(role=role, content=write(name, arguments)))
            else:
                calls = (ToolCall(id="call_1", name=name, arguments_json=arguments),)
                messages.append(Message(role=role, tool_calls=calls))
        return tuple(messages)

    def bound_to(self, form: AnswerForm) -> ToolUse:
        """Return these tools for a model that writes calls in this form."""
        bound = copy(self)
        bound._syntax = bound_to(self._syntax, form)
        return bound

    def tool(self, name: str) -> ArgumentTool | None:
        """Return the tool with this name, or None."""
        return self._tools.get(name)

    async def step(self, outcome: Outcome) -> Outcome:
        """Answer each call, then end the episode if a tool failed."""
        answer = outcome.episode.answer
        if outcome.episode.done or answer is None:
            return outcome
        failures: list[Failure] = []
        for number, parsed in enumerate(self._syntax.calls(answer)):
            if number == self._max_calls:
                outcome = self._answer(outcome, parsed, "too many calls.", worked=False)
                break
            outcome, worked, failure = await self._run(outcome, parsed)
            failures += [failure] if failure else []
            if self._stop_on_error and not worked:
                break
        if self._tool_failures == "end":
            for failure in failures:
                outcome = outcome.fail(failure)
        return outcome

    async def _run(
        self, outcome: Outcome, parsed: ParsedCall
    ) -> tuple[Outcome, bool, Failure | None]:
        tool = self.tool(parsed.name)
        problem = parsed.problem or ("" if tool else f"unknown tool {parsed.name[:40]}.")
        if tool is None or problem:
            return self._answer(outcome, parsed, problem, worked=False), False, None
        outcome = replace(outcome, num_tool_calls=outcome.num_tool_calls + 1)
        try:
            with playing(outcome.episode, remembers=self._remembers) as current:
                run = partial(tool.run, parsed.arguments, timeout_s=self._timeout_s)
                limit_s = getattr(tool, "timeout_s", None) or self._timeout_s
                text = str(await call(run, timeout_s=limit_s + _STOPS_ITSELF_IN_S))
            outcome = replace(outcome, episode=current.episode)
            return self._answer(outcome, parsed, text, worked=True), True, None
        except ToolInputError as error:
            return self._answer(outcome, parsed, str(error), worked=False), False, None
        except Exception as error:
            reason = Reason.TOOL_TIMEOUT if isinstance(error, TimeoutError) else Reason.TOOL_FAILED
            what = f"Tool {parsed.name}"
            failure = failure_of(error, owner=Owner.TOOL, reason=reason, what=what)
            problem_text = TOO_LONG if reason == Reason.TOOL_TIMEOUT else f"{what} failed."
            return self._answer(outcome, parsed, problem_text, worked=False), False, failure

    def _answer(self, outcome: Outcome, parsed: ParsedCall, text: str, *, worked: bool) -> Outcome:
        text = cut(text, self._max_tool_response)
        name = parsed.name or "?"
        if self._show_outcome:
            text = f"Tool {name} {'executed successfully' if worked else 'failed'}:\n{text}"
        elif not worked:
            text = f"Tool error: {text}"
        message = Message(role=self._role, content=text, tool_call_id=parsed.id, name=parsed.name)
        return outcome.append(message)


class EndWithoutCalls(Transform):
    """Terminate the episode (NO_CALL) at a message without a tool call."""

    def __init__(self, syntax: ToolSyntax | None = None) -> None:
        self._syntax = syntax or NativeCalls()

    def bound_to(self, form: AnswerForm) -> EndWithoutCalls:
        """Return this transform for a model that writes calls in this form."""
        return EndWithoutCalls(bound_to(self._syntax, form))

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for a call."""
        answer = outcome.episode.answer
        if answer is None or self._syntax.calls(answer):
            return outcome
        return outcome.terminate(DoneReason.NO_CALL)


def _typed(syntax: ToolSyntax, tools: Mapping[str, ArgumentTool]) -> ToolSyntax:
    """Return the syntax, which knows the tools' schemas where it reads native calls."""
    if not isinstance(syntax, NativeCalls) or syntax.tools:
        return syntax
    return replace(syntax, tools=tuple(tool.definition for tool in tools.values()))


def _by_name(
    tools: Sequence[ArgumentTool | Callable[..., Any]],
) -> dict[str, ArgumentTool]:
    by_name: dict[str, ArgumentTool] = {}
    for function in tools:
        tool: Any = function if hasattr(function, "definition") else FunctionTool(function)
        if tool.definition.name in by_name:
            raise InvalidConfig(
                f"Two tools have the same name: {tool.definition.name}.",
                remedy="Name them with FunctionTool(function, name=...).",
            )
        by_name[tool.definition.name] = tool
    return by_name
