"""Prompts as differences and digests, so that a step need not carry the whole conversation.

A prompt is a History, a text or token ids, as its environment's mode says. Client and service each
keep it. A step sends what was added and the digest of what came before, and so does its answer.

    chain = PromptChain.of(History((question,)))
    chain.extend(History((answer,))).digest == PromptChain.of(History((question, answer))).digest
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dialoop.chat import History

if TYPE_CHECKING:
    from dialoop.chat import Message
    from dialoop.environments.episode import Episode
    from dialoop.environments.modes import Answered

Prompt: TypeAlias = Any
"""A History, a str, or token ids as a tuple or an int32 array; two that meet are of one kind."""

_DIGEST_BYTES = 16
_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """How many messages, characters or token ids a prompt has, and a digest of them."""

    length: int
    digest: bytes


class PromptChain:
    """The digest of a prompt that grows: what follows is added without reading the past again."""

    __slots__ = ("_hash", "_length")

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=_DIGEST_BYTES)
        self._length = 0

    @classmethod
    def of(cls, prompt: Prompt) -> PromptChain:
        """Return the chain of a whole prompt."""
        return cls().extend(prompt)

    def follow(self, before: Prompt, prompt: Prompt, num_same: int = 0) -> PromptChain:
        """Return the chain of `prompt`, where this is the chain of `before`.

        num_same: how far they are known to be the same, so that nobody needs to compare them.
        """
        if num_same >= len(before) or starts_with(prompt, before):
            return self.extend(prompt[len(before) :])
        return PromptChain.of(prompt)

    @property
    def digest(self) -> PromptDigest:
        """Return the digest of all that was added."""
        return PromptDigest(self._length, self._hash.digest())

    def extend(self, *parts: Prompt) -> PromptChain:
        """Return the chain with the parts added in their order; this one stays as it is."""
        chain = object.__new__(PromptChain)
        chain._hash, chain._length = self._hash.copy(), self._length
        for part in parts:
            chain._hash.update(_bytes_of(part))
            chain._length += len(part)
        return chain


@dataclass(frozen=True, slots=True)
class PromptChange:
    """A next prompt as a difference: the first `num_kept` of the step's full, then `added`."""

    num_kept: int
    added: Prompt

    def apply(self, full: Prompt) -> Prompt:
        """Return the next prompt."""
        return join(full[: self.num_kept], self.added)


def prompt_of_episode(episode: Episode) -> Prompt:
    """Return what the policy sees next, in the environment's mode."""
    view: Any = episode.view
    if view is None:
        return episode.history
    return view.text if hasattr(view, "text") else view.sequence.token_ids


def sent_parts(answered: Answered) -> tuple[Prompt, Prompt, Prompt]:
    """Return prompt, response and full of what a policy sent; None for the absent ones."""
    return answered.prompt, answered.response, answered.full


def content_of(prompt: Prompt, answered: Answered) -> Any:
    """Return what tells a step from another one: the response, however it was sent.

    What does not continue the prompt is returned as it is.
    """
    before, response, full = sent_parts(answered)
    if full is not None:
        return full[len(prompt) :] if starts_with(full, prompt) else answered
    if response is None or (before is not None and not _equal(before, prompt)):
        return answered
    return response


def full_of(prompt: Prompt, answered: Answered) -> Prompt:
    """Return the step's full: what the policy sent as such, or the prompt and its response."""
    before, response, full = sent_parts(answered)
    if full is not None:
        return full
    if response is None:
        return prompt
    return join(prompt if before is None else before, response)


def change_of_step(before: Prompt, answered: Answered, after: Prompt) -> PromptChange:
    """Return the next prompt as a difference from the full of a step: `before` and the response."""
    return change_of(full_of(before, answered), after)


def change_of(full: Prompt, after: Prompt) -> PromptChange:
    """Return the next prompt `after` as a difference from the step's full."""
    num_full = len(full)
    if _equal(after[:num_full], full):
        return PromptChange(num_full, after[num_full:])
    shared = min(len(full), len(after))
    same = (i for i in range(shared) if not _equal(full[i : i + 1], after[i : i + 1]))
    num_kept = next(same, shared)
    return PromptChange(num_kept, after[num_kept:])


def starts_with(prompt: Prompt, start: Prompt) -> bool:
    """Return whether a prompt begins with another one."""
    if isinstance(prompt, History) and isinstance(start, History):
        return prompt.starts_with(start)
    return _equal(prompt[: len(start)], start)


def join(prompt: Prompt, added: Prompt) -> Prompt:
    """Return a prompt followed by what was added to it."""
    if isinstance(prompt, History):
        return prompt.extend(added) if added else prompt
    if isinstance(prompt, str):
        return prompt + added
    return (*_tuple(prompt), *_tuple(added))


def _equal(left: Prompt, right: Prompt) -> bool:
    if isinstance(left, History) and isinstance(right, History):
        return left.messages == right.messages
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    return bool(_tuple(left) == _tuple(right))


def _tuple(values: Prompt) -> Any:
    """Return token ids as a tuple; messages and text as they are."""
    return tuple(values.tolist()) if isinstance(values, np.ndarray) else values


def _line_of(message: Message) -> str:
    """Return a message's chat dict as a line of JSON with sorted keys."""
    return _to_json(message.to_chat()) + "\n"


def _bytes_of(part: Prompt) -> bytes:
    """Return what the digest covers of a part; `PromptDigest` in the proto says the same."""
    if isinstance(part, History):
        return "".join([_line_of(message) for message in part.messages]).encode()
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    return np.asarray(part, dtype="<i4").tobytes()
