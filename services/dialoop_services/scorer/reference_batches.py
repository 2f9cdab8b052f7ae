"""One reference model for many callers, which share its packed rows.

    batches = ReferenceBatches(model)
    await asyncio.gather(*(batches.logprobs_of_sampled(*group) for group in groups))   # two calls

The first group starts the model alone. What arrives while it computes is its next batch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Rows

    from dialoop.sequences import Floats, Sequence


class Reference(Protocol):
    """A model that gives log-probs of tokens, as `reference.ReferenceModel` does.

    This is a protocol because importing `reference` imports torch.
    """

    def logprobs_of_sampled(
        self, sequences: Rows[Sequence], temperatures: Rows[float]
    ) -> list[Floats]:
        """Return for each sequence float32 [M], nats, of its sampled tokens."""

    def logprobs_of_all(
        self, token_ids: Rows[Rows[int]], temperatures: Rows[float]
    ) -> list[Floats]:
        """Return for each row float32 [L - 1], nats, of all tokens but the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Request:
    sequences: Rows[Sequence]
    temperatures: Rows[float]
    answer: asyncio.Future[list[Floats]]


class ReferenceBatches:
    """Runs the model in a thread, for one batch at a time; loads it at its first use."""

    def __init__(self, load: Callable[[], Reference]) -> None:
        self._load = load
        self._model: Reference | None = None
        self._is_computing = asyncio.Lock()
        self.waiting: list[_Request] = []
        """What the next batch will hold."""
        self._running: asyncio.Task[None] | None = None

    def load(self) -> Reference:
        """Return the model; load it, and torch with it, if it is not loaded yet."""
        if self._model is None:
            self._model = self._load()
        return self._model

    async def logprobs_of_sampled(
        self, sequences: Rows[Sequence], temperatures: Rows[float]
    ) -> list[Floats]:
        """Return for each sequence of one group float32 [M], nats, of its sampled tokens."""
        answer: asyncio.Future[list[Floats]] = asyncio.get_running_loop().create_future()
        self.waiting.append(_Request(sequences=sequences, temperatures=temperatures, answer=answer))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._answer_all())
        return await answer

    async def logprobs_of_all(
        self, token_ids: Rows[Rows[int]], temperatures: Rows[float] = ()
    ) -> list[Floats]:
        """Return for each row float32 [L - 1], nats, of all tokens but the first.

        Without `temperatures`, one for each row, they are 1.
        """
        of_rows = temperatures or [1.0] * len(token_ids)
        async with self._is_computing:
            return await asyncio.to_thread(lambda: self.load().logprobs_of_all(token_ids, of_rows))

    async def _answer_all(self) -> None:
        while self.waiting:
            async with self._is_computing:
                batch = [request for request in self.waiting if not request.answer.done()]
                self.waiting = []
                await self._answer(batch)

    async def _answer(self, batch: Rows[_Request]) -> None:
        try:
            answers = await asyncio.to_thread(self._compute, batch)
        except Exception as error:
            if len(batch) > 1:  # one group's mistake is no other's
                for request in batch:
                    await self._answer([request])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        for request, logprobs in zip(batch, answers, strict=True):
            if not request.answer.done():
                request.answer.set_result(logprobs)

    def _compute(self, batch: Rows[_Request]) -> list[list[Floats]]:
        logprobs = iter(
            self.load().logprobs_of_sampled(
                [sequence for request in batch for sequence in request.sequences],
                [value for request in batch for value in request.temperatures],
            )
        )
        return [[next(logprobs) for _ in request.sequences] for request in batch]
