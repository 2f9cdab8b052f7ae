"""The columns of a train step, in the order in which a step computes them, and whose each value is.

rewards -> advantages -> rows -> prepared -> and for each update: packing, forward, loss, gradient
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from dialoop_learning.packing.rows import OPTIONAL, TokenRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dialoop.sequences import Sequence as TokenSequence
    from dialoop.trajectory import Group
    from torch import Tensor

    from dialoop_services.trainer.step_replay.trace import StepTrace, UpdateTrace

_OF_TOKENS = ("token_ids", "response_mask")
_PACKED = ("packed_tokens", "position_ids", "sample_mask", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuePlace:
    """Whose a value is. sequence: number among the trajectory's trained ones. token: index there.

    what: a name where it is of no trajectory, such as a parameter's.
    """

    trajectory_id: str = ""
    sequence: int | None = None
    token: int | None = None
    what: str = ""

    def __str__(self) -> str:
        if not self.trajectory_id:
            return self.what
        parts = [f"trajectory {self.trajectory_id}"]
        parts += [] if self.sequence is None else [f"sequence {self.sequence}"]
        parts += [] if self.token is None else [f"token {self.token}"]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumn:
    """Values [N] of one stage; `place(i)` says whose the i-th is."""

    stage: str
    name: str
    values: Tensor
    place: Callable[[int], ValuePlace]

    @property
    def key(self) -> str:
        """Return the name in the file of columns."""
        return f"{self.stage}/{self.name}"


def advantages_of(sequence: TokenSequence) -> list[float]:
    """Return the advantage of each sampled token; none where the sequence has none."""
    if len(sequence.token_advantages):
        return [float(value) for value in sequence.token_advantages]
    value = sequence.advantage
    return [] if value is None else [value] * sequence.num_model_tokens


def reward_columns(groups: Sequence[Group]) -> Iterator[StepColumn]:
    """Yield the reward of each trajectory, float64."""
    trajectories = [t for group in groups for t in group.trajectories]
    places = [ValuePlace(trajectory_id=t.trajectory_id) for t in trajectories]
    values = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    yield StepColumn(stage="rewards", name="reward", values=values, place=partial(_at, places))


def advantage_columns(groups: Sequence[Group]) -> Iterator[StepColumn]:
    """Yield the advantage of each sampled token, float32."""
    values: list[float] = []
    places: list[ValuePlace] = []
    for trajectory in (t for group in groups for t in group.trajectories):
        for number, sequence in enumerate(trajectory.sequences):
            tokens = sequence.response_mask().nonzero()[0].tolist()
            of_sequence = advantages_of(sequence)
            values += of_sequence
            places += [
                ValuePlace(trajectory_id=trajectory.trajectory_id, sequence=number, token=token)
                for token in tokens[: len(of_sequence)]
            ]
    yield StepColumn(
        stage="advantages",
        name="advantage",
        values=torch.tensor(values, dtype=torch.float32),
        place=partial(_at, places),
    )


def row_columns(groups: Sequence[Group], rows: Sequence[TokenRow]) -> Iterator[StepColumn]:
    """Yield what the rows hold before the model reads them."""
    places = _places_of_rows(groups, rows)
    yield from _of_rows("rows", rows, places, (*_OF_TOKENS, *OPTIONAL))
    temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
    yield StepColumn(
        stage="rows", name="temperature", values=temperatures, place=partial(_at, places)
    )


def model_columns(groups: Sequence[Group], trace: StepTrace) -> Iterator[StepColumn]:
    """Yield what the model computed: prepared values, then the stages of each update."""
    places = _places_of_rows(groups, trace.prepared)
    names = ("proximal_logprobs", "ref_logprobs", "advantages")
    yield from _of_rows("prepared", trace.prepared, places, names)
    for number, update in enumerate(trace.updates):
        yield from _of_update(f"update {number}", trace, update, places)


def _of_update(
    stage: str, trace: StepTrace, update: UpdateTrace, places: Sequence[ValuePlace]
) -> Iterator[StepColumn]:
    own = [[update.order[i] for i in indices] for indices in update.packing]
    flat = [row for packed in own for row in packed]
    packing = torch.tensor([[k, row] for k, rows in enumerate(own) for row in rows]).flatten()
    owners = [places[row] for row in flat]
    yield StepColumn(
        stage=f"{stage} packing",
        name="row",
        values=packing,
        place=lambda index: owners[index // 2],
    )
    lengths = [length for batch in update.batches for length in batch.lengths]
    tokens = torch.arange(sum(lengths))
    of_token = partial(_at_token, owners, _ends(lengths), tokens)
    for name in _PACKED:
        values = torch.cat([getattr(batch, name) for batch in update.batches])
        yield StepColumn(stage=f"{stage} packing", name=name, values=values, place=of_token)
    masks = torch.cat([batch.loss_mask for batch in update.batches])
    of_trained = partial(_at_token, owners, _ends(lengths), masks.nonzero().squeeze(-1))
    logprobs = torch.cat(update.logprobs)
    yield StepColumn(stage=f"{stage} forward", name="logprobs", values=logprobs, place=of_trained)
    if len(update.slopes) == len(update.batches):
        slopes = torch.cat([update.slopes[k] for k in range(len(update.batches))])
        yield StepColumn(stage=f"{stage} loss", name="slope", values=slopes, place=of_trained)
    packed = [ValuePlace(what=f"packed row {number}") for number in range(len(update.losses))]
    yield StepColumn(
        stage=f"{stage} loss",
        name="loss",
        values=torch.tensor([*update.losses, update.loss], dtype=torch.float64),
        place=partial(_at, [*packed, ValuePlace(what="the whole update")]),
    )
    parameters = [ValuePlace(what=f"parameter {name}") for name in trace.parameters]
    yield StepColumn(
        stage=f"{stage} gradient",
        name="sum of bits",
        values=torch.tensor(update.gradient_bits, dtype=torch.int64),
        place=partial(_at, parameters),
    )
    yield StepColumn(
        stage=f"{stage} gradient",
        name="norm",
        values=torch.tensor([update.grad_norm, update.learning_rate], dtype=torch.float64),
        place=partial(_at, [ValuePlace(what="norm"), ValuePlace(what="learning rate")]),
    )


def _of_rows(
    stage: str, rows: Sequence[TokenRow], places: Sequence[ValuePlace], names: Sequence[str]
) -> Iterator[StepColumn]:
    for name in names:
        held = [(row, p) for row, p in zip(rows, places, strict=True) if _has(row, name)]
        if not held:
            continue
        lengths = [len(getattr(row, name)) for row, _ in held]
        of_tokens = name in _OF_TOKENS
        tokens = torch.cat(
            [
                torch.arange(len(row.token_ids))
                if of_tokens
                else row.response_mask.nonzero().squeeze(-1)
                for row, _ in held
            ]
        )
        owners = [p for _, p in held]
        yield StepColumn(
            stage=stage,
            name=name,
            values=torch.cat([getattr(row, name) for row, _ in held]),
            place=partial(_at_index, owners, _ends(lengths), tokens),
        )


def _has(row: TokenRow, name: str) -> bool:
    return getattr(row, name) is not None


def _places_of_rows(groups: Sequence[Group], rows: Sequence[TokenRow]) -> list[ValuePlace]:
    counts: dict[tuple[int, int], int] = {}
    places = []
    for row in rows:
        key = (row.group_index, row.trajectory_index or 0)
        number = counts.get(key, 0)
        counts[key] = number + 1
        trajectory = groups[key[0]].trajectories[key[1]]
        places.append(ValuePlace(trajectory_id=trajectory.trajectory_id, sequence=number))
    return places


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0)


def _at(places: Sequence[ValuePlace], index: int) -> ValuePlace:
    return places[index]


def _at_index(owners: Sequence[ValuePlace], ends: Tensor, tokens: Tensor, index: int) -> ValuePlace:
    """Return the place of the index-th value, whose sequence is the one that `ends` after it."""
    owner = owners[int(torch.searchsorted(ends, index, right=True))]
    return ValuePlace(
        trajectory_id=owner.trajectory_id, sequence=owner.sequence, token=int(tokens[index])
    )


def _at_token(owners: Sequence[ValuePlace], ends: Tensor, tokens: Tensor, index: int) -> ValuePlace:
    """Return the place of a value whose position in all packed rows is `tokens[index]`."""
    position = int(tokens[index])
    number = int(torch.searchsorted(ends, position, right=True))
    owner = owners[number]
    start = int(ends[number - 1]) if number else 0
    return ValuePlace(
        trajectory_id=owner.trajectory_id, sequence=owner.sequence, token=position - start
    )
