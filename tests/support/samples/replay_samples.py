"""Small tasks, groups and a queue driver for replay's tests."""

from __future__ import annotations

from collections.abc import Iterable

from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import trajectory_pb2 as pb
from dialoop_services.replay.queue import Submission
from dialoop_services.replay.store import (
    Counts,
    NewGroup,
    OfferedTask,
    State,
    Stats,
    Store,
    VersionSpan,
)

LIVE = (State.UNSCORED, State.SCORED, State.TRAINING, State.TRAINED)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


def make_task(
    task_id: str, *, purpose: Purpose = Purpose.TRAINING, num_trajectories: int = 2
) -> pb.Task:
    return pb.Task(
        task_id=task_id,
        environment="arithmetic",
        split="train",
        key=task_id,
        purpose=int(purpose),
        num_trajectories=num_trajectories,
    )


def make_sequence(version: tuple[str, int] = ("main", 0), *, padding: int = 0) -> pb.Sequence:
    """Three prompt tokens and two sampled ones."""
    lineage, number = version
    return pb.Sequence(
        token_ids=[5, 8, 2, *([3] * padding), 11, 12],
        segments=[
            pb.Segment(start=0, length=3 + padding, source=pb.SOURCE_PROMPT),
            pb.Segment(
                start=3 + padding,
                length=2,
                source=pb.SOURCE_MODEL,
                policy_version=pb.PolicyVersion(lineage=lineage, number=number),
            ),
        ],
        inference_logprobs=[-0.5, -1.25],
    )


def make_group(
    task: pb.Task,
    *,
    attempt: int = 1,
    versions: Iterable[tuple[str, int]] = (("main", 0),),
    num_trajectories: int | None = None,
    padding: int = 0,
) -> pb.Group:
    group_id = f"{task.task_id}#{attempt}"
    size = task.num_trajectories if num_trajectories is None else num_trajectories
    return pb.Group(
        group_id=group_id,
        task=task,
        trajectories=[
            pb.Trajectory(
                trajectory_id=f"{group_id}.{index}",
                group_id=group_id,
                sequences=[make_sequence(version, padding=padding) for version in versions],
                turns=[pb.Turn(num_messages=1, rewards=[pb.Reward(name="right", value=1.0)])],
            )
            for index in range(size)
        ],
    )


def scored(group: pb.Group, *, advantage: float = 0.5) -> pb.Group:
    copy = pb.Group()
    copy.CopyFrom(group)
    for trajectory in copy.trajectories:
        trajectory.turns[0].rewards.add(name="length", value=-0.1)
        for sequence in trajectory.sequences:
            sequence.ref_logprobs.extend([-0.5, -1.0])
            sequence.advantage = advantage
    return copy


def offered(task: pb.Task) -> OfferedTask:
    return OfferedTask(
        task_id=task.task_id,
        purpose=Purpose(int(task.purpose)),
        num_trajectories=task.num_trajectories,
        payload=task.SerializeToString(),
    )


def submission(group: pb.Group, lease_id: str) -> Submission:
    return Submission(group=group, lease_id=lease_id)


def bare_group(
    task_id: str,
    lease_id: str,
    *,
    attempt: int = 1,
    size: int = 2,
    digest: str = "d",
    versions: tuple[VersionSpan, ...] = (VersionSpan(lineage="main", oldest=0, newest=0),),
    num_discarded: int = 0,
) -> NewGroup:
    """A group for the store, which does not look into payloads."""
    group_id = f"{task_id}#{attempt}"
    return NewGroup(
        group_id=group_id,
        task_id=task_id,
        lease_id=lease_id,
        num_trajectories=size,
        digest=digest,
        versions=versions,
        payload=group_id.encode() + b"\x00\xff",
        num_discarded=num_discarded,
    )


def bare_task(task_id: str, *, purpose: Purpose = Purpose.TRAINING, size: int = 2) -> OfferedTask:
    return OfferedTask(
        task_id=task_id, purpose=purpose, num_trajectories=size, payload=task_id.encode() + b"\xfe"
    )


async def announce(
    store: Store, run: str, number: int = 0, *, lineage: str = "main", credits: int = 100
) -> int:
    return await store.advance_policy(
        run,
        PolicyVersion(lineage=lineage, number=number),
        trained_lease_ids=(),
        max_outstanding_groups=credits,
    )


async def play(store: Store, run: str, *, stage: Stage = Stage.UNSCORED, size: int = 2) -> str:
    """Lease one task and append its group; the task's id."""
    leases = (await store.lease_tasks(run, worker="collector", max_tasks=1, lease_s=60)).leases
    lease = leases[0]
    task_id = lease.payload[:-1].decode()
    group = bare_group(task_id, lease.lease_id, attempt=lease.attempt, size=size)
    (result,) = await store.append_groups(run, stage, [group])
    assert not result.reason, result
    return task_id


def assert_adds_up(stats: Stats, *, size: int = 2) -> None:
    """Every trajectory that was made is consumed, dropped or live, and counted once."""
    for counts in (stats.training, stats.evaluation):
        assert counts.num_trajectories_generated == (
            counts.num_trajectories_consumed
            + sum(counts.trajectories_dropped.values())
            + counts.num_trajectories_live
        )
        assert counts.num_trajectories_live == size * num_live(counts)
        assert counts.groups[State.DROPPED] == sum(counts.groups_dropped.values())
        assert all(number >= 0 for number in counts.groups.values())


def num_live(counts: Counts) -> int:
    return sum(counts.groups[state] for state in LIVE)
