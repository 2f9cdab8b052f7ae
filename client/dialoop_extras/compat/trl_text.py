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
from dialoop.environments.tools.text_tools import parse_call
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.user_functions import call

from dialoop_extras.compat.sampling import read_generate_options
from dialoop_extras.compat.wrappers import require_policy
from dialoop_extras.text_environment.environment import TextEnvironment, TextLimits, TextRun
from dialoop_extras.text_environment.history import TextHistory
from dialoop_extras.text_environment.tools import TextTools

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dialoop.tokens.tokenizer import Tokenizer


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


@dataclass(frozen=True, slots=True)
class BlockingTextEnvironment:
    """A text environment whose `run` blocks, as TRL's does."""

    environment: TextEnvironment

    def run(self, queries: Sequence[str], **extra: Any) -> TextRun:
        """Play one episode per query; the result unpacks into TRL's five lists."""
        with BackgroundLoop() as loop:
            return loop.run(self.environment.run(queries, **extra))


def text_environment(  # noqa: PLR0913 - the source's arguments
    model: Any,
    tokenizer: Tokenizer,
    tools: Any = None,
    reward_fn: Any = None,
    prompt: str = "",
    max_turns: int = 4,
    max_tool_response: int = 100,
    max_length: int | None = None,
    generation_kwargs: Mapping[str, Any] | None = None,
    *,
    compat: str = "",
) -> BlockingTextEnvironment:
    """Return a text environment from TRL's arguments; compat="trl" keeps TRL's defects too.

    model: a policy, such as an InferenceClient. reward_fn: from a list of last texts, and the extra
    arguments of `run`, to a list of numbers.
    """
    if compat not in ("", "trl"):
        raise InvalidConfig(
            f"compat is {compat!r:.40}.", reason=Reason.BAD_OPTIONS, remedy="Use '' or 'trl'."
        )
    require_policy(model, "generate")
    _require_lists(reward_fn)
    kind = TrlTextEnvironment if compat else TextEnvironment
    sampling = dict(generation_kwargs or {})
    if sampling.get("do_sample") in ("true", "false"):  # as TRL's own documentation writes it
        sampling["do_sample"] = sampling["do_sample"] == "true"
    limits = TextLimits(
        max_turns=max_turns, max_tool_response=max_tool_response, max_length=max_length
    )
    return BlockingTextEnvironment(
        kind(
            model,
            tokenizer,
            tools=tools,
            reward=reward_fn,
            prompt=prompt,
            limits=limits,
            sampling=read_generate_options(sampling).sampling,
        )
    )


def _require_lists(reward: Any) -> None:
    """Raise InvalidConfig (BAD_OPTIONS) for a reward whose annotations say that it takes a text."""
    if hasattr(reward, "__wrapped__"):  # as by `each`: the annotations are of what it wraps
        return
    named = dict(getattr(reward, "__annotations__", {}))
    named.pop("return", None)
    if next(iter(named.values()), None) in (str, "str"):
        raise InvalidConfig(
            "reward_fn takes one text, and is called with the list of all.",
            reason=Reason.BAD_OPTIONS,
            remedy="Wrap it: reward_fn=each(function), of dialoop_extras.text_environment.",
        )


def text_history(text: str, tokens: Iterable[int], system: bool = True) -> TextHistory:
    """Return a history with one segment; `system` says that the model did not write it."""
    source = Source.PROMPT if system else Source.MODEL
    return TextHistory().append_segment(text, [int(token) for token in tokens], source=source)
