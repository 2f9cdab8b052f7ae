"""From a request's history to prompt ids, and from sampled ids to the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory
from dialoop.episode import Sample
from dialoop.errors import InvalidInput
from dialoop.templates import ChatTemplate, TokenBuilder
from dialoop.tokenizer import Tokenizer
from dialoop.trajectory import StopReason

from services.inference.engine import StopTokens

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dialoop.chat import History
    from dialoop.sequences import Sequence
    from dialoop.templates import Prompt

    from services.inference.engine import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A generate request in domain types."""

    history: History
    context: Sequence | None = None
    num_context_messages: int = 0
    turn: int = 0


class Renderer:
    """The one place where this service turns messages into tokens and tokens into messages."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._builder = TokenBuilder(tokenizer, template)

    @classmethod
    def of(cls, model_dir: Path) -> Renderer:
        """The renderer of a model directory; InvalidConfig when its tokenizer is missing."""
        tokenizer = Tokenizer.from_directory(model_dir)
        return cls(tokenizer, ChatTemplate.of(tokenizer))

    def prompt(self, ask: Ask) -> Prompt:
        """The tokens to continue."""
        return self._builder.prompt(
            ask.history,
            context=ask.context,
            num_context_messages=ask.num_context_messages,
            turn=ask.turn,
        )

    def stop_tokens(self, strings: Iterable[str]) -> StopTokens:
        """The end of turn, single tokens among the strings, and the other strings."""
        by_id = dict.fromkeys(self.tokenizer.end_of_turn_ids, "")
        spanning: list[str] = []
        for string in strings:
            if not string:
                raise InvalidInput(
                    "A stop string is empty.",
                    reason="INVALID_SAMPLING",
                    remedy="Leave it out: the end-of-turn token always stops.",
                )
            token = self.tokenizer.single_token(string)
            if token is None:
                spanning.append(string)
            else:
                by_id.setdefault(token, string)
        return StopTokens(by_id=by_id, strings=tuple(spanning))

    def sample(self, prompt: Prompt, sampled: Sampled) -> Sample:
        """The answer as prompt, response and full, and its tokens."""
        answer = self._builder.answer(
            prompt,
            sampled.token_ids,
            logprobs=sampled.logprobs,
            versions=[(span.length, span.policy_version) for span in sampled.versions],
            is_complete=sampled.stop_reason is StopReason.STOP,
        )
        return Sample(
            history=ChatHistory(prompt=prompt.history).respond(answer.message),
            sequence=answer.appended,
            stop_reason=sampled.stop_reason,
            stop_string=sampled.stop_string,
        )
