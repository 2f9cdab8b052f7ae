"""Bounds on a group's share of successes; both are exclusive."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dialoop import testing
from dialoop.trajectory import Reward
from dialoop_services.config.candidates import CandidateSettings
from dialoop_services.config.tables import TrainFields
from dialoop_services.trainer.data.batches import sort_batch
from pydantic import ValidationError

from tests.support.trainer_world import FIRST, lease


def group_of(*rewards: float):
    leased = lease("g", FIRST)
    member = leased.group.trajectories[0]
    members = tuple(
        replace(member, trajectory_id=str(index), turns=(turn_of(reward),))
        for index, reward in enumerate(rewards)
    )
    task = replace(leased.group.task, num_trajectories=len(members))
    return replace(leased, group=replace(leased.group, task=task, trajectories=members))


def turn_of(reward: float):
    (turn,) = testing.trajectory(reward=reward).turns
    return replace(turn, rewards=(Reward(name="r", value=reward),))


@pytest.mark.parametrize(
    ("rewards", "bounds", "is_trained"),
    [
        ((1.0, 0.0), {}, True),
        ((1.0, 0.0), {"success_rate_above": 0.5}, False),
        ((1.0, 0.0), {"success_rate_above": 0.49, "success_rate_below": 0.51}, True),
        ((1.0, 0.0), {"success_rate_below": 0.5}, False),
        ((1.0, 1.0, 1.0, 0.0), {"success_rate_below": 0.75}, False),
        ((0.6, 0.4), {"success_rate_above": 0.1}, False),
        ((0.6, 0.4), {"success_rate_above": 0.1, "success_reward": 0.5}, True),
    ],
)
def test_a_group_is_trained_if_its_share_is_between_the_bounds(rewards, bounds, is_trained):
    batch = sort_batch(
        [group_of(*rewards)],
        current=FIRST,
        max_staleness=0,
        consumed_group_ids=(),
        candidates=CandidateSettings(**bounds),
    )
    assert bool(batch.train) is is_trained
    assert set(batch.dropped) == (set() if is_trained else {"success_rate"})


def test_bounds_without_room_between_them_are_refused():
    with pytest.raises(ValidationError, match="set success_rate_above below success_rate_below"):
        CandidateSettings(success_rate_above=0.5, success_rate_below=0.5)


def test_oversampling_rounds_the_groups_in_work_up():
    train = {"groups_per_train_step": 3, "pipeline_depth": 0}
    assert TrainFields(**train).max_outstanding_groups == 3
    assert TrainFields(**train, candidates={"oversampling": 1.5}).max_outstanding_groups == 5
