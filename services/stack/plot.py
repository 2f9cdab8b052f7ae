"""learning.png: how reward, held-out accuracy and tool use went, drawn from metrics.jsonl."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_ONCE = ("before_", "after_")
_LABELS = ("before_sampled", "running", "after_sampled")


def draw_learning(metrics: Path, target: Path) -> None:
    """Write the picture; nothing is drawn that was not measured."""
    # Imported late and without pyplot: it takes a second, keeps global state and opens windows.
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    train = [row for row in rows if row["kind"] == "train" and "reward" in row]
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
    _draw_below(below, rows)
    below.set_xlabel("train step")
    figure.savefig(target, dpi=120)


def _draw_below(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The staleness of what RL trained, or the loss of SFT."""
    aged = [row for row in rows if "staleness_mean" in row]
    supervised = [row for row in rows if row["kind"] == "train" and "epoch" in row]
    heldout = [row for row in rows if row["kind"] == "heldout"]
    if supervised:
        for label, found in (("loss (training)", supervised), ("loss (held-out)", heldout)):
            steps = [row["train_step"] for row in found]
            axes.plot(steps, [row["loss"] for row in found], label=label)
        axes.set_ylabel("loss")
        axes.legend(loc="upper right")
        return
    steps = [row["train_step"] for row in aged]
    axes.bar(steps, [row["staleness_mean"] for row in aged], color="tab:grey")
    axes.set_ylabel("mean staleness")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without those of weights that a restore has discarded.

    The last line of a killed trainer may be half a line.
    """
    rows: list[dict[str, Any]] = []
    for line in path.read_text("utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["kind"] == "restore":
            rows = [earlier for earlier in rows if _is_kept(earlier, row)]
        rows.append(row)
    return rows


def _is_kept(row: dict[str, Any], restore: dict[str, Any]) -> bool:
    """Whether a row is of a step that the restored checkpoint contains."""
    if row["kind"] == "warm_start":
        return bool(row["train_step"] <= restore["num_warm_start_steps"])
    again = row.get("label", "").startswith(_ONCE) and row["label"] not in restore["evaluations"]
    return bool(row["train_step"] <= restore["train_step"] and not again)
