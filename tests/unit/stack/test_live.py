"""The live view: lines stay apart on a terminal, and fit 80 columns elsewhere."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from dialoop.clients.replay import LedgerCounts
from dialoop.clients.trainer import Phase, TrainerStatus
from dialoop.sequences import PolicyVersion
from dialoop_ops.policies import rescore
from dialoop_ops.stack import commands as stack
from dialoop_ops.stack.job import rescoring_progress
from dialoop_ops.stack.processes.log_stream import LogStream
from dialoop_ops.stack.report import live
from dialoop_ops.stack.report.live import LiveView, PhaseProgress
from dialoop_ops.stack.report.observer import Snapshot
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.config.job import JobConfig
from rich.console import Console

EMPTY = LedgerCounts(
    **{f.name: 0 for f in fields(LedgerCounts) if f.name.startswith("num_") and f.type == "int"}
)


def snapshot(step: int, *alarms: str) -> Snapshot:
    status = TrainerStatus(
        phase=Phase.TRAINING,
        policy_version=PolicyVersion(lineage="main", number=step),
        num_train_steps=step,
        max_train_steps=40,
        num_warm_start_steps=0,
        max_warm_start_steps=0,
        num_parameters=1,
        metrics={
            "train/reward": 0.9,
            "train/tool_call_rate": 0.25,
            "train/staleness_mean": 1.0,
            "train/staleness_max": 2.0,
        },
        alarms=alarms,
        failure="",
    )
    return Snapshot(
        status=status,
        stats=None,
        num_sampled_tokens=9,
        sampled_tokens_per_s=3.0,
        trained_tokens_per_s=None,
    )


def show(tmp_path: Path, console: Console, *snapshots: Snapshot) -> None:
    view = LiveView(console, LogStream(console, tmp_path))
    with view:
        for snapshot_now in snapshots:
            view.show(snapshot_now)


def test_the_bar_and_the_first_figure_stand_on_lines_of_their_own(tmp_path: Path) -> None:
    output = io.StringIO()
    show(tmp_path, Console(file=output, force_terminal=True, width=100), snapshot(12))
    bars = [line for line in output.getvalue().splitlines() if "━" in line]
    assert bars
    assert not any("reward" in line for line in bars)


def test_without_a_terminal_no_line_is_wider_than_80_columns(tmp_path: Path) -> None:
    output = io.StringIO()
    alarm = "LEASES_WAIT: 4 groups wait since 300 s, and nobody takes them from the queue"
    show(tmp_path, Console(file=output, width=200), snapshot(12, alarm))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(line[23:] for line in lines)
    for words in ("training 12/40", "reward 0.90", "tool-call rate 0.25", "policy main-12", alarm):
        assert words in text


def test_without_a_terminal_a_count_stays_on_the_line_of_its_word() -> None:
    queue = "17 playing, 0 unscored, 16 scored, 16 training, 160 trained, 11 dropped"
    for width in range(20, 80):
        lines = live.lines_of("training 10/24", {"queue": queue}, width)
        assert max(map(len, lines)) <= width
        assert not any(line[-1].isdigit() for line in lines[1:])


def test_without_a_terminal_a_line_is_printed_only_for_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    console = Console(file=output, width=200)
    view = LiveView(console, log := LogStream(console, tmp_path))
    monkeypatch.setattr(log, "_started", 0.0)
    steps = []
    for step, now in ((1, 0.0), (1, 6.0), (2, 12.0), (2, 18.0), (2, 50.0)):
        monkeypatch.setattr(live.time, "monotonic", lambda now=now: now)
        before = output.tell()
        view.show(snapshot(step))
        steps.append(output.tell() > before)
    assert steps == [True, False, True, False, True]


def test_an_evaluation_counts_its_tasks_and_says_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    console = Console(file=output, width=200)
    view = LiveView(console, LogStream(console, tmp_path))
    for ended, now in ((10, 0.0), (25, 30.0)):
        counts = replace(
            EMPTY,
            num_tasks_offered=80 - ended,
            num_groups_leased=12,
            num_groups_scored=8,
            num_groups_consumed=ended - 3,
            num_groups_dropped={"failed": 3},
        )
        stats = SimpleNamespace(training=EMPTY, evaluation=counts, credits=0)
        monkeypatch.setattr(live.time, "monotonic", lambda now=now: now)
        evaluating = replace(snapshot(4).status, phase=Phase.EVALUATING)
        view.show(replace(snapshot(4), status=evaluating, stats=stats))
    # 15 of the other 75 took 30 s.
    assert "evaluating 10/100 " in output.getvalue()
    assert "evaluating 25/100, about 150 s left" in output.getvalue()


def test_a_rescoring_shows_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    show_rows = rescore._print_progress()
    show_rows(64, 256)
    show_rows(65, 256)  # too soon
    (line,) = capsys.readouterr().out.splitlines()
    progress = rescoring_progress(line)
    assert progress == PhaseProgress(name="re-scoring", num_done=64, num_total=256)
    output = io.StringIO()
    console = Console(file=output, width=200)
    LiveView(console, LogStream(console, tmp_path)).show_progress(progress, {})
    assert "re-scoring 64/256" in output.getvalue()


@pytest.mark.parametrize("line", ["", "Loading.", "3", '{"num_rows": 4}', '{"num_done": 1'])
def test_other_lines_of_the_rescoring_tell_of_no_progress(line: str) -> None:
    assert rescoring_progress(line) is None


def save(run_dir: Path, **progress: object) -> None:
    folder = run_dir / "checkpoints" / "main-25-000025"
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps(progress))
    (folder.parent / "latest.json").write_text(json.dumps({"name": folder.name}))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_cancels_the_work_and_is_the_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    cleaned_up = asyncio.Event()

    async def work() -> int:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            cleaned_up.set()
        return 0

    output = io.StringIO()
    log = LogStream(Console(file=output), tmp_path)
    try:
        assert await stack._until_stopped(work(), log) == 128 + number
    finally:
        for handled in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(handled)
    assert cleaned_up.is_set()
    assert "stopping; a second Ctrl-C ends everything at once" in output.getvalue()


def test_an_interrupt_says_what_is_saved_and_how_to_go_on(tmp_path: Path) -> None:
    config = JobConfig.model_validate({"warm_start": {"num_steps": 100}})
    words = ["train", "job.toml", "--run", "mine", "--fresh"]
    run_dir = RunDir(path=tmp_path, run_id="r-1")
    farewell = stack._farewell(run_dir, config, words)
    assert farewell.endswith("Start again with `dialoop train job.toml --run mine --fresh`.")
    version = {"lineage": "main", "number": 25}
    save(tmp_path, policy_version=version, num_warm_start_steps=100, num_train_steps=25)
    assert stack._farewell(run_dir, config, words) == (
        f"Stopped. Saved in {tmp_path}: train step 25 of 50, policy main-25. "
        "Go on with `dialoop train job.toml --run mine`."
    )
