"""The pipeline's depth and the bound of ages, as a job chooses them from what its steps measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dialoop import testing
from dialoop.trajectory import Group, Turn
from dialoop_services.trainer.job.pace import Pace
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.settings import TrainerSettings
from pydantic import ValidationError

BUSY_S = 1.0


def settings(tmp_path: Path, **named: Any) -> TrainerSettings:
    return TrainerSettings(run_dir=tmp_path, groups_per_train_step=4, **named)


def group(*seconds: float) -> Group:
    def turn(taken: float) -> Turn:
        return Turn(message_start=0, num_messages=1, generate_s=taken / 4, step_s=taken / 4)

    members = (testing.trajectory(turns=(turn(s), turn(s))) for s in seconds)
    return testing.group(*members)


def train(pace: Pace, lease_s: float, play_s: float, **row: Any) -> dict[str, Any]:
    """A step of one second that waited for groups which were played for so long."""
    times = {"lease_s": lease_s, "rows_s": 0.1, "train_s": BUSY_S - 0.2, "wait_s": 0.1}
    told = pace.row_of([group(play_s, play_s / 2)])
    pace.after_step({"num_updates": 1, "num_groups_dropped": 0, **times, **row, **told})
    return told


def run(pace: Pace, num_steps: int, times: Callable[[int], tuple[float, float]]) -> list[int]:
    """Train; `times` says of a depth how long a step waits and a group plays. Return the depths."""
    depths = []
    for _ in range(num_steps):
        train(pace, *times(pace.depth))
        depths.append(pace.depth)
    return depths


def asleep(play_s: float) -> Callable[[int], tuple[float, float]]:
    """Tools sleep, however many there are: depth + 1 batches come in `play_s`."""
    return lambda depth: (max(0.0, play_s / max(1, depth) - BUSY_S), play_s)


def full(batch_s: float) -> Callable[[int], tuple[float, float]]:
    """An engine has more to do than it can: a batch comes every `batch_s` at any depth."""
    return lambda depth: (max(0.0, batch_s - BUSY_S), batch_s * (depth + 1))


def test_the_depth_is_play_over_training_time_at_once_where_tools_sleep(tmp_path: Path) -> None:
    state = JobState()
    pace = Pace(settings(tmp_path), state)
    assert (pace.depth, pace.max_outstanding_groups) == (2, 12)
    assert run(pace, 40, asleep(12.0)) == [12] * 40
    assert pace.max_outstanding_groups == 13 * 4
    assert Pace(settings(tmp_path), state).depth == 12, "a resumed job goes on with it"


def test_groups_that_teach_nothing_are_played_beside_those_that_are_trained(
    tmp_path: Path,
) -> None:
    pace = Pace(settings(tmp_path), JobState())
    train(pace, 9.0, 12.0, num_groups_dropped=4)  # of which a batch has as many
    assert pace.depth == 24


def test_where_the_engine_is_full_a_deeper_pipeline_is_tried_once_in_a_while(
    tmp_path: Path,
) -> None:
    depths = run(Pace(settings(tmp_path), JobState()), 60, full(2.0))
    assert max(depths) > 2
    assert depths[-1] == 2
    assert depths.count(2) > 40, "most of the time it is as fast without older data"


def test_a_depth_that_nobody_needs_goes_down_to_1_where_turns_would_be_slower(
    tmp_path: Path,
) -> None:
    def beside(depth: int) -> tuple[float, float]:
        return (0.5, 0.5) if depth == 0 else (0.0, 0.5)

    depths = run(Pace(settings(tmp_path), JobState()), 40, beside)
    assert depths[-1] == 1
    assert 0 < depths.count(0) < 10, "it was tried"


def test_they_take_turns_where_that_is_as_fast(tmp_path: Path) -> None:
    """Where trainer and engine share the cores, each is slower beside the other one."""
    pace = Pace(settings(tmp_path), JobState())
    depths = []
    for _ in range(60):
        slowed = 0.0 if pace.depth == 0 else 1.0
        train(pace, 1.0 - slowed, 1.0 + slowed, train_s=BUSY_S - 0.2 + slowed)
        depths.append(pace.depth)
    assert depths[-1] == 0
    assert depths.count(0) > 35, "another depth is tried once in a while"


def test_no_depth_is_chosen_where_the_job_names_one_or_nothing_can_run_beside(
    tmp_path: Path,
) -> None:
    named = settings(tmp_path, pipeline_depth=3)
    assert run(Pace(named, JobState()), 20, asleep(12.0)) == [3] * 20
    shared = settings(tmp_path, device_lock=tmp_path / "lock")
    assert run(Pace(shared, JobState()), 20, asleep(12.0)) == [0] * 20
    with pytest.raises(ValidationError, match="shared device"):
        settings(tmp_path, device_lock=tmp_path / "lock", pipeline_depth=1)


def test_the_depth_stays_below_the_age_that_the_job_allows(tmp_path: Path) -> None:
    pace = Pace(settings(tmp_path, max_staleness=5), JobState())
    assert run(pace, 20, asleep(12.0))[-1] == 5
    assert pace.max_staleness == 5


def test_a_depth_whose_data_would_be_too_old_is_given_up_at_once(tmp_path: Path) -> None:
    pace = Pace(settings(tmp_path), JobState())
    assert run(pace, 3, asleep(12.0))[-1] == 12
    for _ in range(3):
        train(pace, 9.0, 12.0, by_staleness={4: {"num_tokens": 64, "ess": 0.1}})
    assert (pace.max_staleness, pace.depth) == (3, 3)


@pytest.mark.parametrize(("oldest", "depth"), [(0, 0), (1, 1), (4, 2), ("auto", 2)])
def test_the_first_depth_is_none_that_the_job_s_bound_of_ages_would_drop(
    tmp_path: Path, oldest: int | str, depth: int
) -> None:
    own = settings(tmp_path, max_staleness=oldest)
    assert (own.first_depth, Pace(own, JobState()).depth) == (depth, depth)


def test_an_age_whose_tokens_teach_next_to_nothing_is_too_old(tmp_path: Path) -> None:
    pace = Pace(settings(tmp_path), JobState())
    assert pace.max_staleness is None

    def ages(**ess: float) -> dict[int, dict[str, float]]:
        return {int(age[1:]): {"num_tokens": 64, "ess": value} for age, value in ess.items()}

    few = {9: {"num_tokens": 63, "ess": 0.1}}
    assert "max_staleness" not in train(pace, 0.0, 1.0, by_staleness=ages(a0=1.0, a3=0.3) | few)
    assert pace.max_staleness is None
    for _ in range(2):
        train(pace, 0.0, 1.0, by_staleness=ages(a1=0.8, a4=0.29, a6=0.1))
    assert pace.max_staleness is None, "one token with a large ratio says so of one step"
    train(pace, 0.0, 1.0, by_staleness=ages(a1=0.1, a4=0.29, a6=0.1))
    assert pace.max_staleness == 3
    assert train(pace, 0.0, 1.0)["max_staleness"] == 3
    for _ in range(10):
        train(pace, 0.0, 1.0)
    assert pace.max_staleness == 6, "older ones are tried again by and by"


def test_a_step_tells_how_long_its_episodes_were_played(tmp_path: Path) -> None:
    pace = Pace(settings(tmp_path, pipeline_depth=1), JobState())
    assert pace.row_of([group(1.0, 3.0), group(2.0)]) == {
        "pipeline_depth": 1,
        "play_s_mean": pytest.approx(2.0),
        "play_s_p99": pytest.approx(3.0),
        "group_play_s": pytest.approx(2.5),
    }


def test_a_batch_whose_updates_were_refused_decides_nothing(tmp_path: Path) -> None:
    pace = Pace(settings(tmp_path), JobState())
    for _ in range(20):
        train(pace, 9.0, 12.0, num_updates=0)
    assert pace.depth == 2
