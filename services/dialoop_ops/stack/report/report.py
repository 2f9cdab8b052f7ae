"""Print the end of a run: rewards before and after, two transcripts, gates, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.rl.buckets import share_table
from dialoop_services.trainer.records.rows import trajectory_files
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dialoop_ops.runs.display import Row, legend, policy_of, read_rows, transcript

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

_COMPARED = (
    ("held-out accuracy", "accuracy"),
    ("held-out mean reward", "mean_reward"),
    ("tool-call rate", "tool_call_rate"),
)


def report(summary: Mapping[str, Any], run_dir: Path, model: Path, console: Console) -> None:
    """Print everything; the run's files hold the same."""
    console.print(_comparison(summary))
    _print_transcripts(run_dir, model, console)
    console.print(_figures(summary))
    if summary["lengths"]["generated"]:
        console.print(_lengths(summary["lengths"]))
    for name, holds in summary["gates"].items():
        mark = Text("  holds  ", style="green") if holds else Text("  FAILS  ", style="bold red")
        console.print(mark + Text(name), soft_wrap=True)
    files = ", ".join(("summary.json", "metrics.jsonl", "trajectories.jsonl", "learning.png"))
    console.print(f"{run_dir}/: {files}, logs/", soft_wrap=True, highlight=False)
    style = "green" if all(summary["gates"].values()) else "bold red"
    console.print(Text(summary["ending"], style=style), soft_wrap=True)


def _comparison(summary: Mapping[str, Any]) -> Table:
    """Return the evaluations; accuracy stands only where rewards say what a success is."""
    evaluations = summary["evaluations"]
    table = Table("", "before", "after", title=f"Run {summary['run']}")
    for how in ("greedy", "sampled"):
        pair = [evaluations.get(f"{when}_{how}", {}) for when in ("before", "after")]
        for title, name in _COMPARED:
            values = [result.get(name) for result in pair]
            if name != "accuracy" or any(value is not None for value in values):
                table.add_row(f"{title}, {how}", *map(_rate, values))
        table.add_row(f"episodes that count, {how}", *map(_counted, pair))
        table.add_row(f"answered by policy, {how}", *map(_versions, pair))
    if summary["undecided_evaluations"]:
        table.caption = (
            f"Too few episodes count in {', '.join(summary['undecided_evaluations'])}: nothing is "
            "decided by them."
        )
    return table


def _counted(result: Mapping[str, Any]) -> str:
    if not result:
        return "-"
    return f"{result['num_trajectories']} of {result['num_trajectories'] + result['num_failed']}"


def _versions(result: Mapping[str, Any]) -> str:
    versions = dict.fromkeys(result.get(name, "") for name in ("oldest", "newest"))
    return " to ".join(filter(None, versions)) or "-"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_transcripts(run_dir: Path, model: Path, console: Console) -> None:
    chosen = choose_transcripts(*trajectory_files(run_dir))
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
        "groups with a signal": f"{summary['signal']['num_trained']} of "
        f"{summary['signal']['num_candidates']} ({summary['signal']['share']:.0%}); "
        f"{summary['signal']['num_empty_batches']} empty batches",
        "policy versions": str(summary["num_policy_versions"]),
        "pipeline": _text_of_pace(summary["pace"]),
        "staleness of trained trajectories": str(summary["staleness_histogram"]),
        "trajectories": f"{trajectories['generated']} generated = {trajectories['trained']} trained"
        f" + {sum(trajectories['dropped'].values())} dropped ({dropped or 'none'})"
        f" + {trajectories['left']} left",
        "tokens/s": f"{summary['tokens_per_s_generated']:.0f} generated, "
        f"{summary['tokens_per_s_trained']:.0f} trained",
        "largest log-prob difference": f"{summary['max_logprob_difference']:.2g} after a publish, "
        f"{_text_of_rescoring(summary['rescoring'])}",
        "time": f"{summary['wall_s']:.0f} s, {summary['cpu_s']:.0f} CPU seconds",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), value)
    return table


def _text_of_pace(pace: Mapping[str, float]) -> str:
    """Return how far sampling ran ahead, and what that depends on."""
    if not pace:
        return "-"
    return (
        f"depth {pace['pipeline_depth']:.0f}: play {pace['play_s_p99']:.1f} s at p99, "
        f"train {pace['train_s']:.1f} s, waiting for groups {pace['waiting_share']:.0%}"
    )


def _lengths(lengths: Mapping[str, Mapping[int, int]]) -> Table:
    """Return a table of how long trajectories were: all that were played, and those trained."""
    table = Table("sampled tokens", "generated", "trained", box=None, padding=(0, 2, 0, 0))
    for longest, generated, trained in share_table(lengths["generated"], lengths["trained"]):
        table.add_row(f"up to {longest}", f"{generated:.1%}", f"{trained:.1%}")
    return table


def _text_of_rescoring(rescoring: Mapping[str, Any]) -> str:
    """Return the largest difference of what was scored again, and what was left out of it."""
    difference = rescoring.get("max_difference")
    parts = ["not re-scored" if difference is None else f"{difference:.2g} re-scored"]
    unchecked = {
        "whose policy was deleted": "policy_gone",
        "beyond the sample": "sample",
        "out of time": "time",
    }
    counts = rescoring.get("num_unchecked_rows", {})
    parts += [f"{counts[key]} sequences {why}" for why, key in unchecked.items() if counts.get(key)]
    if num_inexact := rescoring.get("num_inexact_trajectories", 0):
        parts.append(f"{num_inexact} trajectories that keep_kv loads made inexact")
    return parts[0] + (f" (not {', '.join(parts[1:])})" if parts[1:] else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAndAfter:
    """Two rows of trajectories.jsonl, of the same task where there were evaluations."""

    before: Row
    after: Row


def choose_transcripts(*paths: Path) -> BeforeAndAfter | None:
    """Return a task failed before and solved after training, else any task played both times.

    Without evaluations they are the first and the last trajectory that was trained on.
    """
    by_label: dict[str, dict[str, Row]] = {"before_greedy": {}, "after_greedy": {}}
    trained: list[Row] = []
    for row in read_rows(*paths):
        if row["label"] in by_label:
            by_label[row["label"]].setdefault(row["task_key"], row)
        elif row["outcome"] == "trained":
            trained = [*trained[:1], row]
    improved = _find_improved(by_label["before_greedy"], by_label["after_greedy"])
    return improved or _first_and_last(trained)


def _find_improved(before: Mapping[str, Row], after: Mapping[str, Row]) -> BeforeAndAfter | None:
    both = [key for key in before if key in after]
    better = [key for key in both if before[key]["reward"] < after[key]["reward"]]
    key = next(iter(better or both), None)
    return None if key is None else BeforeAndAfter(before=before[key], after=after[key])


def _first_and_last(trained: list[Row]) -> BeforeAndAfter | None:
    return BeforeAndAfter(before=trained[0], after=trained[-1]) if trained else None
