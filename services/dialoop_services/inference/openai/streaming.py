"""A running answer as chunks; together they say what a whole answer would say."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.chat import Message, ToolCall
from dialoop.tokens.tokenizer import RunningText
from dialoop.trajectory import StopReason

from dialoop_services.inference.openai.answers import (
    TokenView,
    calls_delta,
    delta_choice,
    finish_reason,
    text_choice,
)
from dialoop_services.inference.openai.tool_calls import held_back

if TYPE_CHECKING:
    from dialoop.tokens.tokenizer import Tokenizer

    from dialoop_services.inference.engine import Sampled, TokenChunk, TopLogprobs
    from dialoop_services.inference.openai.tool_calls import AnswerSyntax, Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How answers are read: their syntax, and the stop strings that are cut off."""

    tokenizer: Tokenizer
    syntax: AnswerSyntax
    cut: tuple[str, ...] = ()

    def text_of(self, sampled: Sampled) -> str:
        """Return the text of a finished answer, without the end of turn and the stop string."""
        ids = sampled.token_ids
        ends = bool(ids) and ids[-1] in self.tokenizer.end_of_turn_ids
        text = self.tokenizer.decode(ids[:-1] if ends else ids)
        if sampled.stop_string in self.cut:
            return text.partition(sampled.stop_string)[0]
        return text


class CallIds:
    """The ids of an answer's tool calls; no id is used twice anywhere."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    def calls(self, reading: Reading) -> tuple[ToolCall, ...]:
        """Return the calls of a reading; a later reading of the same answer keeps the ids."""
        while len(self._ids) < len(reading.calls):
            self._ids.append(f"call_{uuid.uuid4().hex}")
        return tuple(
            ToolCall(id=call_id, name=call.name, arguments_json=call.arguments_json)
            for call_id, call in zip(self._ids, reading.calls, strict=False)
        )


def message_of(reading: Reading, ids: CallIds, *, is_complete: bool) -> Message:
    """Return the message that the client gets."""
    return Message(
        role="assistant",
        content=reading.content,
        reasoning=reading.reasoning,
        tool_calls=ids.calls(reading),
        is_complete=is_complete,
    )


@dataclass(slots=True, kw_only=True)
class RunningChoice:
    """One choice of a stream; only the task that answers uses it."""

    index: int
    reader: Reader
    view: TokenView
    call_ids: CallIds = field(default_factory=CallIds)
    _text: str = ""
    _running: RunningText | None = None
    _content: str = ""
    _reasoning: str = ""
    _num_calls: int = 0
    _has_begun: bool = False
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _top_logprobs: list[TopLogprobs] = field(default_factory=list)
    _offset: int = 0

    def add(self, tokens: TokenChunk) -> dict[str, Any] | None:
        """Return the chunk's choice that these tokens make; None while they may still change."""
        tokenizer = self.reader.tokenizer
        if self._running is None:
            self._running = RunningText(tokenizer)
        self._ids.extend(tokens.token_ids)
        self._logprobs.extend(tokens.logprobs)
        self._top_logprobs.extend(tokens.top_logprobs)
        ends = tokenizer.end_of_turn_ids
        self._text += self._running.add([i for i in tokens.token_ids if i not in ends])
        safe = self._text
        for string in self.reader.cut:
            safe = safe.partition(string)[0]
        safe = safe[: len(safe) - held_back(safe, *self.reader.cut)]
        return self._chunk(self.reader.syntax.read(safe, is_over=False), None)

    def finish(self, sampled: Sampled) -> dict[str, Any]:
        """Return the last chunk's choice: the rest of the text, and why the answer ended."""
        reading = self.reader.syntax.read(self.reader.text_of(sampled))
        reason = finish_reason(sampled.stop_reason, has_calls=bool(reading.calls))
        chunk = self._chunk(reading, reason)
        assert chunk is not None
        return chunk

    def _chunk(self, reading: Reading, reason: str | None) -> dict[str, Any] | None:
        content = reading.content[len(self._content) :]
        reasoning = reading.reasoning[len(self._reasoning) :]
        calls = self.call_ids.calls(reading)[self._num_calls :]
        if not (content or reasoning or calls or reason):
            return None
        fields = self.view.of(
            self._ids, self._logprobs, self._top_logprobs, text_offset=self._offset
        )
        self._ids, self._logprobs, self._top_logprobs = [], [], []
        first, self._num_calls = self._num_calls, len(reading.calls)
        self._content += content
        self._reasoning += reasoning
        self._offset += len(content)
        if not self.view.is_chat:
            return text_choice(self.index, content, reason, fields)
        delta: dict[str, Any] = {} if self._has_begun else {"role": "assistant", "content": ""}
        self._has_begun = True
        if content:
            delta["content"] = content
        if reasoning:
            delta["reasoning_content"] = reasoning
        if calls:
            delta["tool_calls"] = calls_delta(first, calls)
        return delta_choice(self.index, delta, reason, fields)


def is_complete(sampled: Sampled) -> bool:
    """Return whether the policy ended the answer itself."""
    return sampled.stop_reason is StopReason.STOP
