"""Which earlier answer a call continues, judged by its messages.

A client sends an answer back in its own way: null for an empty content, other JSON for the same
arguments, no reasoning. A message with tool calls is identified by their ids, which are unique; one
without by its text. A message with another meaning is another message.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from dialoop.chat import History, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An answer of a recording: the index of its call, and of the choice."""

    call: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAnswer:
    """The messages of a call, and the message that answered them."""

    origin: Origin
    messages: History
    message: Message

    @property
    def full(self) -> History:
        """Return the conversation with the answer."""
        return self.messages.append(self.message)


class Pasts:
    """Answers by the digest of the conversation that ends with them."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, list[PastAnswer]] = {}

    def add(self, answer: PastAnswer, variant: str) -> None:
        """Add one more answer."""
        digest = _digests(answer.full, variant)[-1]
        self._by_digest.setdefault(digest, []).append(answer)

    def find(self, messages: History, variant: str) -> PastAnswer | None:
        """Return the latest answer with the longest conversation that `messages` begin with."""
        digests = _digests(messages, variant)
        for length in range(len(messages) - 1, 0, -1):
            for answer in reversed(self._by_digest.get(digests[length - 1], ())):
                if begins_with(messages, answer.full):
                    return answer
        return None


def begins_with(messages: History, past: History) -> bool:
    """Return whether a conversation begins with another, message by message."""
    return len(messages) >= len(past) and all(
        is_same(message, old) for message, old in zip(messages, past, strict=False)
    )


def is_same(first: Message, second: Message) -> bool:
    """Return whether two messages mean the same, written in different ways."""
    if _identity(first) != _identity(second):
        return False
    # Clients drop or trim the text beside tool calls.
    texts = {first.text.strip(), second.text.strip()}
    return not first.tool_calls or len(texts - {""}) <= 1


def _digests(history: History, variant: str) -> list[bytes]:
    """Return a digest of every beginning of the conversation."""
    digests: list[bytes] = []
    digest = variant.encode()
    for message in history:
        identity = repr(_identity(message)).encode(errors="surrogatepass")
        digest = hashlib.blake2b(digest + identity, digest_size=16).digest()
        digests.append(digest)
    return digests


def _identity(message: Message) -> tuple[object, ...]:
    if message.tool_calls:
        calls = ((c.id, c.name, _canonical(c.arguments_json)) for c in message.tool_calls)
        return (message.role, tuple(calls))
    if message.role == "tool":
        return (message.role, message.text, message.tool_call_id)
    return (message.role, message.text, message.name)


def _canonical(arguments_json: str) -> str:
    try:
        return json.dumps(json.loads(arguments_json), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments_json
