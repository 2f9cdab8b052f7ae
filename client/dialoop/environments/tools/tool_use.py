"""Tools with named arguments: find the calls in the policy's message, run them, answer each.

ToolUse([search, FunctionTool(lookup, timeout_s=2.0)], syntax=NativeCalls())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from dialoop.chat import Message
from dialoop.environments.episode import Outcome
from dialoop.environments.failures import failure_of
from dialoop.environments.tools.function_tools import ArgumentTool, FunctionTool
from dialoop.environments.tools.text_tools import ToolInputError, cut
from dialoop.environments.tools.tool_syntaxes import AskedCall, NativeCalls, ToolSyntax
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Owner

ToolFailures = Literal["end", "tell"]


class ToolUse(Transform):
    """Run the calls of the policy's message in order and append one message per call.

    What the policy got wrong (an unknown tool, bad arguments, ToolInputError) is told to it. What a
    tool got wrong (any other exception, a timeout) is told too, and with `tool_failures="end"` the
    episode then ends as an error that is never scored; "tell" lets it go on, for tools whose
    failures are the policy's doing. `stop_on_error` skips the calls after one that went wrong.
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
    ) -> None:
        if timeout_s <= 0 or max_calls < 1 or max_tool_response < 1:
            raise InvalidConfig(
                "A limit of ToolUse is not positive.",
                remedy="Set timeout_s, max_calls and max_tool_response above 0.",
            )
        if tool_failures not in ("end", "tell"):
            raise InvalidConfig(
                f"tool_failures is '{tool_failures}'.", remedy="Choose 'end' or 'tell'."
            )
        self._tools = _by_name(tools)
        self._syntax = syntax or NativeCalls()
        self._role = role
        self._timeout_s = timeout_s
        self._stop_on_error = stop_on_error
        self._tool_failures = tool_failures
        self._max_calls = max_calls
        self._max_tool_response = max_tool_response
        # Begin each answer with whether the call worked, as MCP's transform does.
        self._show_outcome = show_outcome

    @property
    def traits(self) -> Traits:
        """The tools' names and schemas; they need messages to stand in."""
        return Traits(
            tools=tuple(self._tools),
            tool_definitions=tuple(tool.definition for tool in self._tools.values()),
            roles=(self._role,),
            needs_messages=True,
        )

    def tool(self, name: str) -> ArgumentTool | None:
        """The tool of that name."""
        return self._tools.get(name)

    async def step(self, outcome: Outcome) -> Outcome:
        """Answer each call; the failures of all of them are known before the episode ends."""
        answer = outcome.episode.answer
        if outcome.episode.done or answer is None:
            return outcome
        failures: list[Failure] = []
        for number, asked in enumerate(self._syntax.calls(answer)):
            if number == self._max_calls:
                outcome = self._answered(outcome, asked, "too many calls.", worked=False)
                break
            outcome, worked, failure = await self._run(outcome, asked)
            failures += [failure] if failure else []
            if self._stop_on_error and not worked:
                break
        if self._tool_failures == "end":
            for failure in failures:
                outcome = outcome.fail(failure)
        return outcome

    async def _run(
        self, outcome: Outcome, asked: AskedCall
    ) -> tuple[Outcome, bool, Failure | None]:
        tool = self.tool(asked.name)
        problem = asked.problem or ("" if tool else f"unknown tool {asked.name[:40]}.")
        if tool is None or problem:
            return self._answered(outcome, asked, problem, worked=False), False, None
        outcome = replace(outcome, num_tool_calls=outcome.num_tool_calls + 1)
        try:
            text = await tool.run(asked.arguments, timeout_s=self._timeout_s)
        except ToolInputError as error:
            return self._answered(outcome, asked, str(error), worked=False), False, None
        except Exception as error:
            reason = Reason.TOOL_TIMEOUT if isinstance(error, TimeoutError) else Reason.TOOL_FAILED
            what = f"Tool {asked.name}"
            failure = failure_of(error, owner=Owner.TOOL, reason=reason, what=what)
            said = "it took too long." if reason == Reason.TOOL_TIMEOUT else failure.message
            return self._answered(outcome, asked, said, worked=False), False, failure
        return self._answered(outcome, asked, text, worked=True), True, None

    def _answered(self, outcome: Outcome, asked: AskedCall, text: str, *, worked: bool) -> Outcome:
        text = cut(text, self._max_tool_response)
        name = asked.name or "?"
        if self._show_outcome:
            text = f"Tool {name} {'executed successfully' if worked else 'failed'}:\n{text}"
        elif not worked:
            text = f"Tool error: {text}"
        message = Message(role=self._role, content=text, tool_call_id=asked.id, name=asked.name)
        return outcome.append(message)


class EndWithoutCalls(Transform):
    """A message without a tool call terminates the episode: NO_CALL."""

    def __init__(self, syntax: ToolSyntax | None = None) -> None:
        self._syntax = syntax or NativeCalls()

    async def step(self, outcome: Outcome) -> Outcome:
        """Look for a call."""
        answer = outcome.episode.answer
        if answer is None or self._syntax.calls(answer):
            return outcome
        return outcome.terminate(DoneReason.NO_CALL)


def _by_name(
    tools: Sequence[ArgumentTool | Callable[..., Any]],
) -> dict[str, ArgumentTool]:
    found: dict[str, ArgumentTool] = {}
    for given in tools:
        tool: Any = given if hasattr(given, "definition") else FunctionTool(given)
        if tool.definition.name in found:
            raise InvalidConfig(
                f"Two tools have one name: {tool.definition.name}.",
                remedy="Name them with FunctionTool(function, name=...).",
            )
        found[tool.definition.name] = tool
    return found
