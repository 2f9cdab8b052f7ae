"""The overview on a terminal: the first page of the console, and no escape of a model."""

from __future__ import annotations

from io import StringIO
from statistics import fmean

from dialoop_ops.cli.overview import screen_of
from dialoop_ops.runs.overview import overview_of
from rich.console import Console

from tests.unit.runs.test_overview import answer, step, write_run


def test_the_terminal_says_what_the_page_says_on_one_screen(tmp_path):
    before, after = [0.0] * 9 + [1.0] * 3, [0.0] * 3 + [1.0] * 9
    rows, metrics = [], [step(number) for number in range(1, 100)]
    for label, number, rewards in (("before_sampled", 0, before), ("after_sampled", 99, after)):
        rows += [answer(label, number, task, reward) for task, reward in enumerate(rewards)]
        metrics.append(
            {"kind": "evaluation", "time": 1.0, "train_step": number, "label": label}
            | {"mean_reward": fmean(rewards), "num_trajectories": len(rewards)}
        )
    running = {"kind": "evaluation", "time": 1.0, "label": "running", "num_trajectories": 12}
    metrics += [running | {"train_step": n, "mean_reward": n / 100} for n in range(10, 90)]
    rows[3]["messages"][2]["content"] = "\x1b[2Jgone \u202e" + "long " * 90
    index = write_run(tmp_path / "run", rows, metrics, train={"loss": "grpo"})
    screen = StringIO()
    shown = screen_of("run", overview_of(index), ["queue: 3 tasks offered"], ["NO_SIGNAL"])
    Console(width=120, file=screen).print(shown)
    text = screen.getvalue()
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert "Yes, it rises  0.25 → 0.75, +0.5 (95 %:" in text
    assert "99 of 50 train steps" in text
    assert "queue: 3 tasks offered" in text
    assert "✓ failures of episodes none" in text
    assert "✗ NO_SIGNAL" in text
    assert "train.loss grpo" in text
    assert "gained most, task t3: [system] be brief task 3" in text
    assert "\\x1b[2Jgone \\u202elong" in text
    assert "\x1b[2J" not in text
