"""Draw learning.png from metrics.jsonl: rewards and tool use over the steps."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from dialoop_services.trainer.records.rows import without_discards

_LABELS = ("before_sampled", "running", "after_sampled")


def draw_learning(metrics: Path, target: Path) -> None:
    """Write the picture; a figure that was not measured is left out."""
    # Imported late and without pyplot: it takes a second, keeps global state and opens windows.
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    train = [row for row in rows if row["kind"] == "train" and "reward" in row]
    heldout = [r for r in rows if r["kind"] == "evaluation" and r.get("label") in _LABELS]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _line(above, train, "reward", label="reward (training)")
    _line(above, train, "tool_call_rate", label="tool-call rate (training)")
    _line(above, heldout, "mean_reward", "o-", label="held-out mean reward (sampled)")
    above.set_ylim(-0.02, 1.02)
    if above.lines:
        above.legend(loc="best")
    _draw_below(below, rows)
    below.set_xlabel("train step")
    figure.savefig(target, dpi=120)


def _line(axes: Any, rows: list[dict[str, Any]], key: str, style: str = "-", *, label: str) -> None:
    """Draw one curve over train steps; without rows there is no curve and no legend entry."""
    if rows:
        steps = [row["train_step"] for row in rows]
        axes.plot(steps, [row[key] for row in rows], style, label=label)


def _draw_below(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the staleness of RL's data, or the loss of SFT."""
    aged = [row for row in rows if "staleness_mean" in row]
    supervised = [row for row in rows if row["kind"] == "train" and "epoch" in row]
    heldout = [row for row in rows if row["kind"] == "heldout"]
    if supervised:
        _line(axes, supervised, "loss", label="loss (training)")
        _line(axes, heldout, "loss", label="loss (held-out)")
        axes.set_ylabel("loss")
        axes.legend(loc="upper right")
        return
    steps = [row["train_step"] for row in aged]
    axes.bar(steps, [row["staleness_mean"] for row in aged], color="tab:grey")
    axes.set_ylabel("mean staleness")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without those of weights that a restore has discarded.

    The last line of a killed trainer may be incomplete and is skipped.
    """
    rows: list[dict[str, Any]] = []
    for line in path.read_text("utf-8").splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return without_discards(rows)
