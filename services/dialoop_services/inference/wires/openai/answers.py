"""Answers in OpenAI's JSON: whole documents and the chunks of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.tokens.tokenizer import RunningText, Tokenizer
from dialoop.trajectory import StopReason

from dialoop_services.inference.wires.base import AnswerJob, AnswerPart, JobAnswer, Usage
from dialoop_services.inference.wires.openai.messages import call_json, message_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dialoop_services.inference.engine import TopLogprobs


class _Position:
    """How many whole characters an answer's tokens spell so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = RunningText(tokenizer)
        self._num_chars = 0

    def move(self, token_id: int) -> int:
        """Go on by a token and return where it begins; parts of a character begin where it does."""
        before = self._num_chars
        self._num_chars += len(self._text.add([token_id]))
        return before


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """How a client wants to see sampled tokens: with log-probs, with ids, or neither."""

    tokenizer: Tokenizer
    is_chat: bool
    with_logprobs: bool = False
    num_top: int = 0
    with_ids: bool = False

    def of(self, part: AnswerPart, position: _Position) -> dict[str, Any]:
        """Return the fields of a choice that show its tokens, which follow this position."""
        token_ids, logprobs, tops = part.token_ids, part.logprobs, part.top_logprobs
        fields: dict[str, Any] = {"logprobs": None}
        if self.with_logprobs:
            # Without `tops`, one is asked of a greedy answer: the sampled token.
            own = [{i: p} for i, p in zip(token_ids, logprobs, strict=True)]
            shown = (tops or own) if self.num_top else [{}] * len(own)
            fields["logprobs"] = (
                {"content": [self._chat(*row) for row in zip(own, shown, strict=True)]}
                if self.is_chat
                else self._plain(token_ids, logprobs, shown, position)
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
            text, spelled = self.tokenizer.decode([token_id]), self.tokenizer.bytes_of(token_id)
            entries.append({"token": text, "logprob": logprob, "bytes": list(spelled)})
        return entries

    def _plain(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs],
        position: _Position,
    ) -> dict[str, Any]:
        texts = [self.tokenizer.decode([token_id]) for token_id in token_ids]
        offsets = [position.move(token_id) for token_id in token_ids]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one call is answered: the fields that every chunk repeats, and what a choice shows."""

    call_id: str
    model: str
    fingerprint: str
    view: TokenView
    warnings: tuple[str, ...] = ()
    with_prompt_ids: bool = False
    with_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, job: AnswerJob, answer: JobAnswer) -> dict[str, Any]:
        """Return the answer as one document."""
        scores = _prompt_logprobs(job, answer)
        choices = [
            self._choice(part) | scores[part.index // job.num_choices] for part in answer.parts
        ]
        return {
            **self._document(choices),
            "usage": usage(answer.usage),
            **self._prompt_ids(job),
        }

    async def chunks(
        self, job: AnswerJob, events: AsyncIterator[AnswerPart | Usage]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer chunk by chunk."""
        first = self._prompt_ids(job)
        positions = [
            _Position(self.view.tokenizer) for _ in range(len(job.parts) * job.num_choices)
        ]
        async for event in events:
            if not isinstance(event, Usage):
                yield {
                    **self._document([self._delta(event, positions[event.index])], is_chunk=True),
                    **first,
                }
                first = {}
            elif self.with_usage:
                yield {**self._document([], is_chunk=True), "usage": usage(event)}

    def _document(self, choices: list[dict[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion" if self.view.is_chat else "text_completion"
        return {
            "id": self.call_id,
            "object": kind + (".chunk" if is_chunk and self.view.is_chat else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            "choices": choices,
        }

    def _choice(self, part: AnswerPart) -> dict[str, Any]:
        position = _Position(self.view.tokenizer)
        if not self.view.is_chat:
            return self._delta(part, position)
        message, reason = message_json(part.message), finish_reason(part)
        return {
            "index": part.index,
            "message": message,
            "finish_reason": reason,
            **self.view.of(part, position),
        }

    def _delta(self, part: AnswerPart, position: _Position) -> dict[str, Any]:
        ending = {"finish_reason": finish_reason(part), **self.view.of(part, position)}
        if not self.view.is_chat:
            return {"index": part.index, "text": part.content, **ending}
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if part.is_first else {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.calls:
            delta["tool_calls"] = [
                {"index": index, **call_json(call)}
                for index, call in enumerate(part.calls, part.num_calls_before)
            ]
        return {"index": part.index, "delta": delta, **ending}

    def _prompt_ids(self, job: AnswerJob) -> dict[str, Any]:
        if not self.with_prompt_ids:
            return {}
        rows = job.prompt_ids()
        return {"prompt_token_ids": rows[0] if len(rows) == 1 else rows}


def finish_reason(part: AnswerPart) -> str | None:
    """Return why the answer ended, in OpenAI's words; None while it goes on."""
    if part.stop_reason is None:
        return None
    if part.stop_reason is not StopReason.STOP:
        return "length"
    return "tool_calls" if part.has_calls else "stop"


def usage(numbers: Usage) -> dict[str, int]:
    """Return the numbers of tokens as OpenAI's `usage`."""
    return {
        "prompt_tokens": numbers.num_prompt,
        "completion_tokens": numbers.num_sampled,
        "total_tokens": numbers.num_prompt + numbers.num_sampled,
    }


def _prompt_logprobs(job: AnswerJob, answer: JobAnswer) -> list[dict[str, Any]]:
    """Return for each prompt the field of its log-probs; empty where nobody asked for it."""
    if answer.prompt_logprobs is None:
        return [{} for _ in job.parts]
    return [
        {
            "prompt_logprobs": [
                None,
                *(
                    {str(token): {"logprob": value}}
                    for token, value in zip(row[1:], logprobs, strict=True)
                ),
            ]
        }
        for row, logprobs in zip(job.prompt_ids(), answer.prompt_logprobs, strict=True)
    ]
