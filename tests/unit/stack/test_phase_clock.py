"""Time and CPU of a run count over all its starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from dialoop_ops.stack.report import observer
from dialoop_ops.stack.report.observer import PhaseClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the clocks of the machine say."""
    now = SimpleNamespace(wall=100.0, cpu=7.0)
    monkeypatch.setattr(observer, "time", SimpleNamespace(monotonic=lambda: now.wall))
    monkeypatch.setattr(observer, "total_cpu_s", lambda: now.cpu)
    return now


def test_a_resumed_run_goes_on_counting(tmp_path: Path, now: SimpleNamespace) -> None:
    clock = PhaseClock(tmp_path)
    now.wall, now.cpu = 110.0, 12.0
    clock.record("training", 500)
    # Killed, and started again on a machine whose clocks say something else.
    now.wall, now.cpu = 3.0, 1.0
    again = PhaseClock(tmp_path)
    assert again.num_sampled_tokens == 500
    now.wall, now.cpu = 5.0, 2.0
    again.record("starting")
    now.wall, now.cpu = 9.0, 4.0
    again.record("training", 30)
    assert again.seconds == {
        "training": {"wall_s": 14.0, "cpu_s": 7.0},
        "starting": {"wall_s": 2.0, "cpu_s": 1.0},
    }
    assert again.num_sampled_tokens == 530


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
def test_a_damaged_file_is_no_reason_to_stop(
    tmp_path: Path, now: SimpleNamespace, damage: str
) -> None:
    (tmp_path / "clock.json").write_text(damage)
    clock = PhaseClock(tmp_path)
    now.wall = 101.5
    clock.record("starting")
    assert clock.seconds == {"starting": {"wall_s": 1.5, "cpu_s": 0.0}}
    assert PhaseClock(tmp_path).seconds == clock.seconds
