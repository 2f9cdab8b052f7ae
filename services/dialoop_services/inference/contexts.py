"""Contexts that this replica has seen: conversations and their tokens, found by their digests.

A request names the context that it continues and brings what follows. The store is bounded: it
drops the contexts that were used least recently, and whoever names one of those sends the whole
conversation once more. A context is messages and token ids, so a load of weights changes none.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from dialoop.environments.sessions.prompts import PromptChain
from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause
from dialoop.v1 import chat_pb2
from dialoop.v1 import inference_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.chat import History, Message
    from dialoop.episode import Sample
    from dialoop.sequences import Sequence

_Key: TypeAlias = tuple[int, bytes, int, bytes]

# About what Python needs for a segment and a message, beside their tokens and text.
_SEGMENT_BYTES = 256
_MESSAGE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenContext:
    """Messages and the tokens that cover them, with the digests of both.

    Log-probs and further columns of the tokens stay with the caller.
    """

    history: History
    sequence: Sequence
    messages: PromptChain
    token_ids: PromptChain
    num_message_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return about how much memory it takes."""
        sequence = self.sequence
        num_token_bytes = sequence.token_ids.nbytes + _SEGMENT_BYTES * len(sequence.segments)
        return self.num_message_bytes + num_token_bytes

    def to_proto(self) -> pb.ContextDigest:
        """Return the digests by which a request names it."""
        messages, token_ids = self.messages.digest, self.token_ids.digest
        return pb.ContextDigest(
            messages=chat_pb2.PromptDigest(length=messages.length, digest=messages.digest),
            token_ids=chat_pb2.PromptDigest(length=token_ids.length, digest=token_ids.digest),
        )


class ContextStore:
    """The contexts used most recently, up to `max_bytes` in all.

    `num_resends` counts requests that named a context which is not here, by the reason they got.
    """

    def __init__(self, *, max_bytes: int = 64 << 20) -> None:
        self.num_resends = {Reason.CONTEXT_UNKNOWN.lower(): 0}
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._contexts: OrderedDict[_Key, SeenContext] = OrderedDict()

    def find(self, digest: pb.ContextDigest) -> SeenContext:
        """Return the context of these digests; PreconditionFailed (CONTEXT_UNKNOWN)."""
        context = self._contexts.get(_key_of(digest))
        if context is None:
            self.num_resends[Reason.CONTEXT_UNKNOWN.lower()] += 1
            raise PreconditionFailed(
                f"This replica has no context of {digest.messages.length} messages and "
                f"{digest.token_ids.length} tokens with those digests.",
                reason=Reason.CONTEXT_UNKNOWN,
                remedy="Send the whole history, with `context` and `num_context_messages`.",
            )
        return context

    def keep(
        self, sample: Sample, *, context: Sequence | None, after: SeenContext | None
    ) -> SeenContext:
        """Keep a sample's prompt and answer; return what names them.

        context: what the request continues. after: the same, where the request named it by digest.
        It is dropped before all others, since the conversation has gone on.
        """
        seen = _context_of(sample, context, after)
        digest = seen.to_proto()
        self._drop(_key_of(digest))
        self._contexts[_key_of(digest)] = seen
        self._num_bytes += seen.num_bytes
        if after is not None and _key_of(after.to_proto()) in self._contexts:
            self._contexts.move_to_end(_key_of(after.to_proto()), last=False)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._contexts)))
        return seen

    def _drop(self, key: _Key) -> None:
        context = self._contexts.pop(key, None)
        if context is not None:
            self._num_bytes -= context.num_bytes


def _context_of(sample: Sample, context: Sequence | None, after: SeenContext | None) -> SeenContext:
    history = sample.history.require_full()
    added = _only_tokens(sample.sequence)
    continues = context is not None and added.fork_cause is ForkCause.NONE
    if continues and context is not None:
        sequence = _only_tokens(context).extended_by(added)
    else:
        sequence = added
    if after is None:
        messages, token_ids = PromptChain.of(history), PromptChain.of(sequence.token_ids)
        return SeenContext(
            history=history,
            sequence=sequence,
            messages=messages,
            token_ids=token_ids,
            num_message_bytes=_bytes_of(history),
        )
    new_messages = history[len(after.history) :]
    return SeenContext(
        history=history,
        sequence=sequence,
        messages=after.messages.extend(new_messages),
        token_ids=after.token_ids.extend(added.token_ids)
        if continues
        else PromptChain.of(sequence.token_ids),
        num_message_bytes=after.num_message_bytes + _bytes_of(new_messages),
    )


def _only_tokens(sequence: Sequence) -> Sequence:
    return replace(sequence, inference_logprobs=np.empty(0, dtype=np.float32), columns={})


def _bytes_of(history: Iterable[Message]) -> int:
    """Return about how much memory the messages take."""
    return sum(_MESSAGE_BYTES + len(message.text) for message in history)


def _key_of(digest: pb.ContextDigest) -> _Key:
    messages, token_ids = digest.messages, digest.token_ids
    return messages.length, messages.digest, token_ids.length, token_ids.digest
