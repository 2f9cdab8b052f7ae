"""What asynchrony buys: seconds to a reward, and runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.dividend import __main__ as dividend
from benchmarks.dividend import environments
from benchmarks.servers.real_race import write_json

LAST = dividend.NUM_STEPS


def result(step_s: float, *rewards: float) -> dict[str, Any]:
    """The result of a run with steps of so many seconds; rewards at its start, half and end."""
    names = ("waiting_share", "engine_busy_share", "staleness_mean", "ess_mean")
    names += ("long_share_played", "long_share_trained", "dropped_s_mean", "trained_s_mean")
    return {
        "seconds": {str(step): step_s * step for step in range(LAST + 1)},
        "rewards": dict(zip(("0", str(LAST // 2), str(LAST)), rewards, strict=True)),
        "staleness_max": 3,
        "outcomes": {"trained": 8},
        "depths": [1] * LAST,
        **dict.fromkeys(names, 0.5),
    }


def test_the_moment_of_a_reward_lies_on_the_line_between_two_evaluations() -> None:
    run = result(10.0, 0.2, 0.6, 0.8)
    half_s = 10.0 * LAST / 2
    assert dividend.seconds_to(run, 0.4) == pytest.approx(half_s / 2)
    assert dividend.seconds_to(run, 0.6) == pytest.approx(half_s)
    assert dividend.seconds_to(run, 0.7) == pytest.approx(1.5 * half_s)
    assert dividend.seconds_to(run, 0.9) is None
    assert dividend.seconds_to(run, 0.2) == 0.0


def test_runs_are_compared_at_the_reward_that_every_seed_of_depth_0_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dividend, "FOLDER", tmp_path)
    write_json(tmp_path / "slow" / "0_0.json", result(10.0, 0.2, 0.6, 0.85))
    write_json(tmp_path / "slow" / "0_1.json", result(20.0, 0.2, 0.6, 0.92))
    write_json(tmp_path / "slow" / "auto_0.json", result(1.0, 0.2, 0.6, 0.85))
    write_json(tmp_path / "slow" / "auto_1.json", result(4.0, 0.2, 0.6, 0.92))
    write_json(tmp_path / "slow" / "4_0.json", result(1.0, 0.2, 0.3, 0.4))
    figures = dividend.report("slow")
    assert figures["target"] == 0.8
    assert figures["ways"]["auto"]["times_as_fast"] == pytest.approx((10 + 5) / 2)
    assert figures["ways"]["4"]["times_as_fast"] is None, "it never came so far"
    assert figures["ways"]["0"]["outcomes"] == {"trained": 16}


@pytest.mark.parametrize("make", [environments.chains, environments.counting])
def test_the_tasks_of_an_environment_are_none_of_training_s_where_they_are_held_out(
    make: Any,
) -> None:
    environment = make()
    tasks = environment.tasks
    assert len(tasks.keys("heldout")) == dividend.NUM_HELDOUT
    assert not set(tasks.keys("heldout")) & set(tasks.keys("train"))
