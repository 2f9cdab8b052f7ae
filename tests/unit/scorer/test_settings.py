"""What a scorer's settings do to a group, from the settings on, as the service makes its scorer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.sequences import Source, sequence_of
from dialoop.trajectory import Group, Reward, Turn
from dialoop_ops.stack.layout import Layout, ports_of
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.config.file import toml_of
from dialoop_services.config.job import JobConfig
from dialoop_services.runtime import load
from dialoop_services.scorer.__main__ import make_scorer
from dialoop_services.scorer.settings import ScorerSettings
from pydantic import ValidationError

from tests.support.samples.scorer_samples import MAIN_0, make_group

HALF_ROOT = 0.5**0.5


def group_of(*rewards: tuple[float, ...]) -> Group:
    """A trajectory for each tuple; its first turn has one sampled token, its second two, ..."""
    group = make_group(*(0.0 for _ in rewards))
    pairs = zip(group.trajectories, rewards, strict=True)
    trajectories = (
        replace(
            trajectory,
            turns=tuple(
                Turn(message_start=1, num_messages=1, rewards=(Reward(name="r", value=value),))
                for value in values
            ),
            sequences=(
                sequence_of(
                    [
                        ([5, 6], {"source": Source.PROMPT}),
                        *(
                            (
                                [7] * (turn + 1),
                                {"source": Source.MODEL, "policy_version": MAIN_0, "turn": turn},
                            )
                            for turn in range(len(values))
                        ),
                    ],
                    logprobs=[-1.0] * sum(range(len(values) + 1)),
                ),
            ),
        )
        for trajectory, values in pairs
    )
    return replace(group, trajectories=tuple(trajectories))


async def advantages_of(group: Group, **settings: Any) -> list[Any]:
    """The advantages of each trajectory's sequence: one number, or one of each sampled token."""
    scored = await make_scorer(ScorerSettings(**settings).require_consistent()).score(group)
    rows = [trajectory.sequences[0] for trajectory in scored.trajectories]
    return [
        row.token_advantages.tolist() if len(row.token_advantages) else row.advantage
        for row in rows
    ]


async def test_a_trajectory_has_one_advantage_of_the_sum_of_its_turns() -> None:
    group = group_of((1.0, 0.0), (1.0, 2.0))
    assert await advantages_of(group) == pytest.approx([-HALF_ROOT, HALF_ROOT])
    assert await advantages_of(group, divide_by_std=False) == [-1.0, 1.0]
    assert await advantages_of(group, divide_by_std=False, leave_one_out=True) == [-2.0, 2.0]


@pytest.mark.parametrize(
    ("aggregate", "better", "best"), [("sum", 0, 2), ("max", 1, 1), ("mean", 1, 1)]
)
async def test_a_trajectorys_reward_is_the_sum_the_largest_or_the_mean_of_its_turns(
    aggregate: str, better: int, best: int
) -> None:
    # sums 3, 2; largest 1, 2; means 0.75, 2
    two = group_of((1.0, 1.0, 1.0, 0.0), (2.0,))
    advantages = await advantages_of(two, advantage_aggregate=aggregate)
    assert advantages[better] == pytest.approx(HALF_ROOT)
    assert advantages[1 - better] == pytest.approx(-HALF_ROOT)
    # sums 0, 2, 3; largest 0, 2, 1; means 0, 2, 0.75
    three = group_of((0.0,), (2.0,), (1.0, 1.0, 1.0, 0.0))
    advantages = await advantages_of(three, advantage_aggregate=aggregate, top_k=1)
    assert advantages == [float(place == best) for place in range(3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantages_of": "turn", "advantage_aggregate": "max"}, "advantage_aggregate is max"),
        ({"advantages_of": "turn", "top_k": 1}, "top_k chooses whole trajectories"),
        ({"kl_coefficient": 0.1, "advantage_aggregate": "mean"}, "shrink the KL penalty"),
        ({"advantage_estimator": "m:f", "advantages_of": "turn"}, "so advantages_of would have no"),
        ({"advantage_estimator": "m:f", "divide_by_std": False}, "so divide_by_std would have no"),
        ({"advantage_estimator": "m:f", "top_k": 1}, "so top_k would have no"),
    ],
)
def test_settings_of_which_one_would_undo_the_other_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        JobConfig.model_validate({"scorer": settings})


async def test_advantages_of_turns_are_given_to_each_turns_own_tokens() -> None:
    # rewards 0, 0 | 0, 1: mean 0.25, std 0.5
    advantages = await advantages_of(group_of((0.0, 0.0), (0.0, 1.0)), advantages_of="turn")
    assert advantages == [pytest.approx([-0.5, -0.5, -0.5]), pytest.approx([-0.5, 1.5, 1.5])]


async def test_the_best_alone_are_to_be_imitated() -> None:
    group = group_of((0.1,), (0.4,), (0.5,), (0.9,), (0.7,))
    assert await advantages_of(group, top_k=3) == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert await advantages_of(group, top_k=1) == [0.0, 0.0, 0.0, 1.0, 0.0]
    with pytest.raises(InvalidInput) as caught:
        await advantages_of(group, top_k=6)
    assert caught.value.reason == "TOP_K_TOO_LARGE"


async def test_rewards_that_differ_by_no_more_than_eps_have_no_advantage() -> None:
    group = group_of((0.0,), (0.01,))
    assert await advantages_of(group, advantage_eps=0.1) == [0.0, 0.0]
    assert await advantages_of(group) == pytest.approx([-HALF_ROOT, HALF_ROOT])


def test_a_job_says_where_its_reference_model_is_and_in_which_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = {"device": "cuda:1", "dtype": "bfloat16", "num_threads": 3}
    config = JobConfig.model_validate({"scorer": scorer})
    ports = ports_of(config, with_redis=False)
    layout = Layout(config=config, run_dir=RunDir(path=tmp_path, run_id="r"), ports=ports)
    (tmp_path / "job.toml").write_text(toml_of(config))
    for name, value in layout.spec("scorer").environment.items():
        monkeypatch.setenv(name, value)
    settings = load(ScorerSettings)
    assert (settings.device, settings.dtype, settings.num_threads) == ("cuda:1", "bfloat16", 3)
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(
        "dialoop_services.scorer.reference.load_reference",
        lambda path, **options: arguments.update(options, path=path),
    )
    make_scorer(settings).model().load()
    assert arguments == {
        "path": settings.model_dir,
        "device": "cuda:1",
        "dtype": "bfloat16",
        "num_threads": 3,
        "max_row_tokens": 4096,
    }


@pytest.mark.parametrize("device", ["gpu", "cuda:", "mps"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ValidationError, match=r"scorer\.device"):
        JobConfig.model_validate({"scorer": {"device": device}})


ESTIMATORS = """
import asyncio

async def ranked(rewards):
    await asyncio.sleep(0)
    best_last = sorted(range(len(rewards)), key=rewards.__getitem__)
    return [float(best_last.index(place)) for place in range(len(rewards))]

def greedy(rewards):
    rewards[:] = [float("nan")] * len(rewards)       # its own list, and nobody else's
    return [1.0] * 3

def short(rewards): return rewards[1:]
def not_a_number(rewards): return [float("nan")] * len(rewards)
def nothing(rewards): return None
def raises(rewards): raise KeyError("a secret of the function")
def lengths(group): return [float(len(t.turns)) for t in group.trajectories]
def both(group, rewards): return [r * len(t.turns) for r, t in zip(rewards, group.trajectories)]
def more(rewards, group, step): return rewards
constant = 1.0
"""

NO_ESTIMATORS = ("missing", "constant", "more")


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_estimators.py").write_text(ESTIMATORS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_file")
async def test_an_estimator_of_ones_own_gets_whole_groups_and_gives_each_trajectory_one() -> None:
    group = group_of((2.0, 1.0), (0.5,), (1.0,))
    path = "own_estimators:ranked"
    assert await advantages_of(group, advantage_estimator=path) == [2.0, 0.0, 1.0]
    largest = await advantages_of(
        group_of((2.0, 1.0), (2.5,), (1.0,)), advantage_estimator=path, advantage_aggregate="max"
    )
    assert largest == [1.0, 2.0, 0.0]
    path = "own_estimators:greedy"
    assert await advantages_of(group, advantage_estimator=path) == [1.0, 1.0, 1.0]
    path = "own_estimators:lengths"
    assert await advantages_of(group, advantage_estimator=path) == [2.0, 1.0, 1.0]
    path = "own_estimators:both"
    assert await advantages_of(group, advantage_estimator=path) == [6.0, 0.5, 1.0]


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("short", "gave 1 advantages for 2 rewards"),
        ("not_a_number", "gave an advantage that is not finite"),
        ("nothing", "returned a NoneType"),
        ("raises", "raised KeyError"),
    ],
)
async def test_an_estimators_mistake_is_an_error_with_its_name(name: str, how: str) -> None:
    with pytest.raises(PreconditionFailed, match=f"own_estimators:{name} {how}") as caught:
        await advantages_of(group_of((0.0,), (1.0,)), advantage_estimator=f"own_estimators:{name}")
    assert caught.value.reason == "ESTIMATOR_FAILED"
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize(
    "path",
    ["median", "no_such_module:f", *(f"own_estimators:{name}" for name in NO_ESTIMATORS)],
)
def test_an_estimator_that_is_none_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(InvalidConfig, match=f"advantage estimator '{path}'") as caught:
        make_scorer(ScorerSettings(advantage_estimator=path))
    assert caught.value.reason == "ESTIMATOR_NOT_FOUND"
    assert caught.value.remedy
