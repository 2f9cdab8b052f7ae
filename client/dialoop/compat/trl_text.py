"""TextEnvironment as TRL had it, for transcripts and tests made with it.

What differs from ours, each a defect that its users' tests pin down: an unknown tool's answer is
its KeyError; an episode out of turns is neither completed nor truncated, and its reward reads the
tool's last answer; an end-of-text in the prompt ends the episode after one turn; only the first of
several calls is answered; whatever a tool raises becomes text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.clients.blocking.loop import BackgroundLoop
from dialoop.environments.tools.call_syntax import parse_call
from dialoop.text_environment.environment import TextEnvironment, TextRun
from dialoop.text_environment.tools import TextTools
from dialoop.user_functions import call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.text_environment.history import TextHistory


@dataclass(frozen=True, slots=True)
class TrlTextEnvironment(TextEnvironment):
    """A TextEnvironment with the same arguments; `run_blocking` is TRL's `run`."""

    def out_of_turns(self, history: TextHistory) -> TextHistory:
        """Leave it as it is."""
        return history

    def rewarded_text(self, history: TextHistory) -> str:
        """Return the last segment, whoever wrote it."""
        return history.last_text_segment

    def is_over(self, history: TextHistory, text: str, last_id: int) -> bool:
        """Return whether the whole text, the prompt included, holds an end."""
        end = self.tokenizer.special_token("eos_token")
        return self.syntax.submit in text or (end is not None and end in history.text)

    async def answer(self, text: str) -> str:
        """Return what the first call gives, or what it raises."""
        name, query = parse_call(text, self.syntax)
        limit = self.limits.max_tool_response
        if name is None or query is None:
            response = f"Unknown tool call: {text}"
        else:
            try:
                tool = TextTools.by_name(self.tools)[name]
                response = await call(tool, query, timeout_s=self.limits.tool_timeout_s)
            except Exception as error:
                response = f"Tool error: {error}"
        response = str(response)
        return response[: limit - 3] + "..." if len(response) > limit else response

    def run_blocking(self, queries: Sequence[str], **extra: Any) -> TextRun:
        """Run `run` for callers without an event loop."""
        with BackgroundLoop() as loop:
            return loop.run(self.run(queries, **extra))
