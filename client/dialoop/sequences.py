"""Token rows and their segment tables, which say who wrote which token.

A sequence of nine tokens, of which the policy sampled three (two of them under version 4):

    token_ids           5  8  2 | 11 12 | 7 | 3 | 9 | 2
    source              PROMPT  | MODEL | MODEL | TEMPLATE | TOOL | TEMPLATE
    policy_version      -         main-4  main-5
    inference_logprobs            -0.1 -2.3   -0.4            (one per MODEL token, nothing else)

Every mask is derived from the table, and nothing is padded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dialoop.errors import InvalidSequence
from dialoop.reasons import Reason

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


class Source(IntEnum):
    """Who wrote a token."""

    PROMPT = 1
    TEMPLATE = 2
    MODEL = 3
    ENVIRONMENT = 4
    TOOL = 5


class ForkCause(IntEnum):
    """Why a sequence was started."""

    NONE = 1
    TEMPLATE_REWRITES_PAST = 2
    HISTORY_REWRITTEN = 3
    BRANCHED = 4


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """(lineage, number): the number grows by one per publish, within a lineage."""

    lineage: str
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}-{self.number}"

    def staleness_of(self, older: PolicyVersion) -> int:
        """Return how many versions `older` lags behind this one; both must be of one lineage."""
        if older.lineage != self.lineage:
            raise InvalidSequence(
                f"Policy {older} is of another lineage than {self}.",
                reason=Reason.LINEAGE_MISMATCH,
                remedy="Drop data of a lineage that was given up.",
            )
        return self.number - older.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens with one origin; segments tile their sequence."""

    start: int
    length: int
    source: Source
    turn: int = 0
    message_index: int | None = None
    char_start: int = 0
    char_length: int = 0
    policy_version: PolicyVersion | None = None

    @property
    def end(self) -> int:
        """Return the index one past the last token."""
        return self.start + self.length

    def shift(self, offset: int) -> Segment:
        """Return the same segment `offset` tokens later."""
        return replace(self, start=self.start + offset)


class Along(IntEnum):
    """Which tokens of a sequence the rows of a column belong to."""

    TOKENS = 1
    SAMPLED = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """Further numbers of a sequence's tokens, which travel with it.

    values: [N, ...] of bool, uint8, uint16, int32, int64 or a float, with a row for each token of
    the sequence or, along SAMPLED, for each MODEL token in order.

    Column(values=np.zeros((9, 2, 4), np.uint8), along=Along.TOKENS)
    """

    values: NDArray[Any]
    along: Along

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column):
            return NotImplemented
        return (
            self.along is other.along
            and self.values.dtype == other.values.dtype
            and np.array_equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]  # holds an array


_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def is_column_name(name: str) -> bool:
    """Return whether a further column may have the name; fields of Sequence have theirs."""
    return bool(_COLUMN_NAME.fullmatch(name)) and name not in Sequence.__slots__


def _no_floats() -> Floats:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """One flat token row of a trajectory.

    token_ids int32 [L]; inference_logprobs, ref_logprobs and token_advantages float32 [M], where M
    is the number of MODEL tokens, in order; empty means unknown. columns: further arrays by name,
    such as routed_experts.
    """

    token_ids: Ids
    segments: tuple[Segment, ...]
    inference_logprobs: Floats = field(default_factory=_no_floats)
    ref_logprobs: Floats = field(default_factory=_no_floats)
    advantage: float | None = None
    token_advantages: Floats = field(default_factory=_no_floats)
    fork_cause: ForkCause = ForkCause.NONE
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._require_tiling()
        for name, column in self.columns.items():
            self._require_column(name, column)
        for name in ("inference_logprobs", "ref_logprobs", "token_advantages"):
            self._require_one_per_model_token(name)
        for segment in self.segments:
            if (segment.source is Source.MODEL) != (segment.policy_version is not None):
                raise InvalidSequence(
                    f"The segment at {segment.start} has source {segment.source.name} and "
                    f"policy version {segment.policy_version}.",
                    remedy="Exactly the sampled tokens carry a policy version.",
                )

    def _require_tiling(self) -> None:
        position = 0
        for segment in self.segments:
            if segment.start != position or segment.length <= 0:
                raise InvalidSequence(
                    f"Segments leave a gap or overlap at token {position}.",
                    reason=Reason.RAGGED,
                    remedy="Segments must tile the sequence in order.",
                )
            position = segment.end
        if position != len(self.token_ids):
            raise InvalidSequence(
                f"Segments cover {position} of {len(self.token_ids)} tokens.",
                reason=Reason.RAGGED,
                remedy="Segments must tile the sequence in order.",
            )

    def _require_one_per_model_token(self, name: str) -> None:
        values: Floats = getattr(self, name)
        if len(values) not in (0, self.num_model_tokens):
            raise InvalidSequence(
                f"{name} has {len(values)} values for {self.num_model_tokens} sampled tokens.",
                reason=Reason.RAGGED,
                remedy="Give one value per MODEL token, and none for others.",
            )

    def _require_column(self, name: str, column: Column) -> None:
        if not is_column_name(name):
            raise InvalidSequence(
                f"A column is named '{name[:64]}'.",
                reason=Reason.BAD_COLUMN,
                remedy="Use up to 64 of a-z, 0-9 and _, and no name of a field of Sequence.",
            )
        num_rows = len(self) if column.along is Along.TOKENS else self.num_model_tokens
        if column.values.shape[:1] != (num_rows,):
            raise InvalidSequence(
                f"Column {name} has shape {list(column.values.shape)}, along "
                f"{column.along.name} of {num_rows} tokens.",
                reason=Reason.RAGGED,
                remedy="Give one row for each of them.",
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return (
            self.segments == other.segments
            and self.fork_cause == other.fork_cause
            and self.advantage == other.advantage
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.inference_logprobs, other.inference_logprobs)
            and np.array_equal(self.ref_logprobs, other.ref_logprobs)
            and np.array_equal(self.token_advantages, other.token_advantages)
            and self.columns == other.columns
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    @property
    def num_model_tokens(self) -> int:
        """Return how many tokens the policy sampled and this sequence owns."""
        return sum(s.length for s in self.segments if s.source is Source.MODEL)

    @property
    def policy_versions(self) -> tuple[PolicyVersion, ...]:
        """Return the versions of the sampled tokens, without repeats, in order of first use."""
        versions = (s.policy_version for s in self.segments if s.policy_version is not None)
        return tuple(dict.fromkeys(versions))

    def response_mask(self) -> Mask:
        """Return bool [L]: whether the policy wrote the token."""
        mask = np.zeros(len(self), dtype=np.bool_)
        for segment in self.segments:
            if segment.source is Source.MODEL:
                mask[segment.start : segment.end] = True
        return mask

    def prefix_hash(self, num_tokens: int | None = None) -> str:
        """Return the name of the node that the first (or all) tokens reach in a tree of texts."""
        return prefix_hash(self.token_ids[:num_tokens])

    def token_versions(self) -> tuple[PolicyVersion, ...]:
        """Return the policy version of each MODEL token, in order."""
        versions: list[PolicyVersion] = []
        for segment in self.segments:
            if segment.policy_version is not None:
                versions.extend([segment.policy_version] * segment.length)
        return tuple(versions)

    def extended_by(self, appended: Sequence) -> Sequence:
        """Return this sequence followed by new tokens, whose segments count from 0.

        Both have the same columns; one that has no rows yet may lack them.
        """
        return replace(
            self,
            token_ids=np.concatenate([self.token_ids, appended.token_ids]),
            segments=self.segments + tuple(s.shift(len(self)) for s in appended.segments),
            inference_logprobs=np.concatenate(
                [self.inference_logprobs, appended.inference_logprobs]
            ),
            columns=self._columns_with(appended),
        )

    def _columns_with(self, appended: Sequence) -> dict[str, Column]:
        joined: dict[str, Column] = {}
        for name in {**self.columns, **appended.columns}:
            some = [s.columns[name] for s in (self, appended) if name in s.columns]
            values = np.concatenate([column.values for column in some])
            # The check of the joined sequence refuses a column with too few rows.
            joined[name] = Column(values=values, along=some[0].along)
        return joined

    def as_context(self, num_tokens: int | None = None) -> Sequence:
        """Return the same (or the first) tokens as a fork's context, which is not trained again."""
        end = len(self) if num_tokens is None else num_tokens
        segments = tuple(
            replace(
                s,
                length=min(s.end, end) - s.start,
                source=Source.TEMPLATE if s.source is Source.TEMPLATE else Source.PROMPT,
                policy_version=None,
            )
            for s in self.segments
            if s.start < end
        )
        columns = {
            name: replace(column, values=column.values[:end])
            for name, column in self.columns.items()
            if column.along is Along.TOKENS
        }
        return Sequence(
            token_ids=self.token_ids[:end],
            segments=segments,
            fork_cause=self.fork_cause,
            columns=columns,
        )

    def of_turns(self, start: int, end: int) -> Sequence | None:
        """Return the tokens up to the last one sampled in turns [start, end); None without any.

        What was sampled in other turns is context, and turns count from `start`.
        """
        model = [s for s in self.segments if s.source is Source.MODEL]
        is_kept = [start <= s.turn < end for s in model]
        if not any(is_kept):
            return None
        cut = max(s.end for s, kept in zip(model, is_kept, strict=True) if kept)
        keeps = np.repeat(np.array(is_kept), [s.length for s in model])

        def relabel(segment: Segment) -> Segment:
            turn = min(max(segment.turn, start), end - 1) - start
            if segment.source is not Source.MODEL or start <= segment.turn < end:
                return replace(segment, turn=turn)
            return replace(segment, turn=turn, source=Source.PROMPT, policy_version=None)

        def values_of(values: Floats) -> Floats:
            return values[keeps] if len(values) else values

        return replace(
            self,
            token_ids=self.token_ids[:cut],
            segments=tuple(relabel(s) for s in self.segments if s.start < cut),
            inference_logprobs=values_of(self.inference_logprobs),
            ref_logprobs=values_of(self.ref_logprobs),
            token_advantages=values_of(self.token_advantages),
            columns={
                name: replace(
                    column,
                    values=column.values[:cut]
                    if column.along is Along.TOKENS
                    else column.values[keeps],
                )
                for name, column in self.columns.items()
            },
        )


def prefix_hash(token_ids: Iterable[int]) -> str:
    """Return 32 hex digits that name a row of token ids; equal rows have equal names.

    It is blake2b over the ids as little-endian int64, the same on every machine.
    """
    ids = np.asarray(list(token_ids), dtype="<i8")
    return blake2b(ids.tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """Numbers of some tokens of one sequence of a trajectory.

    positions: int32 [K], rising indices into the sequence's token_ids. values: float32 [K].
    """

    trajectory_id: str
    sequence_index: int
    positions: Ids
    values: Floats


def sequence_of(
    pieces: Iterable[tuple[Iterable[int], dict[str, Any]]], *, logprobs: Iterable[float] = ()
) -> Sequence:
    """Build a sequence from (token ids, segment fields) pieces; empty pieces vanish.

    sequence_of([([5, 8], {"source": Source.PROMPT}), ([2], {"source": Source.TEMPLATE})])
    """
    ids: list[int] = []
    segments: list[Segment] = []
    for piece, fields in pieces:
        tokens = list(piece)
        if tokens:
            segments.append(Segment(start=len(ids), length=len(tokens), **fields))
            ids.extend(tokens)
    return Sequence(
        token_ids=np.array(ids, dtype=np.int32),
        segments=tuple(segments),
        inference_logprobs=np.array(list(logprobs), dtype=np.float32),
    )
