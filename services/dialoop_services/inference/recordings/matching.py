"""Which earlier answer a call continues, told from its messages.

A client gives back what it was given, in its own spelling: null for an empty content, other JSON
for the same arguments, no reasoning. A message with tool calls is known by their ids, which are
given out once; one without by its text. A message whose meaning was changed is another message.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.chat import History

if TYPE_CHECKING:
    from dialoop.chat import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An answer of a recording: the index of its call, and of the choice."""

    call: int
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What was asked, and the message that was given out for it."""

    origin: Origin
    asked: History
    given: Message

    @property
    def full(self) -> History:
        """The conversation with the answer."""
        return self.asked.append(self.given)


class Pasts:
    """Answers by the digest of the conversation that ends with them."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, list[Answered]] = {}

    def add(self, answered: Answered, variant: str) -> None:
        """Keep one more answer."""
        digest = _digests(answered.full, variant)[-1]
        self._by_digest.setdefault(digest, []).append(answered)

    def find(self, asked: History, variant: str) -> Answered | None:
        """The answer with the longest conversation that `asked` begins with; the latest of them."""
        digests = _digests(asked, variant)
        for length in range(len(asked) - 1, 0, -1):
            for answered in reversed(self._by_digest.get(digests[length - 1], ())):
                if begins_with(asked, answered.full):
                    return answered
        return None


def begins_with(asked: History, past: History) -> bool:
    """Whether a conversation begins with another, message by message."""
    return len(asked) >= len(past) and all(
        is_same(one, other) for one, other in zip(asked, past, strict=False)
    )


def is_same(one: Message, other: Message) -> bool:
    """Whether two messages are one, differently spelled."""
    if _identity(one) != _identity(other):
        return False
    # Clients drop or trim the text beside tool calls.
    texts = {one.text.strip(), other.text.strip()}
    return not one.tool_calls or len(texts - {""}) <= 1


def _digests(history: History, variant: str) -> list[bytes]:
    """A digest of every beginning of the conversation."""
    found: list[bytes] = []
    digest = variant.encode()
    for message in history:
        identity = repr(_identity(message)).encode(errors="surrogatepass")
        digest = hashlib.blake2b(digest + identity, digest_size=16).digest()
        found.append(digest)
    return found


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
