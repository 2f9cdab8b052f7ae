"""What has arrived of a streamed answer, so that another replica can go on after it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.clients.errors import require_count
from dialoop.sequences import Source, sequence_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dialoop.clients.inference import SampleChunk
    from dialoop.episode import Sample
    from dialoop.sequences import Sequence
    from dialoop.trajectory import SamplingParams

# An answer that may have so many tokens is asked for alone, and streamed where that can be.
_LONG_ANSWER = 256
# So many tokens and those on their way are lost with a replica: 2 % of an answer of 2,000.
_CHUNK_TOKENS = 32


def may_be_long(sampling: SamplingParams | None) -> bool:
    """Return whether the answer may have so many tokens that others should not wait for it."""
    return sampling is not None and (sampling.max_new_tokens or 0) >= _LONG_ANSWER


def is_worth_streaming(sampling: SamplingParams | None) -> bool:
    """Return whether another replica may finish the answer, and losing it would cost much.

    A seeded answer is sampled again as a whole, since its seed names all its tokens. A constrained
    one has a state that its tokens alone do not give back.
    """
    if sampling is None or sampling.seed is not None:
        return False
    return may_be_long(sampling) and not sampling.constraint and not sampling.top_logprobs


class PartialAnswer:
    """The tokens of one answer so far, with the log-probs and versions of who sampled them."""

    def __init__(self) -> None:
        self._chunks: list[SampleChunk] = []
        self._began_at = time.perf_counter()

    def __len__(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self._chunks)

    @property
    def sequence(self) -> Sequence | None:
        """Return the tokens as a sequence of the policy's own; None where there are none."""
        if not self._chunks:
            return None
        return sequence_of(
            (
                (chunk.token_ids, {"source": Source.MODEL, "policy_version": chunk.policy_version})
                for chunk in self._chunks
            ),
            logprobs=(value for chunk in self._chunks for value in chunk.inference_logprobs),
        )

    async def finish(self, stream: Callable[..., AsyncIterator[SampleChunk]]) -> tuple[Sample, ...]:
        """Ask a replica for the rest and return the whole answer, alone in a tuple.

        What arrives is kept, also where the replica fails.
        """
        before = self.sequence
        samples: tuple[Sample, ...] = ()
        async for chunk in stream(partial_answer=before, chunk_tokens=_CHUNK_TOKENS):
            if chunk.token_ids:
                self._chunks.append(chunk)
            samples = chunk.samples or samples
        require_count(len(samples), 1, "samples")
        if before is None:
            return samples
        # The first replica's time counts too.
        elapsed_s = time.perf_counter() - self._began_at
        return tuple(replace(sample, generate_s=elapsed_s) for sample in samples)
