"""Groups that were trained and come back, from a queue that lost its last seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dialoop_services.trainer.job.state import JobState

from tests.support.trainer_world import World, worlds


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path, num_steps=2, checkpoint_every=1) as make:
        yield make


async def test_a_group_that_returns_after_its_checkpoint_is_acknowledged_and_not_trained_again(
    world: Callable[..., World],
) -> None:
    here = world()
    here.offer("a", "b")
    here.offer("a", "b", prefix="again-")
    here.offer("c", "d")
    await here.run()
    assert here.learner.trained == [4, 4]
    acknowledged = here.replay.acknowledged
    assert {"again-lease-a", "again-lease-b", "lease-c", "lease-d"} <= set(acknowledged)


def test_consumed_groups_are_remembered_until_they_would_be_stale_and_longer() -> None:
    state = JobState(num_policy_versions=3, consumed_group_ids={"a": 3})
    state.num_policy_versions = 3 + 7
    state.forget_consumed(max_staleness=7)
    assert "a" in state.consumed_group_ids
    state.num_policy_versions = 1000
    state.forget_consumed(max_staleness=7)
    assert not state.consumed_group_ids
