"""The end of a run on the terminal: before and after, two transcripts, gates, where things are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.tokens.tokenizer import Tokenizer
from dialoop.views.display import legend, policy_of, transcript
from dialoop.views.run_files import trajectory_files
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dialoop_services.stack.report.transcripts import choose

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dialoop.views.display import Row
    from rich.console import Console

_COMPARED = (
    ("held-out accuracy, greedy", "heldout_greedy"),
    ("held-out accuracy, sampled", "heldout_sampled"),
    ("tool-call rate, sampled", "tool_call_rate"),
)


def report(summary: Mapping[str, Any], run_dir: Path, model: Path, console: Console) -> None:
    """Print everything; the files hold the same."""
    console.print(_comparison(summary))
    _print_transcripts(run_dir, model, console)
    console.print(_figures(summary))
    for name, holds in summary["gates"].items():
        mark = Text("  holds  ", style="green") if holds else Text("  FAILS  ", style="bold red")
        console.print(mark + Text(name), soft_wrap=True)
    files = ", ".join(("summary.json", "metrics.jsonl", "trajectories.jsonl", "learning.png"))
    console.print(f"{run_dir}/: {files}, logs/", soft_wrap=True, highlight=False)


def _comparison(summary: Mapping[str, Any]) -> Table:
    table = Table("", "before", "after", title=f"Run {summary['run']}")
    for title, name in _COMPARED:
        table.add_row(title, *(_rate(summary[f"{name}_{when}"]) for when in ("before", "after")))
    return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_transcripts(run_dir: Path, model: Path, console: Console) -> None:
    chosen = choose(*trajectory_files(run_dir))
    if chosen is None:
        return
    tokenizer = Tokenizer.from_directory(model)
    for when, row in (("before", chosen.before), ("after", chosen.after)):
        console.print(_panel(when, row, tokenizer))
    console.print(legend())


def _panel(when: str, row: Row, tokenizer: Tokenizer) -> Panel:
    title = f"{when}: task {row['task_key']}, policy {policy_of(row)}, reward {row['reward']:g}"
    return Panel(transcript(row, tokenizer), title=title, title_align="left")


def _figures(summary: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    trajectories = summary["trajectories"]
    dropped = ", ".join(f"{n} {reason}" for reason, n in trajectories["dropped"].items())
    rows = {
        "train steps": f"{summary['num_train_steps']} "
        f"({summary['share_of_train_steps_with_older_data']:.0%} used an older policy's data)",
        "policy versions": str(summary["num_policy_versions"]),
        "staleness of trained trajectories": str(summary["staleness_histogram"]),
        "trajectories": f"{trajectories['generated']} generated = {trajectories['trained']} trained"
        f" + {sum(trajectories['dropped'].values())} dropped ({dropped or 'none'})"
        f" + {trajectories['left']} left",
        "tokens/s": f"{summary['tokens_per_s_generated']:.0f} generated, "
        f"{summary['tokens_per_s_trained']:.0f} trained",
        "largest log-prob difference": f"{summary['max_logprob_difference']:.2g} after a publish, "
        f"{summary['rescoring'].get('max_difference', float('nan')):.2g} re-scored"
        f"{_left_out(summary['rescoring'].get('num_inexact_trajectories', 0))}",
        "time": f"{summary['wall_s']:.0f} s, {summary['cpu_s']:.0f} CPU seconds",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), value)
    return table


def _left_out(num_inexact: int) -> str:
    """What re-scoring cannot speak of, if there is any."""
    if not num_inexact:
        return ""
    return f" ({num_inexact} trajectories left out: keep_kv loads came while they were sampled)"
