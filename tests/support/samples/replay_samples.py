"""Small tasks, groups and a queue driver for replay's tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dialoop.sequences import Along
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as rep
from dialoop.v1 import trajectory_pb2 as pb
from dialoop.wire.sequences import column_to_proto, columns_of
from dialoop_services.replay.servicer import members_of_groups, outcomes_of_groups
from dialoop_services.replay.store import QueueStore


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


def make_task(
    task_id: str,
    *,
    purpose: Purpose = Purpose.TRAINING,
    num_trajectories: int = 2,
    min_trajectories: int = 0,
) -> pb.Task:
    return pb.Task(
        task_id=task_id,
        environment="arithmetic",
        split="train",
        key=task_id,
        purpose=int(purpose),
        num_trajectories=num_trajectories,
        min_trajectories=min_trajectories,
    )


def make_sequence(version: tuple[str, int] = ("main", 0), *, padding: int = 0) -> pb.Sequence:
    """Three prompt tokens and two sampled ones."""
    lineage, number = version
    return pb.Sequence(
        columns=[
            column("token_ids", [5, 8, 2, *([3] * padding), 11, 12]),
            column("inference_logprobs", [-0.5, -1.25]),
        ],
        segments=[
            pb.Segment(start=0, length=3 + padding, source=pb.SOURCE_PROMPT),
            pb.Segment(
                start=3 + padding,
                length=2,
                source=pb.SOURCE_MODEL,
                policy_version_index=0,
            ),
        ],
        policy_versions=[pb.PolicyVersion(lineage=lineage, number=number)],
    )


def column(name: str, values: Sequence[float]) -> pb.Column:
    """Return a column of fixed name."""
    is_ids = name == "token_ids"
    return column_to_proto(
        name,
        Along.TOKENS if is_ids else Along.SAMPLED,
        np.array(values, np.int32 if is_ids else np.float32),
    )


def values_of(sequence: pb.Sequence, name: str) -> list[float]:
    """Return the numbers of a column."""
    values: list[float] = columns_of(sequence)[name].values.tolist()
    return values


def set_values(sequence: pb.Sequence, name: str, values: Sequence[float]) -> None:
    """Put a column of fixed name in the place of the one of that name, or add it."""
    new = column(name, values)
    for old in sequence.columns:
        if old.name == name:
            old.CopyFrom(new)
            return
    sequence.columns.append(new)


def make_group(
    task: pb.Task,
    *,
    versions: Iterable[tuple[str, int]] = (("main", 0),),
    num_trajectories: int | None = None,
    padding: int = 0,
) -> pb.Group:
    group_id = task.task_id
    size = task.num_trajectories if num_trajectories is None else num_trajectories
    return pb.Group(
        group_id=group_id,
        task=task,
        trajectories=[
            pb.Trajectory(
                trajectory_id=f"{group_id}.{index}",
                group_id=group_id,
                history={"messages": [{"role": "assistant", "content": "11 12"}]},
                sequences=[make_sequence(version, padding=padding) for version in versions],
                turns=[pb.Turn(num_messages=1, rewards=[pb.Reward(name="right", value=1.0)])],
            )
            for index in range(size)
        ],
    )


def with_advantages(group: pb.Group, *, advantage: float = 0.5) -> pb.Group:
    copy = pb.Group()
    copy.CopyFrom(group)
    for trajectory in copy.trajectories:
        trajectory.turns[0].rewards.add(name="length", value=-0.1)
        for sequence in trajectory.sequences:
            set_values(sequence, "ref_logprobs", [-0.5, -1.0])
            sequence.advantage = advantage
    return copy


def bare_group(
    task_id: str,
    lease_id: str,
    *,
    size: int = 2,
    content: str = "d",
    versions: Mapping[str, tuple[int, int]] = {"main": (0, 0)},
    num_discarded: int = 0,
) -> rep.AppendItem:
    """A group for the store, which looks at no more than this of it."""
    group_id = task_id
    group = pb.Group(group_id=group_id, task=make_task(task_id, num_trajectories=size))
    for index in range(size):
        group.trajectories.add(trajectory_id=f"{group_id}.{index}", task_key=content)
    for lineage, span in versions.items():
        for number in span:
            version = pb.PolicyVersion(lineage=lineage, number=number)
            for trajectory in group.trajectories:
                trajectory.sequences.add(policy_versions=[version])
    return rep.AppendItem(group=group, lease_id=lease_id, num_discarded=num_discarded)


async def offer_tasks(
    store: QueueStore, run: str, tasks: Sequence[pb.Task], *cursors: str
) -> rep.OfferTasksResponse:
    expected, following = cursors or ("", "")
    request = rep.OfferTasksRequest(
        run=run, tasks=tasks, expected_cursor=expected, next_cursor=following
    )
    return await store.apply(request, rep.OfferTasksResponse)


async def offer(
    store: QueueStore, run: str, *task_ids: str, purpose: Purpose = Purpose.TRAINING
) -> int:
    tasks = [make_task(task_id, purpose=purpose) for task_id in task_ids]
    return (await offer_tasks(store, run, tasks)).num_new


async def lease_tasks(
    store: QueueStore, run: str, num: int = 1, lease_s: float = 60
) -> rep.LeaseTasksResponse:
    request = rep.LeaseTasksRequest(run=run, worker="c", max_tasks=num, lease_s=lease_s)
    return await store.apply(request, rep.LeaseTasksResponse)


async def append(
    store: QueueStore, run: str, stage: Stage, *items: rep.AppendItem
) -> Sequence[rep.AppendOutcome]:
    """Append groups, those that were played by their members: as the servicer does."""
    if stage is not Stage.SCORED:
        members = members_of_groups(run, items)
        appended = await store.apply(members, rep.AppendMembersResponse)
        return list(outcomes_of_groups(items, appended.outcomes))
    request = rep.AppendGroupsRequest(run=run, stage=stage_name(stage), items=items)
    return (await store.apply(request, rep.AppendGroupsResponse)).outcomes


async def append_member(
    store: QueueStore, run: str, lease_id: str, member: int, **fields: Any
) -> rep.AppendOutcome:
    """Append one member of the task that is leased so."""
    group = bare_group(lease_id.split("/", 2)[2], lease_id, size=member + 1, **fields).group
    item = rep.MemberItem(lease_id=lease_id, member=member, trajectory=group.trajectories[member])
    request = rep.AppendMembersRequest(run=run, items=[item])
    (outcome,) = (await store.apply(request, rep.AppendMembersResponse)).outcomes
    return outcome


async def announce(
    store: QueueStore,
    run: str,
    number: int = 0,
    *trained: str,
    lineage: str = "main",
    credits: int = 100,
) -> int:
    request = rep.AdvancePolicyRequest(
        run=run,
        policy_version=pb.PolicyVersion(lineage=lineage, number=number),
        trained_lease_ids=trained,
        max_outstanding_groups=credits,
    )
    return (await store.apply(request, rep.AdvancePolicyResponse)).credits


async def stats_of(store: QueueStore, run: str) -> rep.ReplayStats:
    return (await store.apply(rep.GetStatsRequest(run=run), rep.GetStatsResponse)).stats


async def counts_of(store: QueueStore, run: str) -> rep.ReplayStats:
    """The statistics without the ages, which grow from one look to the next."""
    stats = await stats_of(store, run)
    stats.training.ClearField("oldest_s")
    stats.evaluation.ClearField("oldest_s")
    return stats


async def purge(store: QueueStore, run: str) -> None:
    await store.apply(rep.PurgeRequest(run=run, confirm=run), rep.PurgeResponse)


async def play(store: QueueStore, run: str, *, stage: Stage = Stage.UNSCORED) -> str:
    """Lease one task and append its group; the task's id."""
    (lease,) = (await lease_tasks(store, run)).leases
    group = bare_group(lease.task.task_id, lease.lease_id)
    (outcome,) = await append(store, run, stage, group)
    assert not outcome.reason, outcome
    return lease.task.task_id


def stage_name(stage: Stage) -> pb.Stage:
    return pb.Stage.Name(int(stage))  # type: ignore[arg-type, return-value]


def assert_adds_up(stats: rep.ReplayStats, *, size: int | None = 2) -> None:
    """Every trajectory that was made is consumed, dropped or live, and counted once.

    `size` is that of every group, unless some were closed short; None: they differ.
    """
    for counts in (stats.training, stats.evaluation):
        assert counts.num_trajectories_generated == (
            counts.num_trajectories_consumed
            + sum(counts.num_trajectories_dropped.values())
            + counts.num_trajectories_live
        )
        in_groups = counts.num_trajectories_live - counts.num_trajectories_waiting
        assert in_groups >= num_live(counts)
        if size is not None and not counts.num_groups_closed_short:
            assert in_groups == size * num_live(counts)
        fields = [(field.name, value) for field, value in counts.ListFields()]
        maps = ("num_groups_dropped", "num_trajectories_dropped", "oldest_s")
        assert all(value > 0 for name, value in fields if name not in maps)
        assert all(seconds >= 0 for seconds in counts.oldest_s.values())
        assert all(value > 0 for value in counts.num_groups_dropped.values())


def num_live(counts: rep.LedgerCounts) -> int:
    return (
        counts.num_groups_unscored
        + counts.num_groups_scored
        + counts.num_groups_training
        + counts.num_groups_trained
    )
