"""Conversations that are played turn by turn on a token builder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from dialoop.chat import History, Message
from dialoop.sequences import ForkCause, PolicyVersion, Sequence
from dialoop.tokens.builder import Prompt, TokenBuilder

from tests.support.samples.chat_families import builder

V1 = PolicyVersion(lineage="main", number=1)
END, OTHER_END = "<|im_end|>", "<|endoftext|>"

cached_builder = cache(builder)


@dataclass
class Played:
    """A conversation that is played, and what it left behind."""

    tokens: TokenBuilder
    history: History
    sequences: list[Sequence] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    covered: int = 0

    def prompt(self, **fields) -> Prompt:
        context = self.sequences[-1] if self.sequences else None
        return self.tokens.prompt(
            self.history,
            context=context,
            num_context_messages=self.covered,
            turn=len(self.sampled),
            **fields,
        )

    def turn(self, ids: list[int], **fields) -> Prompt:
        prompt = self.prompt(**fields)
        logprobs = [-0.5] * len(ids)
        answer = self.tokens.answer(prompt, ids, logprobs=logprobs, versions=[(len(ids), V1)])
        if self.sequences and prompt.fork_cause is ForkCause.NONE:
            self.sequences[-1] = self.sequences[-1].extended_by(answer.appended)
        else:
            self.sequences.append(answer.appended)
        self.sampled.append(ids)
        self.history = self.history.append(answer.message)
        self.covered = len(self.history)
        return prompt

    def say(self, text: str, end: str = END, **fields) -> Prompt:
        encode = self.tokens.tokenizer.encode
        return self.turn([*encode(text).ids, *encode(end, trusted=True).ids], **fields)

    def hear(self, *messages: tuple[str, str]) -> None:
        self.history = self.history.extend(Message(role=role, content=t) for role, t in messages)

    def client_says(self, **changed) -> None:
        """The last message as a client sends it back."""
        message = Message(role="assistant", **changed)
        self.history = History((*self.history.messages[:-1], message))


def playing(template: str, opening: str = "q") -> Played:
    history = History((Message(role="user", content=opening),))
    return Played(tokens=cached_builder(template), history=history)
