"""Which sampled tokens belong to which turn of a trajectory.

A trajectory of two turns, the second in a sequence of its own:

    TurnTokens.of(trajectory).places      # (((0, slice(0, 3)),), ((1, slice(0, 2)),))
    TurnTokens.of(trajectory).counts      # (3, 2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.sequences import Floats, Source

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from dialoop.trajectory import Trajectory
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTokens:
    """Where the sampled tokens of a trajectory's T turns are.

    places: for each turn its runs of tokens, as (number of the sequence, slice of the sequence's
    sampled tokens). lengths: how many tokens each sequence has sampled.
    """

    places: tuple[tuple[tuple[int, slice], ...], ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> TurnTokens:
        """Find the tokens of each turn by the segments of the trajectory's sequences."""
        turns = [s.turn for row in trajectory.sequences for s in row.segments]
        places: list[list[tuple[int, slice]]] = [
            [] for _ in range(max([len(trajectory.turns), *(turn + 1 for turn in turns)]))
        ]
        lengths = []
        for number, row in enumerate(trajectory.sequences):
            end = 0
            for segment in row.segments:
                if segment.source is Source.MODEL:
                    run = slice(end, end + segment.length)
                    places[segment.turn].append((number, run))
                    end = run.stop
            lengths.append(end)
        return cls(places=tuple(map(tuple, places)), lengths=tuple(lengths))

    @property
    def counts(self) -> tuple[int, ...]:
        """Return how many tokens each turn sampled."""
        return tuple(sum(run.stop - run.start for _, run in runs) for runs in self.places)

    def gather(self, values: Rows[Floats]) -> list[Floats]:
        """Return each turn's values of its tokens, from float [M] of each sequence."""
        return [
            np.concatenate([values[number][run] for number, run in runs])
            if runs
            else np.empty(0, dtype=np.float32)
            for runs in self.places
        ]

    def scatter(self, of_turns: Rows[NDArray[np.floating[Any]]]) -> list[Floats]:
        """Return for each sequence float32 [M], from the values of each turn's tokens."""
        rows = [np.zeros(length, dtype=np.float32) for length in self.lengths]
        for runs, values in zip(self.places, of_turns, strict=True):
            start = 0
            for number, run in runs:
                size = run.stop - run.start
                rows[number][run] = values[start : start + size]
                start += size
        return rows
