"""Contexts by difference: a replica is not sent the conversation that it has seen already.

The client remembers which answers a replica gave. A request that continues one of them names it by
the digests of its messages and of its tokens, and brings the messages that follow. The answer has
the response alone, and the client puts the whole history together. A replica that has forgotten the
context says so, and gets the request once more in full.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory, History
from dialoop.clients.inference_messages import samples_from_proto
from dialoop.environments.sessions.prompts import PromptChain, PromptDigest
from dialoop.errors import DialoopError
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from dialoop.clients.inference_messages import Question
    from dialoop.episode import Sample
    from dialoop.sequences import Sequence
    from dialoop.v1 import chat_pb2
    from dialoop.v1 import inference_service_pb2 as pb

    Send = Callable[[pb.GenerateRequest], Awaitable[pb.GenerateResponse]]
    Stream = Callable[[pb.GenerateRequest], AsyncGenerator[pb.GenerateStreamResponse, None]]

_MAX_CONTEXTS = 4096


@dataclass(frozen=True, slots=True)
class _Seen:
    """The messages of a context that the replica has."""

    history: History
    messages: PromptChain


class SeenContexts:
    """The contexts that a replica has of one client's conversations.

    `num_resends` counts the requests that were sent once more, in full.
    """

    def __init__(self) -> None:
        self.num_resends = 0
        self._seen: dict[PromptDigest, _Seen] = {}

    def __contains__(self, context: Sequence | None) -> bool:
        """Return whether the replica has answered with these tokens, and may still have them."""
        return context is not None and PromptChain.of(context.token_ids).digest in self._seen

    async def ask(self, question: Question, send: Send) -> tuple[Sample, ...]:
        """Send a question, as a difference where the replica has its context; return the samples.

        A question of text or token ids is sent as it is.
        """
        tokens = _tokens_of(question)
        seen = self._find(question, tokens)
        try:
            answer = await send(_request_of(question, seen, tokens))
        except DialoopError as error:
            self._forget(seen, tokens, error)
            seen = None
            answer = await send(_request_of(question, None, tokens))
        return self._samples_of(question, answer, seen, tokens)

    async def ask_stream(
        self, question: Question, send: Stream
    ) -> AsyncIterator[tuple[pb.GenerateStreamResponse, tuple[Sample, ...]]]:
        """Send a question as `ask` does; yield the answers, and with the last one the samples."""
        tokens = _tokens_of(question)
        seen = self._find(question, tokens)
        answers = send(_request_of(question, seen, tokens))
        try:
            first = await anext(answers, None)
        except DialoopError as error:  # a context is refused before anything is answered
            self._forget(seen, tokens, error)
            seen = None
            answers = send(_request_of(question, None, tokens))
            first = await anext(answers, None)
        async with aclosing(answers):
            answer = first
            while answer is not None:
                has_ended = answer.HasField("completed")
                samples = (
                    self._samples_of(question, answer.completed, seen, tokens) if has_ended else ()
                )
                yield answer, samples
                answer = await anext(answers, None)

    def _forget(self, seen: _Seen | None, tokens: PromptChain | None, error: DialoopError) -> None:
        """Forget a context that the replica does not have; raise any other error again."""
        if seen is None or tokens is None or error.reason != Reason.CONTEXT_UNKNOWN:
            raise error
        self.num_resends += 1
        self._seen.pop(tokens.digest, None)

    def _find(self, question: Question, tokens: PromptChain | None) -> _Seen | None:
        """Return the context's messages where the question continues them."""
        seen = None if tokens is None else self._seen.get(tokens.digest)
        if seen is None or len(seen.history) != question.num_context_messages:
            return None
        history = question.history
        assert history is not None  # a question without one has no tokens here
        is_continued = history.starts_with(seen.history)
        return seen if is_continued else None

    def _samples_of(
        self,
        question: Question,
        answer: pb.GenerateResponse,
        seen: _Seen | None,
        tokens: PromptChain | None,
    ) -> tuple[Sample, ...]:
        """Return the samples with their whole histories, and remember their contexts."""
        prompt = question.history
        if prompt is None:
            return samples_from_proto(answer)
        chain = PromptChain.of(prompt) if seen is None else _extend(seen, prompt)
        samples = []
        for sample, proto in zip(samples_from_proto(answer), answer.samples, strict=True):
            response = sample.history.response
            if sample.history.prompt is None and response is not None:
                sample = replace(sample, history=ChatHistory(prompt=prompt).respond(*response))
            samples.append(sample)
            if not proto.HasField("context") or response is None:
                continue
            continues = tokens is not None and sample.sequence.fork_cause is ForkCause.NONE
            before = tokens if continues and tokens is not None else PromptChain()
            messages, token_ids = chain.extend(response), before.extend(sample.sequence.token_ids)
            # Other digests than ours name another conversation: the next turn is sent in full.
            if (messages.digest, token_ids.digest) == _digests_of(proto.context):
                self._keep(token_ids.digest, _Seen(sample.history.require_full(), messages))
        return tuple(samples)

    def _keep(self, digest: PromptDigest, seen: _Seen) -> None:
        self._seen.pop(digest, None)  # so that the oldest comes first
        self._seen[digest] = seen
        if len(self._seen) > _MAX_CONTEXTS:
            del self._seen[next(iter(self._seen))]


def _tokens_of(question: Question) -> PromptChain | None:
    """Return the chain of the context's tokens; None without one, and for text or token ids."""
    if question.history is None or question.context is None:
        return None
    return PromptChain.of(question.context.token_ids)


def _request_of(
    question: Question, seen: _Seen | None, tokens: PromptChain | None
) -> pb.GenerateRequest:
    """Return the request: the messages after the context, or all of them."""
    if question.history is None:
        return question.to_proto()
    if seen is None or tokens is None:
        request = question.to_proto()
    else:
        added = question.history[len(seen.history) :]
        request = replace(question, history=added, context=None, num_context_messages=0).to_proto()
        named = request.known_context
        for message, chain in ((named.messages, seen.messages), (named.token_ids, tokens)):
            message.length, message.digest = chain.digest.length, chain.digest.digest
    request.keep_context = True
    return request


def _extend(seen: _Seen, prompt: History) -> PromptChain:
    return seen.messages.extend(prompt[len(seen.history) :])


def _digests_of(proto: pb.ContextDigest) -> tuple[PromptDigest, PromptDigest]:
    def digest(part: chat_pb2.PromptDigest) -> PromptDigest:
        return PromptDigest(part.length, part.digest)

    return digest(proto.messages), digest(proto.token_ids)
