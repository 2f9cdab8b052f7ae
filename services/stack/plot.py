"""learning.png: how reward, held-out accuracy and tool use went, drawn from metrics.jsonl."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_LABELS = ("before_sampled", "running", "after_sampled")


def draw_learning(metrics: Path, target: Path) -> None:
    """Write the picture; nothing is drawn that was not measured."""
    # Imported late and without pyplot: it takes a second, keeps global state and opens windows.
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    train = [row for row in rows if row["kind"] == "train"]
    heldout = [r for r in rows if r["kind"] == "evaluation" and r.get("label") in _LABELS]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [row["train_step"] for row in train]
    above.plot(steps, [row["reward"] for row in train], label="reward (training)")
    above.plot(steps, [row["tool_call_rate"] for row in train], label="tool-call rate (training)")
    above.plot(
        [row["train_step"] for row in heldout],
        [row["mean_reward"] for row in heldout],
        "o-",
        label="held-out accuracy (sampled)",
    )
    above.set_ylim(-0.02, 1.02)
    above.legend(loc="lower right")
    below.bar(steps, [row["staleness_mean"] for row in train], color="tab:grey")
    below.set_ylabel("mean staleness")
    below.set_xlabel("train step")
    figure.savefig(target, dpi=120)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; the last one of a killed trainer may be half a line."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
