"""What a list shows of a trajectory: one line of trajectories.jsonl without its tokens.

`summary_of(json.loads(line), number=1)` has the reward, the stop reasons, the number of sampled
tokens, and what else a filter asks for.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dialoop.sequences import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dialoop_ops.runs.display import Row

    Versions = Mapping[tuple[str, int], int]
    """(lineage, train step) -> number of the policy version that came out of the step."""

EVALUATION, TRAINED = "evaluation", "trained"
_PREVIEW = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """One trajectory of a run.

    `number` counts from 1 in the order of writing. `reward` is None where it is not a number, and
    `advantage` where the scorer gave none. `oldest` and `newest` are numbers of the policy versions
    that sampled it, of `lineage`; None where nothing was sampled. `staleness`: how many versions
    the oldest one lagged when the trajectory was trained or dropped; None for evaluations, and
    until metrics.jsonl has the step.
    """

    number: int
    trajectory_id: str
    group_id: str
    task_key: str
    environment: str
    outcome: str
    label: str
    train_step: int
    reward: float | None
    advantage: float | None
    done_reason: str
    stop_reasons: tuple[str, ...]
    owners: tuple[str, ...]
    num_turns: int
    num_tool_calls: int
    num_sequences: int
    num_tokens: int
    num_sampled: int
    lineage: str
    oldest: int | None
    newest: int | None
    staleness: int | None
    preview: str


def summary_of(row: Row, *, number: int, versions: Versions | None = None) -> TrajectorySummary:
    """Return the summary of a row; ValueError for a row that is not a trajectory's.

    Fields that runs of earlier versions did not write are empty.
    """
    try:
        summary = _summary(row, number)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no row of a trajectory") from error
    return replace(summary, staleness=staleness_of(summary, versions or {}))


def _summary(row: Row, number: int) -> TrajectorySummary:
    sequences = row["sequences"]
    segments = [segment for sequence in sequences for segment in sequence["segments"]]
    sampled = [segment for segment in segments if segment["source"] == Source.MODEL.name]
    versions = [s["policy_version"] for s in sampled if s.get("policy_version") is not None]
    turns = row.get("turns", ())
    advantages = (sequence.get("advantage") for sequence in sequences)
    return TrajectorySummary(
        number=number,
        trajectory_id=str(row["trajectory_id"]),
        group_id=str(row.get("group_id", "")),
        task_key=str(row.get("task_key", "")),
        environment=str(row.get("environment", "")),
        outcome=str(row["outcome"]),
        label=str(row.get("label", "")),
        train_step=int(row.get("train_step", 0)),
        reward=finite(row.get("reward")),
        advantage=next((finite(value) for value in advantages if value is not None), None),
        done_reason=str(row.get("done_reason", "")),
        stop_reasons=_distinct(turn.get("stop_reason", "") for turn in turns),
        owners=_distinct(failure.get("owner", "") for failure in row.get("failures", ())),
        num_turns=len(turns),
        num_tool_calls=int(row.get("num_tool_calls", 0)),
        num_sequences=len(sequences),
        num_tokens=sum(segment["length"] for segment in segments),
        num_sampled=sum(segment["length"] for segment in sampled),
        lineage=next((s["lineage"] for s in sampled if s.get("lineage")), ""),
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
        staleness=None,
        preview=_preview(row),
    )


def staleness_of(summary: TrajectorySummary, versions: Versions) -> int | None:
    """Return how many versions its oldest token lagged when it was trained or dropped.

    The rows of a batch have the step that came out of it, so the batch was read by the version
    before. A group that was dropped has the number of the last step.
    """
    if summary.outcome == EVALUATION or summary.oldest is None:
        return None
    current = versions.get((summary.lineage, summary.train_step))
    if current is None:
        return None
    return current - (summary.outcome == TRAINED) - summary.oldest


def versions_by_step(metric_rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], int]:
    """Return the policy version after each train step, from rows of metrics.jsonl."""
    return {
        (row["lineage"], row["train_step"]): row["policy_version"]
        for row in metric_rows
        if row.get("kind") in ("publish", "train") and row.get("lineage") is not None
    }


def text_of(row: Row) -> str:
    """Return what the text search looks through: the messages, with their tool calls as JSON."""
    return "\n".join(_texts(row.get("messages", ())))


def _texts(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield content_text(message.get("content"))
        for name, value in message.items():
            if name not in ("role", "content") and value:
                yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def content_text(content: Any) -> str:
    """Return a message's content as text; parts that are not text stand as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else json.dumps(part, ensure_ascii=False)
        for part in parts
    )


def finite(value: Any) -> float | None:
    """Return the number, or None for nothing and for what is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(filter(None, names))))


def _preview(row: Row) -> str:
    """Return the beginning of the last thing the policy said, on one line."""
    for message in reversed(row.get("messages", ())):
        if message.get("role") == "assistant":
            return " ".join(content_text(message.get("content"))[: 4 * _PREVIEW].split())[:_PREVIEW]
    return ""
