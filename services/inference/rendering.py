"""From a request's history to prompt ids, and from sampled ids to the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory
from dialoop.episode import Sample
from dialoop.errors import InvalidInput, Unsupported
from dialoop.sequences import Segment, Sequence
from dialoop.templates import ChatTemplate
from dialoop.token_builder import TokenBuilder
from dialoop.tokenizer import Tokenizer
from dialoop.trajectory import StopReason

from services.inference.engine import StopTokens

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dialoop.chat import History
    from dialoop.token_builder import Prompt

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
        self._is_part_of_another = lru_cache(maxsize=256)(self._search_vocabulary)

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

    def rendered(self, history: History, *, add_generation_prompt: bool) -> tuple[str, Sequence]:
        """The conversation as text and as tokens."""
        text = self.template.render(history, add_generation_prompt=add_generation_prompt)
        sequence = self._builder.prompt(history).sequence
        if add_generation_prompt:
            return text, sequence
        opened = self.tokenizer.decode(sequence.token_ids.tolist())
        opening = self.tokenizer.encode(opened[len(text) :], trusted=True).ids
        last = sequence.segments[-1]
        num_left = last.length - len(opening)
        if not opened.startswith(text) or tuple(sequence.token_ids[-len(opening) :]) != opening:
            raise Unsupported(
                "This template's tokens cannot be parted before the assistant's turn.",
                reason="TEMPLATE_UNSUPPORTED",
                remedy="Ask with add_generation_prompt.",
            )
        segments = (*sequence.segments[:-1], *_shortened(last, num_left))
        return text, Sequence(token_ids=sequence.token_ids[: -len(opening)], segments=segments)

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
            if token is None or self._is_part_of_another(string, token):
                spanning.append(string)
            else:
                by_id.setdefault(token, string)
        return StopTokens(by_id=by_id, strings=tuple(spanning))

    def _search_vocabulary(self, string: str, token: int) -> bool:
        """Whether another token's text holds `string`, as a double newline holds a newline."""
        others = (i for i in range(self.tokenizer.vocab_size) if i != token)
        return any(string in self.tokenizer.decode([other]) for other in others)

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


def _shortened(segment: Segment, length: int) -> tuple[Segment, ...]:
    return (replace(segment, length=length),) if length > 0 else ()
