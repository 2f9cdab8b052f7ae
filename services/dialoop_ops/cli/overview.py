"""The overview of a run on a terminal: what the console's first page shows, on one screen.

`screen_of("demo", overview_of(index), lines)` is what `dialoop watch` draws every second.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dialoop_ops.runs.display import visible
from dialoop_ops.runs.overview import FALLS, RISES, UNCLEAR, UNKNOWN
from dialoop_ops.runs.summaries import content_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop_ops.runs.overview import Learning, Overview, PolicyAnswer

_VERDICTS = {
    RISES: ("Yes, it rises", "bold green"),
    FALLS: ("No, it falls", "bold red"),
    UNCLEAR: ("Cannot be told yet", "bold yellow"),
    UNKNOWN: ("Nothing to compare yet", "bold"),
}
_LOSS_VERDICTS = _VERDICTS | {
    FALLS: ("Yes, the loss falls", "bold green"),
    RISES: ("No, the loss rises", "bold red"),
}
_MARKS = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("?", "yellow")}
_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_BLOCKS = 40
_BAR = 24
_SHOWN_FROM = 0.01
_NUM_EVALUATIONS = 4
_PARTS = ("blue", "yellow", "green", "magenta", "cyan", "red", "white")


def screen_of(
    name: str, overview: Overview, lines: Sequence[str], alarms: Sequence[str] = ()
) -> RenderableType:
    """Return the overview; `lines` say what the run's stack does now, `alarms` what is wrong."""
    screen = Table.grid(expand=True)
    screen.add_column(ratio=3)
    screen.add_column(ratio=2)
    screen.add_row(
        Group(
            Panel(_learning(overview.learning), title="Is it learning?", title_align="left"),
            Panel(_answers(overview), title="What does it say?", title_align="left"),
            Panel(_lines([Text(line) for line in lines]), title="Now", title_align="left"),
        ),
        Group(
            Panel(_checks(overview, alarms), title="Is it sound?", title_align="left"),
            Panel(_parts(overview), title="What does it wait for?", title_align="left"),
            Panel(_settings(overview), title="What was set?", title_align="left"),
        ),
    )
    far = (
        f"{name}: {overview.num_train_steps} of {overview.max_train_steps} train steps, "
        f"{overview.num_trajectories:,} trajectories"
    )
    return Group(Text(far, style="bold"), screen)


def _lines(texts: Sequence[Text]) -> Text:
    """Return texts below each other; each is cut off at the end of its line."""
    text = Text("\n", no_wrap=True, overflow="ellipsis").join(texts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _learning(learning: Learning) -> Text:
    says, style = (_LOSS_VERDICTS if learning.is_loss else _VERDICTS)[learning.verdict]
    head = Text(says, style=style)
    if learning.before is not None:
        head.append(f"  {learning.before:.3g}", style="default")
    if learning.before is not None and learning.after is not None:
        head.append(f" → {learning.after:.3g}, {learning.after - learning.before:+.3g}")
    if learning.low is not None and learning.high is not None:
        head.append(f" (95 %: {learning.low:+.3g} to {learning.high:+.3g})", style="dim")
    pairs = f", {learning.num_pairs} tasks" if learning.num_pairs else ""
    texts = [head, Text(f"{learning.of}{pairs}", style="dim")] if learning.of else [head]
    for points in learning.evaluations.values():
        for point in (points[0], *points[1:][-_NUM_EVALUATIONS + 1 :]):
            band = "" if point.low is None else f" ({point.low:.2f} to {point.high:.2f})"
            line = Text(f"{point.label:<15} step {point.train_step:>4}  {point.value:.3f} ")
            if 0.0 <= point.value <= 1.0 and not learning.is_loss:
                line.append(f"{'█' * round(_BAR * point.value):<{_BAR}}", style="blue")
            texts.append(line.append(band, style="dim"))
    if rewards := [value for _, value in learning.training]:
        line = Text(f"training {'loss' if learning.is_loss else 'reward'}  {rewards[-1]:.3g}  ")
        texts.append(line.append(_sparkline(rewards), style="blue"))
    for name, episodes in learning.trials.items():
        texts.append(Text(f"{name}, by episode: {'  '.join(f'{e:.3g}' for e in episodes)}"))
    return _lines(texts)


def _sparkline(values: Sequence[float]) -> str:
    """Return the values as blocks; of many, the means of neighbours."""
    size = -(-len(values) // _NUM_BLOCKS)
    means = [
        sum(part) / len(part)
        for begin in range(0, len(values), size)
        for part in (values[begin : begin + size],)
    ]
    low, high = min(means), max(means)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(steps * (v - low) / (high - low or 1.0))] for v in means)


def _answers(overview: Overview) -> Text:
    texts = []
    for each in overview.answers:
        prompt = " ".join(_said(message) for message in each.prompt)
        texts.append(Text(f"{each.kind}, task {each.task_key}: ", style="bold").append(prompt))
        texts += [_answer("before", each.before)] if each.before else []
        texts.append(_answer("after" if each.before else "now", each.after))
    return _lines(texts or [Text("No task is answered yet.", style="dim")])


def _answer(name: str, answer: PolicyAnswer) -> Text:
    reward = answer.reward or 0.0
    text = Text(f"  {name:<6} ", style="dim")
    text.append(f"{reward:.3g} ", style="green" if reward > 0 else "red")
    return text.append(" ".join(_said(message) for message in answer.messages), style="default")


def _said(message: object) -> str:
    assert isinstance(message, dict)
    role = "" if message["role"] in ("assistant", "user") else f"[{message['role']}] "
    return visible(" ".join(f"{role}{content_text(message.get('content'))}".split()))


def _checks(overview: Overview, alarms: Sequence[str]) -> Text:
    texts = [Text(f"✗ {visible(alarm)}", style="bold red") for alarm in alarms]
    for check in overview.checks:
        mark, style = _MARKS[check.holds]
        text = Text(f"{mark} ", style=style).append(f"{check.name} ", style="default")
        texts.append(text.append(check.says, style="dim"))
    return _lines(texts)


def _parts(overview: Overview) -> Text:
    total = sum(part.seconds for part in overview.parts)
    if not total:
        return Text("No train step has ended yet.", style="dim")
    bar, texts = Text(), []
    for part, style in zip(overview.parts, _PARTS, strict=False):
        share = part.seconds / total
        if share < _SHOWN_FROM:
            continue
        bar.append("█" * round(_BAR * share), style=style)
        says = f" {part.name} {part.seconds:.3g} s, {share:.0%}"
        texts.append(Text("█", style=style).append(says, style="default"))
    return _lines([bar, *texts])


def _settings(overview: Overview) -> Text:
    texts = [f"{each.key} {json.loads(each.value)}" for each in overview.settings]
    return Text(", ".join(map(visible, texts)))
