"""The tools of a running text, which answer `<request><Name>query<call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dialoop.environments.tools.text_tools import ToolInputError, parse_span
from dialoop.errors import InvalidConfig
from dialoop.representations import cut
from dialoop.user_functions import call, name_of

if TYPE_CHECKING:
    from dialoop.environments.tools.text_tools import CallSyntax, ToolFunction


class TextTools:
    """Tools by name: the keys of a mapping, or the names of the functions and classes in a list."""

    def __init__(
        self,
        tools: Mapping[str, ToolFunction] | Sequence[ToolFunction] | None,
        *,
        syntax: CallSyntax,
        limit: int,
        timeout_s: float,
    ) -> None:
        self._by_name = self.by_name(tools)
        self._syntax = syntax
        self._limit = limit
        self._timeout_s = timeout_s

    async def answer(self, text: str) -> str:
        """Return the tools' answers to the calls in a text, one after the other.

        The answer tells the model about an unknown tool or a bad query. Any other error of a tool
        is raised.
        """
        parts = [await self._answer_call(span) for span in self._syntax.spans(text)]
        return self._syntax.response.join(parts)

    async def _answer_call(self, span: str) -> str:
        name, query = parse_span(span)
        tool = None if name is None else self._by_name.get(name)
        if tool is None or query is None:
            return cut(f"Unknown tool {name}.", self._limit)
        try:
            result = await call(tool, query, timeout_s=self._timeout_s)
        except ToolInputError as error:
            result = f"Tool error: {error}"
        return cut(str(result), self._limit) or " "

    @staticmethod
    def by_name(
        tools: Mapping[str, ToolFunction] | Sequence[ToolFunction] | None,
    ) -> dict[str, ToolFunction]:
        """Return the tools by name; InvalidConfig when two have the same."""
        if isinstance(tools, Mapping):
            return dict(tools)
        by_name = {name_of(tool): tool for tool in tools or ()}
        if len(by_name) != len(tools or ()):
            raise InvalidConfig(
                "Two tools have the same name.",
                remedy="Give the tools as a dict with a name for each.",
            )
        return by_name
