"""A run of Dialoop as rollouts: trajectories.jsonl, metrics.jsonl, debug_table.jsonl, run.json."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.errors import InvalidInput, NotFound
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.templates.chat_template import ended_as_written
from dialoop.trajectory import StopReason
from dialoop_services.trainer.records.rows import (
    METRICS,
    TRAJECTORIES,
    trajectory_files,
    without_discards,
)

from dialoop_ops.audit.records import (
    DROPPED,
    EVALUATION,
    TRAINED,
    Claims,
    CurvePoint,
    Dump,
    Rollout,
    Span,
    TokenRecord,
    TrainerRow,
    no_floats,
)
from dialoop_ops.runs.index import DEBUG_TABLE
from dialoop_ops.runs.line_files import whole_lines
from dialoop_ops.runs.run_config import read_run, tokenizer_of
from dialoop_ops.runs.summaries import content_text, finite, summary_of, versions_by_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dialoop_ops.runs.summaries import TrajectorySummary, Versions

MAX_LINE_BYTES = 256 << 20
"""Longest line that is read; a longer one is noted and left out."""

_NO_ROW = (ValueError, KeyError, TypeError, AttributeError, IndexError)
_FATES = {"trained": TRAINED, "evaluation": EVALUATION}


def is_run(path: Path) -> bool:
    """Return whether the folder looks like a run's."""
    return path.is_dir() and bool(trajectory_files(path) or (path / "run.json").is_file())


def read_own_run(run_dir: Path) -> Dump:
    """Return what a run kept; NotFound where it kept no trajectories."""
    parts = trajectory_files(run_dir)
    if not parts:
        raise NotFound(
            f"{run_dir} has no {TRAJECTORIES}.",
            reason=Reason.NOT_A_RUN,
            remedy="Name a run's directory that has trajectories, or a dump of TRL.",
        )
    tokenizer = tokenizer_of(run_dir)
    ended = None if tokenizer is None else ended_as_written(tokenizer)
    dump = Dump(path=run_dir, kind="dialoop", tokenizer=ended)
    dump.claims = _claims(run_dir, dump)
    metrics = [row for row in json_rows(run_dir / METRICS, dump.notes) if "kind" in row]
    kept = without_discards(metrics)
    _read_curves(kept, dump)
    debug = defaultdict(list)
    for row in json_rows(run_dir / DEBUG_TABLE, dump.notes):
        debug[row.get("trajectory_id")].append(row)
    try:
        versions = versions_by_step(kept)
    except _NO_ROW:
        versions = {}
        dump.notes.append(f"{METRICS} lacks policy versions: staleness is unknown.")
    for part in parts:
        _read_part(part, dump, versions, debug)
    if not dump.rollouts and part_has_bytes(parts):
        raise InvalidInput(
            f"No line of {parts[0]} is a trajectory.",
            remedy="Name a directory that `dialoop train` wrote.",
        )
    return dump


def part_has_bytes(parts: tuple[Path, ...]) -> bool:
    """Return whether any of the files holds something."""
    return any(part.stat().st_size for part in parts)


def json_rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, and note what cannot be read; none if missing."""
    bad = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        raise NotFound(
            f"{path} cannot be read: {error.strerror}.", remedy="Check its permissions."
        ) from None
    with file:
        for offset, line in whole_lines(file, 0, 1 << 62):
            try:
                row = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            elif line.strip():
                bad.append(offset)
        if _is_torn(file):
            notes.append(f"The last line of {path.name} is not whole; it was left out.")
    if bad:
        notes.append(
            f"{len(bad)} lines of {path.name} cannot be read, the first at byte {bad[0]}; they "
            "were left out."
        )


def _is_torn(file: Any) -> bool:
    size = file.seek(0, 2)
    if not size:
        return False
    file.seek(size - 1)
    return bool(file.read(1) != b"\n")


def _claims(run_dir: Path, dump: Dump) -> Claims:
    config = read_run(run_dir).get("config")
    if not isinstance(config, dict):
        dump.notes.append("run.json is missing or of another version: its settings are unknown.")
        return Claims()

    def value(table: str, key: str) -> Any:
        part = config.get(table)
        return part.get(key) if isinstance(part, dict) else None

    stop = value("collector", "stop") or ()
    return Claims(
        temperature=finite(value("collector", "temperature")),
        max_new_tokens=value("collector", "max_new_tokens"),
        max_staleness=bound if isinstance(bound := value("train", "max_staleness"), int) else None,
        probe_bound=finite(value("gates", "logprob_difference_at_most")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def _read_curves(rows: list[dict[str, Any]], dump: Dump) -> None:
    for row in rows:
        step = row.get("train_step")
        if not isinstance(step, int):
            continue
        if row["kind"] == "train":
            if (reward := finite(row.get("reward"))) is not None:
                dump.trained_reward.append(CurvePoint(step=step, value=reward))
            if (mismatch := finite(row.get("fresh_mismatch_kl"))) is not None:
                dump.fresh_mismatch.append(CurvePoint(step=step, value=mismatch))
        elif row["kind"] == "evaluation" and (mean := finite(row.get("mean_reward"))) is not None:
            # before_greedy, running_greedy and after_greedy are one curve.
            label = str(row.get("label", "")).rpartition("_")[2]
            point = CurvePoint(step=step, value=mean, count=int(row.get("num_trajectories", 0)))
            dump.heldout.setdefault(label, []).append(point)
        elif row["kind"] == "publish":
            difference = row.get("max_logprob_difference")
            if isinstance(difference, float) and row.get("policy_version") is not None:
                dump.publishes.append((int(row["policy_version"]), difference))


def _read_part(
    part: Path, dump: Dump, versions: Versions, debug: Mapping[Any, list[dict[str, Any]]]
) -> None:
    num_bad = 0
    for row in json_rows(part, dump.notes):
        try:
            summary = summary_of(row, number=len(dump.rollouts) + 1, versions=versions)
            dump.rollouts.append(_rollout(row, summary, debug.get(row["trajectory_id"], [])))
        except _NO_ROW:
            num_bad += 1
    if num_bad:
        dump.notes.append(f"{num_bad} lines of {part.name} are not trajectories; left out.")


def _rollout(
    row: dict[str, Any], summary: TrajectorySummary, debug: list[dict[str, Any]]
) -> Rollout:
    turns = row.get("turns", [])
    rewards: dict[str, float] = defaultdict(float)
    for turn in turns:
        for name, value in turn.get("rewards", {}).items():
            rewards[name] += float(value)
    fate = _FATES.get(summary.outcome, DROPPED)
    temperature = row.get("temperature")
    return Rollout(
        name=summary.trajectory_id,
        fate=fate,
        step=summary.train_step,
        group=summary.group_id,
        task=f"{summary.environment}/{summary.task_key}",
        reward=summary.reward,
        rewards={name: value for name, value in rewards.items() if math.isfinite(value)},
        text="\n".join(_answers(row)),
        length=summary.num_sampled,
        num_turns=summary.num_turns,
        num_tool_calls=summary.num_tool_calls,
        advantage=summary.advantage,
        temperature=None if temperature is None else float(temperature),
        staleness=summary.staleness,
        version=summary.oldest,
        is_cut_off=any(turn.get("stop_reason") != StopReason.STOP.name for turn in turns),
        sequences=tuple(_tokens(row, own, turns, debug) for own in row["sequences"]),
        trainer_rows=tuple(_trainer_rows(debug)),
    )


def _answers(row: dict[str, Any]) -> Iterator[str]:
    for message in row.get("messages", ()):
        if message.get("role") == "assistant":
            yield content_text(message.get("content"))


def _tokens(
    row: dict[str, Any],
    sequence: dict[str, Any],
    turns: list[dict[str, Any]],
    debug: list[dict[str, Any]],
) -> TokenRecord:
    ids = np.array(sequence["token_ids"], dtype=np.int32)
    messages = row.get("messages", ())
    sampled = [s for s in sequence["segments"] if s["source"] == Source.MODEL.name]
    spans: list[Span] = []
    versions: list[int | None] = []
    for segment in sampled:
        start, end, turn = segment["start"], segment["start"] + segment["length"], segment["turn"]
        versions += [segment["policy_version"]] * segment["length"]
        index = segment.get("message_index")
        content = None
        if index is not None and 0 <= index < len(messages):
            content = content_text(messages[index].get("content"))
        stops = None
        if 0 <= turn < len(turns) and turns[turn].get("stop_reason"):
            stops = turns[turn]["stop_reason"] == StopReason.STOP.name
        if spans and spans[-1].turn == turn and spans[-1].end == start:  # another version went on
            start = spans.pop().start
        spans.append(Span(start=start, end=end, turn=turn, stops=stops, content=content))
    numbers = [-1 if version is None else version for version in versions]
    tokens = TokenRecord(
        ids=ids,
        spans=tuple(spans),
        logprobs=np.array(sequence.get("inference_logprobs") or [], dtype=np.float32),
        versions=np.array(numbers, dtype=np.int32),
    )
    return _with_trainer(tokens, debug)


def _with_trainer(tokens: TokenRecord, debug: list[dict[str, Any]]) -> TokenRecord:
    """Return the tokens with the trainer's log-probs, where a row of the trainer has them.

    Only those of the policy that sampled the token: of another policy they may differ.
    """
    positions = tokens.positions()
    place = {int(position): index for index, position in enumerate(positions)}
    values = np.full(len(positions), np.nan, dtype=np.float32)
    for row in debug:
        own = row.get("response_positions", [])
        logprobs = row.get("policy_logprobs", [])
        ids = row.get("response_tokens", [])
        ages = row.get("staleness") or [0] * len(own)
        for position, token, value, age in zip(own, ids, logprobs, ages, strict=False):
            if age == 0 and position in place and tokens.ids[position] == token:
                values[place[position]] = value
    return replace(tokens, trainer_logprobs=no_floats() if np.isnan(values).all() else values)


def _trainer_rows(debug: list[dict[str, Any]]) -> Iterator[TrainerRow]:
    for row in debug:
        yield TrainerRow(
            positions=tuple(row["response_positions"]),
            tokens=tuple(row["response_tokens"]),
            num_tokens=int(row["num_tokens"]),
        )
