"""Which leased groups are trained, and which are dropped and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dialoop import testing
from dialoop.clients.replay import GroupLease
from dialoop.sequences import ForkCause, PolicyVersion, Segment, Sequence, Source
from dialoop.trajectory import SamplingParams
from dialoop_services.trainer.data.batches import (
    figures_of_dropped,
    keep_for_step,
    metrics_of_candidates,
    sort_batch,
)
from dialoop_services.trainer.recovery.checkpoint import lineage_after_restore

from tests.support.samples.staleness_samples import CASES

# A trainer always has a bound.
BOUNDED = [case for case in CASES if case[2] is not None]
NOW = PolicyVersion(lineage="main", number=9)


def version(number: int, lineage: str = "main") -> PolicyVersion:
    return PolicyVersion(lineage=lineage, number=number)


def sequence(policy: PolicyVersion, advantage: float) -> Sequence:
    return Sequence(
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        segments=(
            Segment(start=0, length=1, source=Source.PROMPT),
            Segment(start=1, length=2, source=Source.MODEL, policy_version=policy),
        ),
        inference_logprobs=np.array([-0.5, -1.5], dtype=np.float32),
        advantage=advantage,
    )


def lease(
    group_id: str,
    policies: tuple[PolicyVersion, ...] = (NOW, NOW),
    advantages: tuple[float, ...] = (1.0, -1.0),
    sampling: SamplingParams | None = None,
) -> GroupLease:
    trajectories = tuple(
        testing.trajectory(
            trajectory_id=f"{group_id}-{index}",
            turns=(),
            sequences=(sequence(policy, advantage),),
            sampling=sampling or SamplingParams(),
        )
        for index, (policy, advantage) in enumerate(zip(policies, advantages, strict=True))
    )
    return GroupLease(
        lease_id=f"lease-{group_id}",
        group=testing.group(*trajectories, group_id=group_id),
        num_deliveries=1,
        expires_in_s=60,
    )


def reasons(*leases: GroupLease, max_staleness: int = 4) -> dict[str, list[str]]:
    batch = sort_batch(leases, current=NOW, max_staleness=max_staleness, consumed_group_ids={"old"})
    groups = {reason: [x.group.group_id for x in kept] for reason, kept in batch.dropped.items()}
    groups["train"] = [x.group.group_id for x in batch.train]
    groups["consumed"] = [x.group.group_id for x in batch.already_consumed]
    return groups


@pytest.mark.parametrize(("versions", "current", "max_staleness", "expected"), BOUNDED)
def test_staleness_follows_the_table(
    versions: tuple[PolicyVersion, ...],
    current: PolicyVersion,
    max_staleness: int,
    expected: bool,
) -> None:
    group = lease("a", versions, advantages=(1.0,) * len(versions))
    batch = sort_batch([group], current=current, max_staleness=max_staleness, consumed_group_ids=())
    assert batch.dropped == ({"stale": (group,)} if expected else {})


def test_a_uniform_group_is_dropped_under_its_own_reason() -> None:
    assert reasons(lease("even", advantages=(0.0, 0.0)))["uniform_reward"] == ["even"]


def test_truncated_sampling_is_not_trained_on() -> None:
    groups = reasons(
        lease("cut", sampling=SamplingParams(top_p=0.9)),
        lease("bent", sampling=SamplingParams(repetition_penalty=1.2)),
        lease("whole", sampling=SamplingParams(top_p=1.0, min_p=0.0, repetition_penalty=1.0)),
    )
    assert groups["truncated_sampling"] == ["cut", "bent"]
    assert groups["train"] == ["whole"]


def test_answers_that_were_held_to_a_form_are_not_trained_on() -> None:
    form = SamplingParams(constraint='{"type": "json_object"}')
    groups = reasons(lease("held", sampling=form), lease("free", sampling=SamplingParams()))
    assert (groups["constrained_sampling"], groups["train"]) == (["held"], ["free"])


def test_a_sequence_has_the_temperature_of_its_own_trajectory() -> None:
    samplings = [SamplingParams(temperature=0.5), SamplingParams(), SamplingParams(temperature=0.0)]
    leases = [lease(str(number), sampling=sampling) for number, sampling in enumerate(samplings)]
    batch = sort_batch(leases, current=NOW, max_staleness=4, consumed_group_ids=())
    assert [row.temperature for row in batch.sequences] == [0.5, 0.5, 1.0, 1.0, 0.0, 0.0]


def test_a_group_that_the_checkpoint_consumed_is_not_trained_twice() -> None:
    assert reasons(lease("old"), lease("new")) == {"train": ["new"], "consumed": ["old"]}


def test_staleness_is_counted_per_trajectory_by_its_oldest_token() -> None:
    leases = [lease("a", (version(8), NOW))]
    batch = sort_batch(leases, current=NOW, max_staleness=4, consumed_group_ids=())
    assert dict(batch.staleness(NOW)) == {0: 1, 1: 1}
    assert not batch.forks()
    assert ForkCause.NONE.name.lower() not in batch.forks()


def test_a_member_of_the_average_reward_is_trained_with_its_group() -> None:
    leases = [lease("a", advantages=(0.0, 1.0)), lease("even", advantages=(0.0, 0.0))]
    batch = sort_batch(leases, current=NOW, max_staleness=4, consumed_group_ids=())
    assert [s.sequence.advantage for s in batch.sequences] == [0.0, 1.0]


def test_a_restore_that_discards_published_versions_starts_a_new_lineage() -> None:
    assert lineage_after_restore(version(10), version(13)) == version(10, "main.1")
    assert lineage_after_restore(version(10, "main.1"), version(12, "main.1")) == version(
        10, "main.2"
    )


def test_a_queue_that_knows_of_another_publish_than_the_files_counts_as_well() -> None:
    assert lineage_after_restore(version(10), version(10), version(11)) == version(10, "main.1")
    restored = lineage_after_restore(version(10), version(10), version(10, "main.1"))
    assert restored == version(10, "main.2")


def test_a_queue_that_lost_the_newest_publish_discards_nothing() -> None:
    assert lineage_after_restore(version(10), version(10), version(9)) == version(10)
    restored = version(10, "main.1")
    assert lineage_after_restore(restored, restored, version(13)) == restored


def test_a_member_without_sampled_tokens_has_no_row_and_no_staleness() -> None:
    full = lease("a")
    silent = replace(full.group.trajectories[0], sequences=(_prompt_only(),))
    group = replace(full.group, trajectories=(silent, full.group.trajectories[1]))
    batch = sort_batch(
        [replace(full, group=group)], current=NOW, max_staleness=4, consumed_group_ids=()
    )
    assert dict(batch.staleness(NOW)) == {0: 1}
    assert [s.sequence.advantage for s in batch.sequences] == [-1.0]


def _prompt_only() -> Sequence:
    segments = (Segment(start=0, length=2, source=Source.PROMPT),)
    return Sequence(token_ids=np.array([5, 6], dtype=np.int32), segments=segments, advantage=1.0)


def test_a_restore_of_the_live_version_keeps_its_lineage() -> None:
    assert lineage_after_restore(version(10), version(10)) == version(10)
    assert lineage_after_restore(version(10), None) == version(10)


def test_a_group_that_is_delivered_again_counts_as_it_is_now() -> None:
    """After a power loss: the queue lost the first play, and a kept group was played anew."""
    kept: list[GroupLease] = []
    dropped: list[list[dict[str, Any]]] = []

    def deliver(*leases: GroupLease) -> list[str]:
        batch = sort_batch(leases, current=NOW, max_staleness=4, consumed_group_ids={"old"})
        kept[:] = keep_for_step(kept, batch)
        dropped.extend(figures_of_dropped(batch))
        return [each.group.group_id for each in kept]

    assert deliver(lease("a"), lease("b"), lease("c"), lease("old")) == ["a", "b", "c", "old"]
    uniform, stale = (0.0, 0.0), (version(1), version(1))
    assert deliver(lease("a", advantages=uniform)) == ["b", "c", "old"]
    assert deliver(lease("b", stale), lease("c"), lease("old", stale)) == ["c", "old"]
    # What the policy is too new for says nothing about its tasks.
    assert metrics_of_candidates([kept[0].group], dropped)["num_groups_dropped"] == 1
