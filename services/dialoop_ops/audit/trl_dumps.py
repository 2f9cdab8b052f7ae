"""Dumps of TRL's trainers as rollouts: the tables of `log_completions`, and rows of their batches.

A row is a completion. Names of columns are TRL's own; what a dump lacks, its checks lack.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.environments.tasks.files import rows_of
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason

from dialoop_ops.audit.own_runs import json_rows
from dialoop_ops.audit.records import (
    TRAINED,
    Claims,
    CurvePoint,
    Dump,
    Rollout,
    Span,
    TokenRecord,
    no_floats,
)
from dialoop_ops.runs.summaries import content_text, finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dialoop_ops.audit.records import Floats, Mask

STATE = "trainer_state.json"
SUFFIXES = (".jsonl", ".parquet")

_ADVANTAGES = ("advantage", "advantages")
_SAMPLER = ("sampling_per_token_logps", "logprobs", "old_log_probs")
_TRAINER = "old_per_token_logps"
_TOOL_MASKS = ("tool_mask", "env_mask")
# Columns of single numbers that are no rewards.
_NO_REWARDS = frozenset(
    (*_ADVANTAGES, "step", "temperature", "model_version", "staleness", "group_id", "reward")
)
_NO_ROW = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)


def dump_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a dump: the path itself, or those of the folder or its completions/."""
    if path.is_file():
        return (path,)
    for folder in (path / "completions", path):
        files = sorted(file for suffix in SUFFIXES for file in folder.glob(f"*{suffix}"))
        if files:
            return tuple(files)
    return ()


def read_trl_dump(path: Path, claims: Claims) -> Dump:
    """Return the rollouts of a dump; InvalidInput where no row of it is a completion."""
    dump = Dump(path=path, kind="trl", claims=claims)
    columns: set[str] = set()
    num_bad = 0
    for file in dump_files(path):
        for number, row in enumerate(_rows(file, dump, is_alone=path.is_file()), start=1):
            columns |= row.keys()
            try:
                dump.rollouts.append(_rollout(row, f"{file.name}:{number}", claims))
            except _NO_ROW:
                num_bad += 1
    if not dump.rollouts and (num_bad or columns):
        raise InvalidInput(
            f"No row of {path} is a completion; its columns are {', '.join(sorted(columns))}.",
            remedy="A row needs `completion` or `completion_ids`; `dialoop audit` reads TRL's.",
        )
    if num_bad:
        dump.notes.append(f"{num_bad} rows are not completions of TRL; they were left out.")
    _end_spans(dump, claims.max_new_tokens)
    _read_curves(path, dump)
    return dump


def _rows(file: Path, dump: Dump, *, is_alone: bool) -> Iterator[Mapping[str, Any]]:
    if file.suffix != ".parquet":
        yield from json_rows(file, dump.notes)
        return
    try:
        rows = rows_of(file)
    except InvalidConfig as error:
        if is_alone or error.reason is not Reason.DATA_UNREADABLE:
            raise
        dump.notes.append(f"{file.name} cannot be read; it was left out.")
        return
    for number in range(len(rows)):
        yield rows[number]


def _rollout(row: Mapping[str, Any], name: str, claims: Claims) -> Rollout:
    completion, prompt = row.get("completion"), row.get("prompt")
    has_ids = row.get("completion_ids") is not None or row.get("input_ids") is not None
    if completion is None and not has_ids:
        raise ValueError("no completion")
    tokens, problems = _tokens(row) if has_ids else (None, ())
    texts = list(_texts(completion))
    rewards = _rewards(row, claims)
    total = finite(row.get("reward"))
    if total is None and rewards:
        total = sum(rewards.values())
    step = row.get("step")
    task = _task(prompt, tokens)
    version = row.get("model_version", step)
    staleness = row.get("staleness")
    if staleness is None and step is not None and row.get("model_version") is not None:
        staleness = step - row["model_version"]
    if tokens is not None and version is not None and _has(row, *_SAMPLER):
        versions = np.full(tokens.num_sampled, int(version), dtype=np.int32)
        tokens = replace(tokens, versions=versions)
    messages = completion if isinstance(completion, list) else []
    return Rollout(
        name=name,
        fate=TRAINED,
        step=None if step is None else int(step),
        group=f"{step}/{task}",
        task=task,
        reward=total,
        rewards=rewards,
        text="\n".join(texts),
        length=sum(map(len, texts)) if tokens is None else tokens.num_sampled,
        num_turns=max(1, len(texts)),
        num_tool_calls=sum(message.get("role") == "tool" for message in messages),
        advantage=next((finite(row[name]) for name in _ADVANTAGES if name in row), None),
        temperature=finite(row.get("temperature")),
        staleness=None if staleness is None else int(staleness),
        version=None if row.get("model_version") is None else int(row["model_version"]),
        sequences=() if tokens is None else (tokens,),
        structural=problems,
    )


def _texts(completion: Any) -> Iterator[str]:
    """Yield what the policy wrote: a text, or its messages."""
    if isinstance(completion, str):
        yield completion
    elif completion is not None:
        for message in completion:
            if message.get("role") == "assistant":
                yield content_text(message.get("content"))


def _task(prompt: Any, tokens: TokenRecord | None) -> str:
    if prompt is not None:
        return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    if tokens is not None and tokens.spans:
        return str(tokens.ids[: tokens.spans[0].start].tobytes().hex())
    return ""


def _rewards(row: Mapping[str, Any], claims: Claims) -> dict[str, float]:
    names = claims.rewards or [
        name
        for name, value in row.items()
        if name not in _NO_REWARDS and isinstance(value, (int, float))
    ]
    values = {name: row.get(name) for name in names}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _has(row: Mapping[str, Any], *names: str) -> bool:
    return any(row.get(name) is not None for name in names)


def _tokens(row: Mapping[str, Any]) -> tuple[TokenRecord, tuple[tuple[str, int], ...]]:
    """Return a row's tokens without padding, and what is wrong with its masks as they stand."""
    if row.get("completion_ids") is not None:
        prompt = _ids(row.get("prompt_ids") or [])
        if _has(row, "prompt_mask"):
            prompt = prompt[_mask(row["prompt_mask"], len(prompt))]
        completion = _ids(row["completion_ids"])
        start = len(prompt)
        ids = np.concatenate([prompt, completion])
        size = len(completion)
    else:
        ids, start = _ids(row["input_ids"]), 0
        size = len(ids)
    own = _mask(row["completion_mask"], size) if _has(row, "completion_mask") else None
    sampled = np.ones(size, dtype=np.bool_) if own is None else own.copy()
    tool = next((row[name] for name in _TOOL_MASKS if row.get(name) is not None), None)
    if tool is not None:
        sampled &= _mask(tool, size)
    problems = []
    if row.get("completion_ids") is not None and own is not None and own.any():
        # A completion begins with what the policy wrote, and only padding follows it.
        first = int(own.argmax())
        if first:
            problems.append((f"the mask begins {first} tokens too late", start + first))
        hole = np.flatnonzero(np.diff(own[first:].astype(np.int8)) == 1)
        if len(hole):
            problems.append(("the mask has a hole", start + first + int(hole[0]) + 1))
    full = np.concatenate([np.zeros(start, dtype=np.bool_), sampled])
    record = TokenRecord(
        ids=ids,
        spans=_spans(full),
        logprobs=_logprobs(row, _SAMPLER, start, sampled),
        trainer_logprobs=_logprobs(row, (_TRAINER,), start, sampled),
    )
    if not len(record.logprobs) and not _has(row, *_SAMPLER):
        # Without a sampler's numbers the trainer's say what the frequencies should be.
        record = replace(record, logprobs=record.trainer_logprobs, trainer_logprobs=no_floats())
    return record, tuple(problems)


def _ids(values: Any) -> np.ndarray:
    ids = np.asarray(values)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError("no token ids")
    return ids.astype(np.int32)


def _mask(values: Any, size: int) -> Mask:
    """Return a mask of `size` tokens; one that is shorter was written without its padding."""
    mask = np.asarray(values).astype(np.bool_)
    if mask.ndim != 1 or len(mask) > size:
        raise ValueError("a mask of another length")
    return np.concatenate([mask, np.zeros(size - len(mask), dtype=np.bool_)])


def _logprobs(row: Mapping[str, Any], names: tuple[str, ...], start: int, sampled: Mask) -> Floats:
    """Return one number for each sampled token; as many as there are where counts differ."""
    values = next((row[name] for name in names if row.get(name) is not None), None)
    if values is None:
        return no_floats()
    numbers = np.array([np.nan if v is None else v for v in values], dtype=np.float32)
    if len(numbers) == len(sampled):
        return numbers[sampled]
    if len(numbers) == start + len(sampled):
        return numbers[start:][sampled]
    return numbers


def _spans(sampled: Mask) -> tuple[Span, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple(Span(start=int(a), end=int(b), turn=n) for n, (a, b) in enumerate(pairs))


def _end_spans(dump: Dump, max_new_tokens: int | None) -> None:
    """Say which turns ended by themselves: those that the longest completion leaves room for.

    Some trainers limit the whole completion, and some each answer in it; both are taken for limits.
    """
    rows = [tokens for r in dump.rollouts for tokens in r.sequences if tokens.spans]
    wholes = [tokens.spans[-1].end - tokens.spans[0].start for tokens in rows]
    answers = [span.end - span.start for tokens in rows for span in tokens.spans]
    longest = max_new_tokens or max(wholes, default=0)
    longest_answer = max_new_tokens or max(answers, default=0)
    for rollout in dump.rollouts:
        for tokens in rollout.sequences[:1]:
            if not tokens.spans:
                continue
            last = tokens.spans[-1]
            rollout.is_cut_off = (
                last.end - tokens.spans[0].start >= longest
                or last.end - last.start >= longest_answer
            )
            spans = [replace(span, stops=True) for span in tokens.spans]
            spans[-1] = replace(last, stops=not rollout.is_cut_off)
            rollout.sequences = (replace(tokens, spans=tuple(spans)),)


def _read_curves(path: Path, dump: Dump) -> None:
    """Read the rewards of trainer_state.json; without it, the rows' own by step."""
    folder = path if path.is_dir() else path.parent
    checkpoints = [
        file
        for place in (folder, folder.parent)
        for file in place.glob(f"checkpoint-*/{STATE}")
        if re.fullmatch(r"checkpoint-\d+", file.parent.name)
    ]
    checkpoints.sort(key=lambda file: int(file.parent.name.partition("-")[2]), reverse=True)
    for file in (folder / STATE, folder.parent / STATE, *checkpoints):
        try:
            history = json.loads(file.read_text("utf-8"))["log_history"]
            _read_history(history, dump)
        except FileNotFoundError:
            continue
        except (OSError, *_NO_ROW):
            dump.notes.append(f"{file} cannot be read: held-out rewards are unknown.")
            continue
        break
    if not dump.trained_reward:
        rows = sorted(
            (r.step, r.reward) for r in dump.rollouts if r.step is not None and r.reward is not None
        )
        for step, members in groupby(rows, key=lambda pair: pair[0]):
            values = [reward for _, reward in members]
            mean = sum(values) / len(values)
            dump.trained_reward.append(CurvePoint(step=step, value=mean, count=len(values)))


def _read_history(history: list[dict[str, Any]], dump: Dump) -> None:
    for entry in history:
        step = int(entry.get("step", 0))
        for name, curve in (("reward", dump.trained_reward), ("eval_reward", None)):
            value = finite(entry.get(name))
            if value is not None:
                points = dump.heldout.setdefault(name, []) if curve is None else curve
                points.append(CurvePoint(step=step, value=value))
