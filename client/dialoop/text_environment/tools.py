"""The tools of a running text: what to say to `<request><Name>query<call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dialoop.environments.tools.call_syntax import parse_span
from dialoop.environments.tools.calling import call, name_of
from dialoop.environments.tools.text_tools import ToolInputError, cut
from dialoop.errors import InvalidConfig

if TYPE_CHECKING:
    from dialoop.environments.tools.call_syntax import CallSyntax
    from dialoop.environments.tools.text_tools import ToolFunction


class TextTools:
    """Named tools; a list is named by functions and classes, a mapping by its keys."""

    def __init__(
        self,
        tools: Mapping[str, ToolFunction] | Sequence[ToolFunction] | None,
        *,
        syntax: CallSyntax,
        limit: int,
        timeout_s: float,
    ) -> None:
        self._by_name = self.named(tools)
        self._syntax = syntax
        self._limit = limit
        self._timeout_s = timeout_s

    async def answer(self, text: str) -> str:
        """What the tools say to the calls in a text, one after the other.

        An unknown tool and a query that makes no sense are told to the model; any other error of a
        tool is raised.
        """
        parts = [await self._one(span) for span in self._syntax.spans(text)]
        return self._syntax.response.join(parts)

    async def _one(self, span: str) -> str:
        name, query = parse_span(span)
        tool = None if name is None else self._by_name.get(name)
        if tool is None or query is None:
            return cut(f"Unknown tool {name}.", self._limit)
        try:
            found = await call(tool, query, timeout_s=self._timeout_s)
        except ToolInputError as error:
            found = f"Tool error: {error}"
        return cut(str(found), self._limit) or " "

    @staticmethod
    def named(
        tools: Mapping[str, ToolFunction] | Sequence[ToolFunction] | None,
    ) -> dict[str, ToolFunction]:
        """Tools by name; InvalidConfig when two share one."""
        if isinstance(tools, Mapping):
            return dict(tools)
        named = {name_of(tool): tool for tool in tools or ()}
        if len(named) != len(tools or ()):
            raise InvalidConfig(
                "Two tools have one name.",
                remedy="Give the tools as a dict with a name for each.",
            )
        return named
