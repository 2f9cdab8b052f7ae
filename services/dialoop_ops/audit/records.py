"""Rollouts as the checks see them, whoever wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from dialoop.tokens.tokenizer import Tokenizer
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

TRAINED, EVALUATION, DROPPED = "trained", "evaluation", "dropped"


def no_floats() -> Floats:
    """Return what a column is of which nothing is known."""
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What the sampling and the training are said to have been; None where nobody said.

    stop: texts that end an answer. rewards: columns of a dump that are rewards. probe_bound:
    largest difference in nats that a publish may show between trainer and engine. max_new_tokens:
    an answer of so many tokens was cut off.
    """

    temperature: float | None = None
    max_new_tokens: int | None = None
    max_staleness: int | None = None
    probe_bound: float | None = None
    stop: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()

    def or_else(self, other: Claims) -> Claims:
        """Return these claims, and where they say nothing what `other` says."""
        values = {
            name: getattr(other, name)
            for name in self.__slots__
            if getattr(self, name) in (None, ())
        }
        return replace(self, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """TokenRecord [start, end) that the policy wrote in one turn.

    stops: whether it ended its turn itself; None where that is unknown. content: the text of the
    message that came of it; None where there is none.
    """

    start: int
    end: int
    turn: int
    stops: bool | None = None
    content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One row of tokens: ids [L] and, for each of its M sampled tokens in order, what is known.

    logprobs: the sampler's, as many as were written; trainer_logprobs: of the policy that a step
    began with, NaN where unknown. Empty: unknown. versions: of the policy that sampled.
    """

    ids: Ids
    spans: tuple[Span, ...]
    logprobs: Floats = field(default_factory=no_floats)
    trainer_logprobs: Floats = field(default_factory=no_floats)
    versions: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    @property
    def num_sampled(self) -> int:
        """Return M."""
        return sum(span.end - span.start for span in self.spans)

    def positions(self) -> Ids:
        """Return [M]: where the sampled tokens stand."""
        parts = [np.arange(span.start, span.end, dtype=np.int32) for span in self.spans]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def has_logprobs(self) -> bool:
        """Return whether each sampled token has a log-prob."""
        return self.num_sampled > 0 and len(self.logprobs) == self.num_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRow:
    """What the trainer read: at which positions it trained, and which tokens it had there."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One trajectory, or one row of a dump.

    name: the trajectory's id, or where the row stands. task: what was asked, as far as equal tasks
    have equal texts. rewards: by name. length: what the policy wrote, in tokens where they are
    known and else in characters. staleness: of its oldest token when it was trained.
    structural: what is wrong with its masks as they were written, with the token where it shows.
    """

    name: str
    fate: str
    step: int | None
    group: str
    task: str
    reward: float | None
    rewards: dict[str, float]
    text: str
    length: int
    num_turns: int = 1
    num_tool_calls: int = 0
    advantage: float | None = None
    temperature: float | None = None
    staleness: int | None = None
    version: int | None = None
    is_cut_off: bool = False
    sequences: tuple[TokenRecord, ...] = ()
    trainer_rows: tuple[TrainerRow, ...] = ()
    structural: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A number after a train step; `count` is how many episodes it is a mean of, 0 if unknown."""

    step: int
    value: float
    count: int = 0


@dataclass(slots=True, kw_only=True)
class Dump:
    """What one path holds, in the order of writing.

    trained_reward and heldout: curves. fresh_mismatch: KL in nats between the sampler and the
    trainer on tokens of the same policy; publishes: (version, difference in nats).
    limits: what a check that was made could not look at, by fault.
    """

    path: Path
    kind: str
    rollouts: list[Rollout] = field(default_factory=list)
    claims: Claims = field(default_factory=Claims)
    tokenizer: Tokenizer | None = None
    trained_reward: list[CurvePoint] = field(default_factory=list)
    heldout: dict[str, list[CurvePoint]] = field(default_factory=dict)
    fresh_mismatch: list[CurvePoint] = field(default_factory=list)
    publishes: list[tuple[int, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    limits: dict[str, str] = field(default_factory=dict)

    def trained_rollouts(self) -> list[Rollout]:
        """Return the rollouts that were trained."""
        return [rollout for rollout in self.rollouts if rollout.fate == TRAINED]
