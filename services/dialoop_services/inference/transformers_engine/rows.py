"""One running sample of the transformers engine: its tokens, versions and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from dialoop.trajectory import SamplingParams, StopReason

from dialoop_services.inference.engine import Sampled, StopTokens, TokenChunk, VersionSpan

if TYPE_CHECKING:
    from dialoop.sequences import PolicyVersion
    from numpy.typing import NDArray

    from dialoop_services.inference.engine import OnBegin, OnTokens, TopLogprobs
    from dialoop_services.inference.weights.loadable import Adapter

Decode = Callable[[Sequence[int]], str]


class BatchRow:
    """A prompt and what has been sampled after it."""

    def __init__(  # noqa: PLR0913 - the fields of a request
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        room: int,
        generator: torch.Generator,
        on_tokens: OnTokens | None,
        adapter: Adapter | None = None,
        on_begin: OnBegin | None = None,
    ) -> None:
        self.ids = list(prompt_ids)
        self.sampling = sampling
        self.generator = generator
        self.adapter = adapter
        self.stop_reason: StopReason | None = None
        self.done: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._num_prompt = len(self.ids)
        self._stop = stop
        self._watch = stop.watch and stop.watch()
        self._room = room
        self._on_tokens = on_tokens
        self._on_begin = on_begin
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._versions: list[PolicyVersion] = []
        # One array for each pass, of the tokens that it computed; a new admission replaces all.
        self._experts: list[NDArray[np.int64]] = []
        self._stop_string = ""
        self._num_streamed = 0
        self._queued = time.monotonic()
        self._queue_s = 0.0

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, or nobody waits for it any more."""
        return self.stop_reason is not None or self.done.done()

    def note_admission(self) -> None:
        """Note the end of waiting, once."""
        if self._versions:
            return
        self._queue_s = time.monotonic() - self._queued
        if self._on_begin is not None:
            self._on_begin()

    def note_experts(self, computed: NDArray[np.int64]) -> None:
        """Note the experts [N, layers, k] of all tokens so far, or of the last one."""
        if len(computed) == len(self.ids):
            self._experts.clear()
        self._experts.append(computed)

    def append(
        self,
        token: int,
        logprob: float,
        version: PolicyVersion,
        *,
        decode: Decode,
        top: TopLogprobs | None = None,
    ) -> None:
        """Append one sampled token, and end the sample if it stops there."""
        if top is not None:
            self._top_logprobs.append(top)
        self.ids.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        if token in self._stop.by_id:
            self._end(StopReason.STOP, self._stop.by_id[token])
        elif (stop_string := self._find_stop_string(decode)) is not None:
            self._end(StopReason.STOP, stop_string)
        elif len(self._logprobs) == self._room:
            self._end(StopReason.LENGTH, "")

    def deliver(self) -> None:
        """Give new tokens, and the end, to the waiting caller; runs on the event loop."""
        if self.done.done():
            return
        if self._on_tokens is not None:
            for index in range(self._num_streamed, len(self._versions)):
                self._on_tokens(
                    TokenChunk(
                        token_ids=(self.ids[self._num_prompt + index],),
                        logprobs=(self._logprobs[index],),
                        policy_version=self._versions[index],
                        top_logprobs=tuple(self._top_logprobs[index : index + 1]),
                    )
                )
            self._num_streamed = len(self._versions)
        if self.stop_reason is not None:
            self.done.set_result(
                Sampled(
                    token_ids=tuple(self.ids[self._num_prompt :]),
                    logprobs=tuple(self._logprobs),
                    top_logprobs=tuple(self._top_logprobs),
                    versions=spans_of(self._versions),
                    stop_reason=self.stop_reason,
                    stop_string=self._stop_string,
                    queue_s=self._queue_s,
                    routed_experts=np.concatenate(self._experts) if self._experts else None,
                )
            )

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def _end(self, reason: StopReason, stop_string: str) -> None:
        self.stop_reason, self._stop_string = reason, stop_string

    def _find_stop_string(self, decode: Decode) -> str | None:
        """Return the stop string that the last token completed; a token is at least a byte."""
        if self._watch is not None:
            return self._watch(self.ids[-1])
        if not self._stop.strings:
            return None
        longest = max(len(string.encode()) for string in self._stop.strings)
        sampled = self.ids[self._num_prompt :]
        text = decode(sampled[-longest - 1 :])
        return next((string for string in self._stop.strings if string in text), None)


def generator_of(
    sampling: SamplingParams, index: int, *, shared: torch.Generator
) -> torch.Generator:
    """Return the generator of sample `index` of a request: of its own seed, or the shared one."""
    if sampling.seed is None:
        return shared
    return torch.Generator().manual_seed(sampling.seed + index)


def distinct(rows: Sequence[BatchRow]) -> tuple[list[BatchRow], list[int]]:
    """Return the rows that differ in tokens or adapter, and which of them each row equals."""
    places: dict[tuple[tuple[int, ...], str | None], int] = {}
    keys = [(tuple(row.ids), row.adapter.key if row.adapter else None) for row in rows]
    which = [places.setdefault(key, len(places)) for key in keys]
    return [rows[which.index(place)] for place in range(len(places))], which


def spans_of(versions: Sequence[PolicyVersion]) -> tuple[VersionSpan, ...]:
    """Return the runs of equal versions."""
    starts = [i for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(start=start, length=end - start, policy_version=versions[start])
        for start, end in zip(starts, ends, strict=False)
    )
