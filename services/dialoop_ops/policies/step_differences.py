"""Compare a repeated train step with the kept one, column by column in the order of its stages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dialoop.trajectory import Group
from dialoop_services.trainer.records.rows import as_row, trajectory_files
from dialoop_services.trainer.step_replay.columns import StepColumn, ValuePlace
from dialoop_services.trainer.step_replay.trace import bits_of
from torch import Tensor

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Tolerance of floats where equal bits are not promised."""
_LISTS = ("token_ids", "inference_logprobs", "token_advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first value that differs: kept and repeated, as text."""

    stage: str
    column: str
    place: ValuePlace
    kept: str
    repeated: str

    def __str__(self) -> str:
        where = f" at {self.place}" if str(self.place) else ""
        return (
            f"stage {self.stage}, {self.column}{where}: kept {self.kept}, repeated {self.repeated}"
        )


def first_difference(
    columns: Iterable[StepColumn],
    kept: Mapping[str, Tensor],
    names: Sequence[str],
    *,
    is_exact: bool = True,
) -> Difference | None:
    """Return the first difference of repeated columns from those of the same names in `kept`.

    Not `is_exact`: floats may differ by the tolerance. `names` are all that these stages have, so
    that a column which is no longer computed differs, too.
    """
    left = list(names)
    for column in columns:
        before = kept.get(column.key)
        if before is None:
            return _lacking(column.stage, column.name, "nothing", "a column")
        if column.key in left:
            left.remove(column.key)
        if difference := _compare(column, before, is_exact=is_exact):
            return difference
    if left:
        stage, _, name = left[0].partition("/")
        return _lacking(stage, name, "a column", "nothing")
    return None


def _compare(column: StepColumn, before: Tensor, *, is_exact: bool) -> Difference | None:
    now = column.values.contiguous()
    if before.dtype != now.dtype:
        return _lacking(column.stage, column.name, str(before.dtype), str(now.dtype))
    if column.key.endswith(" gradient/sum of bits") and not is_exact:
        return None  # it has a meaning only where bits are equal
    size = min(len(before), len(now))
    same = _are_same(before[:size], now[:size], is_exact=is_exact)
    if bool(same.all()):
        if len(before) == len(now):
            return None
        lengths = [f"{len(values)} values" for values in (before, now)]
        return _lacking(column.stage, column.name, *lengths)
    index = int((~same).nonzero()[0])
    return Difference(
        stage=column.stage,
        column=column.name,
        place=column.place(index),
        kept=_text(before[index]),
        repeated=_text(now[index]),
    )


def _are_same(before: Tensor, now: Tensor, *, is_exact: bool) -> Tensor:
    if is_exact or not now.is_floating_point():
        return bits_of(before) == bits_of(now)
    return torch.isclose(before, now, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


def _lacking(stage: str, column: str, before: str, now: str) -> Difference:
    return Difference(stage=stage, column=column, place=ValuePlace(), kept=before, repeated=now)


def _text(value: Tensor) -> str:
    number = value.item()
    return number.hex() + f" ({number:.9g})" if isinstance(number, float) else str(number)


def first_unlike_record(
    run_dir: Path, train_step: int, groups: Sequence[Group]
) -> Difference | None:
    """Return how trajectories.jsonl first differs from the groups that were kept.

    A trajectory without a readable line differs. Of several lines, after a recovery, the last
    counts.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    lines = _lines_of(run_dir, train_step)
    for trajectory in trajectories:
        place = ValuePlace(trajectory_id=trajectory.trajectory_id)
        line = lines.get(trajectory.trajectory_id)
        kept = json.loads(json.dumps(as_row(trajectory)))
        if line is None:
            return _of_record("line", place, "a trajectory", "no whole line of it")
        for number, (before, now) in enumerate(
            zip(kept["sequences"], line.get("sequences", []), strict=False)
        ):
            if difference := _first_in_sequence(trajectory.trajectory_id, number, before, now):
                return difference
        for name, value in kept.items():
            if line.get(name) != value:
                return _of_record(name, place, value, line.get(name))
    return None


def _lines_of(run_dir: Path, train_step: int) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for part in trajectory_files(run_dir):
        with part.open(encoding="utf-8", errors="replace", newline="\n") as texts:
            for text in texts:
                # Only a line of this step is parsed: a run has many.
                if f'"train_step": {train_step},' not in text[:200]:
                    continue
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict) and line.get("outcome") == "trained":
                    lines[str(line.get("trajectory_id"))] = line
    return lines


def _first_in_sequence(
    trajectory_id: str, number: int, before: dict[str, Any], now: dict[str, Any]
) -> Difference | None:
    """Compare masks first, then the lists of numbers: who wrote a token decides the rest."""
    masks = [_mask_of(row.get("segments", ())) for row in (before, now)]
    tokens = [index for index, source in enumerate(masks[0]) if source == "MODEL"]
    lists: list[tuple[str, Sequence[Any], Sequence[Any], Sequence[int]]] = [
        ("mask", masks[0], masks[1], range(len(masks[0])))
    ]
    for name in _LISTS:
        own = range(len(before[name])) if name == "token_ids" else tokens
        lists.append((name, before[name], now.get(name, ()), own))
    for name, old, new, positions in lists:
        index = next(
            (i for i, pair in enumerate(zip(old, new, strict=False)) if _unlike(*pair)), -1
        )
        if index < 0 and len(old) != len(new):
            index = min(len(old), len(new))
        if index >= 0:
            token = positions[index] if index < len(positions) else index
            place = ValuePlace(trajectory_id=trajectory_id, sequence=number, token=token)
            texts = [values[index] if index < len(values) else "nothing" for values in (old, new)]
            return _of_record(name, place, *texts)
    return None


def _unlike(old: Any, new: Any) -> bool:
    return bool(old != new and not (old != old and new != new))


def _mask_of(segments: Sequence[dict[str, Any]]) -> list[str]:
    return [str(s.get("source")) for s in segments for _ in range(int(s.get("length", 0)))]


def _of_record(column: str, place: ValuePlace, before: Any, now: Any) -> Difference:
    texts = [f"{value!r:.80}" for value in (before, now)]
    return Difference(
        stage="trajectories.jsonl", column=column, place=place, kept=texts[0], repeated=texts[1]
    )
