"""A reference model or teacher on a server that Dialoop does not run: log-probs over OpenAI's API.

It gives what `reference.ReferenceModel` gives, without torch. The server scores at temperature 1
alone, so trajectories that were sampled at another temperature are refused.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dialoop.errors import InvalidConfig, InvalidInput, Unsupported
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows
    from pathlib import Path

    from dialoop.sequences import Floats, Sequence

    from dialoop_services.config.outside import OutsideServer

_MAX_REQUESTS = 16


class OutsideReference:
    """Scores rows on a server, up to 16 at a time, for one caller at a time."""

    def __init__(self, server: OutsideServer, tokenizer: Tokenizer) -> None:
        self._server, self._tokenizer = server, tokenizer

    def logprobs_of_sampled(
        self, sequences: Rows[Sequence], temperatures: Rows[float]
    ) -> list[Floats]:
        """Return for each sequence float32 [M], nats, of its sampled tokens."""
        rows = self.logprobs_of_all([s.token_ids.tolist() for s in sequences], temperatures)
        pairs = zip(sequences, rows, strict=True)
        return [row[sequence.response_mask()[1:]] for sequence, row in pairs]

    def logprobs_of_all(
        self, token_ids: Rows[Rows[int]], temperatures: Rows[float]
    ) -> list[Floats]:
        """Return for each row float32 [L - 1], nats, of all tokens but the first.

        Raise InvalidInput (EMPTY_SEQUENCE), Unsupported (SAMPLING_UNSUPPORTED), or Unavailable.
        """
        if not all(len(ids) for ids in token_ids):
            raise InvalidInput("A row has no tokens.", reason=Reason.EMPTY_SEQUENCE)
        other = next((value for value in temperatures if value != 1.0), None)
        if other is not None:
            raise Unsupported(
                f"The server at {self._server.url} scores at temperature 1, and a trajectory was "
                f"sampled at {other:g}.",
                reason=Reason.SAMPLING_UNSUPPORTED,
                remedy="Sample at temperature 1, or name a reference_model in [scorer].",
            )
        return asyncio.run(self._score(token_ids))

    def require_scores(self) -> None:
        """Raise unless the server answers, has this tokenizer and scores given tokens."""
        with ThreadPoolExecutor(max_workers=1) as thread:  # the caller may be in an event loop
            thread.submit(asyncio.run, self._score([])).result()

    async def _score(self, rows: Rows[Rows[int]]) -> list[Floats]:
        room = asyncio.Semaphore(_MAX_REQUESTS)
        async with self._server.completions(self._tokenizer) as server:
            if not server.facts.scores_by:
                raise InvalidConfig(
                    f"The server at {self._server.url} gives no log-probs of given tokens.",
                    reason=Reason.UNSUPPORTED_LOGPROBS,
                    remedy="Use a server that takes prompt_logprobs (vLLM, Dialoop), or echo.",
                )

            async def score(row: Rows[int]) -> Floats:
                async with room:
                    return await server.logprobs([int(token) for token in row])

            async with asyncio.TaskGroup() as tasks:
                scores = [tasks.create_task(score(row)) for row in rows]
        return [task.result() for task in scores]


def load_outside_reference(server: OutsideServer, directory: Path) -> OutsideReference:
    """Return the reference on a server; `directory` has the tokenizer of its model."""
    reference = OutsideReference(server, Tokenizer.from_directory(directory))
    reference.require_scores()
    return reference
