"""Show a running job: a live table on a terminal, plain lines of 80 columns elsewhere."""

from __future__ import annotations

import math
import re
import textwrap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dialoop.clients.trainer import Phase
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dialoop_ops.now.snapshot import groups_line

if TYPE_CHECKING:
    from dialoop_ops.stack.processes.log_stream import LogStream
    from dialoop_ops.stack.report.observer import Snapshot

_LINES_EVERY_S, _AT_LEAST_EVERY_S = 5.0, 30.0
_WIDTH = 80
"""Columns of a line where there is no terminal."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNKNOWN = "-"
_HELDOUT = ("after_sampled", "running", "before_sampled")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProgress:
    """How much of the present phase is done, counted in the phase's own steps."""

    name: str
    num_done: int
    num_total: int

    @property
    def share(self) -> float:
        """Return the share that is done, from 0 to 1."""
        return min(1.0, self.num_done / self.num_total) if self.num_total else 0.0


def progress_of(snapshot: Snapshot) -> PhaseProgress:
    """Return the progress of the phase, in steps; an evaluation's is in the tasks of all so far."""
    status, stats = snapshot.status, snapshot.stats
    name = snapshot.phase.name.lower().replace("_", " ")
    if status is None or snapshot.phase is Phase.STARTING:
        return PhaseProgress(name="starting", num_done=0, num_total=0)
    if snapshot.phase is Phase.WARM_START:
        done, total = status.num_warm_start_steps, status.max_warm_start_steps
    elif snapshot.phase is Phase.EVALUATING and stats is not None:
        counts = stats.evaluation
        done = counts.num_groups_consumed + sum(counts.num_groups_dropped.values())
        total = done + counts.num_open
    else:
        done, total = status.num_train_steps, status.max_train_steps
    return PhaseProgress(name=name, num_done=done, num_total=total)


class TimeLeft:
    """Estimates the time left in a phase from its speed so far."""

    def __init__(self) -> None:
        self._phase = ""
        self._first = (0.0, 0)

    def seconds(self, progress: PhaseProgress, now: float) -> float | None:
        """Return the seconds until the phase's last step; None before its first one."""
        if progress.name != self._phase:
            self._phase, self._first = progress.name, (now, progress.num_done)
        since, already = self._first
        num_new = progress.num_done - already
        if num_new <= 0:
            return None
        return (progress.num_total - progress.num_done) * (now - since) / num_new


def figures_of(snapshot: Snapshot) -> dict[str, str]:
    """Return everything that is shown beside the progress, by name."""
    metrics = snapshot.status.metrics if snapshot.status else {}
    stats = snapshot.stats
    version = snapshot.status.policy_version if snapshot.status else None
    alarms = snapshot.status.alarms if snapshot.status else ()
    return {
        "reward": _number(metrics.get("train/reward")),
        "signal": _signal_of(metrics),
        "held-out reward": _heldout_of(metrics),
        "tool-call rate": _number(metrics.get("train/tool_call_rate")),
        "tokens/s": _rates_of(snapshot),
        "queue": groups_line(stats.training) if stats else _UNKNOWN,
        "staleness": f"{_number(metrics.get('train/staleness_mean'))} mean, "
        f"{_number(metrics.get('train/staleness_max'), 0)} at most",
        "policy": str(version) if version else _UNKNOWN,
        "credits": str(stats.credits) if stats else _UNKNOWN,
        "alarms": ", ".join((*snapshot.alarms, *alarms)) or _UNKNOWN,
    }


def _signal_of(metrics: dict[str, float]) -> str:
    """Return how many of the newest train step's candidates could be trained."""
    num_trained = metrics.get("train/num_groups_trained")
    if num_trained is None:
        return _UNKNOWN
    num_candidates = num_trained + metrics.get("train/num_groups_dropped", 0.0)
    return f"{num_trained:.0f} of {num_candidates:.0f} groups"


def _heldout_of(metrics: dict[str, float]) -> str:
    """Return the newest held-out mean reward, with the episodes that failed and are not in it."""
    labels = (f"evaluation/{label}" for label in _HELDOUT)
    newest = next((label for label in labels if f"{label}/mean_reward" in metrics), None)
    if newest is None:
        return _UNKNOWN
    num_failed = metrics.get(f"{newest}/num_failed", 0.0)
    failed = f" ({num_failed:.0f} failed)" if num_failed else ""
    return _number(metrics[f"{newest}/mean_reward"]) + failed


def _rates_of(snapshot: Snapshot) -> str:
    """Return the rates that are known."""
    rates = {
        "generated": snapshot.sampled_tokens_per_s,
        "trained": snapshot.trained_tokens_per_s,
    }
    known = [f"{rate:.0f} {name}" for name, rate in rates.items() if rate is not None]
    return ", ".join(known) or _UNKNOWN


def _number(value: float | None, digits: int = 2) -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}"


class LiveView:
    """Shows snapshots as they come. It is a context that leaves the terminal as it was."""

    def __init__(self, console: Console, log: LogStream) -> None:
        self._console = console
        self._log = log
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._left = TimeLeft()
        self._printed: tuple[PhaseProgress, str] | None = None
        self._printed_at = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Draw the table anew. Without a terminal, print lines when there is something new."""
        self.show_progress(progress_of(snapshot), figures_of(snapshot))

    def show_progress(self, progress: PhaseProgress, figures: dict[str, str]) -> None:
        """Do the same with a phase that no snapshot tells of."""
        now = time.monotonic()
        headline = _headline(progress, self._left.seconds(progress, now))
        if self._console.is_terminal:
            headline = f"{self._log.elapsed_s:.0f} s  {headline}"
            self._live.update(_table(headline, progress, figures), refresh=True)
            return
        new = progress, figures.get("alarms", _UNKNOWN)
        every_s = _LINES_EVERY_S if new != self._printed else _AT_LEAST_EVERY_S
        if now - self._printed_at < every_s:
            return
        self._printed, self._printed_at = new, now
        for line in lines_of(headline, figures, _WIDTH - self._log.margin):
            self._log.say("stack", line)


def lines_of(headline: str, figures: dict[str, str], width: int) -> list[str]:
    """Return the headline and every figure that has a value, in lines of up to `width` columns."""
    lines = [headline]
    for name, value in figures.items():
        if value.startswith(_UNKNOWN):
            continue
        for part in _wrap(f"{name} {value}", width):
            joined = f"{lines[-1]} | {part}"
            if len(joined) <= width:
                lines[-1] = joined
            else:
                lines.append(part)
    return lines


def _wrap(text: str, width: int) -> list[str]:
    """Return the text in lines; a number stays with its word, as in `16 trained`."""
    glued = re.sub(r"(?<=\d) (?=[a-z])", _NO_BREAK, text)
    lines = textwrap.wrap(glued, width, break_long_words=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _headline(progress: PhaseProgress, left_s: float | None) -> str:
    steps = f" {progress.num_done}/{progress.num_total}" if progress.num_total else ""
    left = "" if left_s is None else f", about {left_s:.0f} s left"
    return f"{progress.name}{steps}{left}"


def _table(headline: str, progress: PhaseProgress, figures: dict[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, value in figures.items():
        table.add_row(Text(name, style="dim"), value)
    # A bar by itself does not end its line, so it gets a row of a table.
    bar = Table.grid()
    bar.add_row(ProgressBar(total=1.0, completed=progress.share, width=60))
    return Group(Text(headline, style="bold"), bar, table)
