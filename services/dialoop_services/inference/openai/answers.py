"""Answers in OpenAI's JSON: whole documents and the chunks of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.trajectory import StopReason

from dialoop_services.inference.openai.messages import call_json, message_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dialoop.chat import Message, ToolCall
    from dialoop.tokens.tokenizer import Tokenizer

    from dialoop_services.inference.engine import TopLogprobs

REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields that every chunk of an answer repeats."""

    call_id: str
    model: str
    fingerprint: str
    is_chat: bool
    warnings: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def document(self, choices: list[dict[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        """Return the answer, or a chunk of it, as JSON."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": self.call_id,
            "object": kind + (".chunk" if is_chunk and self.is_chat else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            "choices": choices,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """How a client wants to see sampled tokens: with log-probs, with ids, or neither."""

    tokenizer: Tokenizer
    is_chat: bool
    with_logprobs: bool = False
    num_top: int = 0
    with_ids: bool = False

    def of(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs],
        *,
        text_offset: int = 0,
    ) -> dict[str, Any]:
        """Return the fields of a choice that show its tokens."""
        fields: dict[str, Any] = {"logprobs": None}
        if self.with_logprobs:
            # Without `tops`, one is asked of a greedy answer: the sampled token.
            own = [{i: p} for i, p in zip(token_ids, logprobs, strict=True)]
            shown = (tops or own) if self.num_top else [{}] * len(own)
            fields["logprobs"] = (
                {"content": [self._chat(*row) for row in zip(own, shown, strict=True)]}
                if self.is_chat
                else self._plain(token_ids, logprobs, shown, text_offset)
            )
        if self.with_ids:
            fields["token_ids"] = list(token_ids)
        return fields

    def _chat(self, own: TopLogprobs, top: TopLogprobs) -> dict[str, Any]:
        (entry,) = self._entries(own)
        return {**entry, "top_logprobs": self._entries(top)}

    def _entries(self, tokens: TopLogprobs) -> list[dict[str, Any]]:
        entries = []
        for token_id, logprob in tokens.items():
            text = self.tokenizer.decode([token_id])
            # The text of a token that is part of a character does not show the token's bytes.
            utf8 = None if REPLACEMENT in text else list(text.encode())
            entries.append({"token": text, "logprob": logprob, "bytes": utf8})
        return entries

    def _plain(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs],
        offset: int,
    ) -> dict[str, Any]:
        texts = [self.tokenizer.decode([token_id]) for token_id in token_ids]
        offsets: list[int] = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top: list[dict[str, float]] = [{} for _ in tops]
        for shown, row in zip(top, tops, strict=True):
            for token_id, logprob in row.items():
                # Tokens that read the same, as parts of characters do, share the likeliest's entry.
                shown.setdefault(self.tokenizer.decode([token_id]), logprob)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": top if self.num_top else None,
            "text_offset": offsets,
        }


def finish_reason(stop_reason: StopReason, *, has_calls: bool) -> str:
    """Return why the answer ended, in OpenAI's words."""
    if stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if has_calls else "stop"


def chat_choice(
    index: int, message: Message, reason: str, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return a choice of a whole chat answer."""
    return {"index": index, "message": message_json(message), "finish_reason": reason, **fields}


def text_choice(
    index: int, text: str, reason: str | None, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return a choice of a plain answer, or of a chunk of it."""
    return {"index": index, "text": text, "finish_reason": reason, **fields}


def delta_choice(
    index: int, delta: dict[str, Any], reason: str | None, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return a choice of a chunk of a chat answer."""
    return {"index": index, "delta": delta, "finish_reason": reason, **fields}


def calls_delta(first: int, calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Return tool calls of a chunk, each whole; `first` is the number of those before."""
    return [{"index": first + i, **call_json(call)} for i, call in enumerate(calls)]


def usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """Return the numbers of tokens as OpenAI's `usage`."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
