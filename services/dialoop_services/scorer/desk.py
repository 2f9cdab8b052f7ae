"""Where scoring happens: one thread at a time, beside the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dialoop.sequences import Floats
    from dialoop.sequences import Sequence as TokenSequence
    from dialoop.trajectory import Group

    from dialoop_services.scorer.scoring import Reference, Scoring


class LazyReference:
    """A reference model that is loaded when it is first needed; torch comes with it, not before."""

    def __init__(self, load: Callable[[], Reference]) -> None:
        self._load = load
        self._model: Reference | None = None

    def loaded(self) -> Reference:
        """The model, loaded by now."""
        if self._model is None:
            self._model = self._load()
        return self._model

    def logprobs_of_sampled(
        self, sequences: Sequence[TokenSequence], temperatures: Sequence[float]
    ) -> list[Floats]:
        """See `Reference`."""
        return self.loaded().logprobs_of_sampled(sequences, temperatures)

    def logprobs_of_all(self, token_ids: Sequence[Sequence[int]]) -> list[Floats]:
        """See `Reference`."""
        return self.loaded().logprobs_of_all(token_ids)


class Desk:
    """Scores one thing at a time: the worker and the servicer share the model and the cores."""

    def __init__(self, scoring: Scoring, reference: Reference | None) -> None:
        self._scoring = scoring
        self._reference = reference
        self._lock = asyncio.Lock()

    async def score(self, group: Group) -> Group:
        """The scored group; see `Scoring.score` for its errors."""
        async with self._lock:
            return await asyncio.to_thread(self._scoring.score, group)

    async def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[Floats]:
        """Per row float32 [L - 1] under the reference; PreconditionFailed when there is none."""
        if self._reference is None:
            raise PreconditionFailed(
                "This scorer has no reference model.",
                reason=Reason.NO_REFERENCE_MODEL,
                remedy="Set DIALOOP_SCORER_MODEL_DIR.",
            )
        async with self._lock:
            return await asyncio.to_thread(self._reference.logprobs_of_all, token_ids)
