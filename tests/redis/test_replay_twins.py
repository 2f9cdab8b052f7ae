"""Random schedules on Redis and on its twin in memory: every answer and every count is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from dialoop.errors import DialoopError
from dialoop.reasons import DropReason
from dialoop.trajectory import Purpose, Stage
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import trajectory_pb2
from dialoop_services.config.tables import Overflow
from dialoop_services.replay.redis_store.store import RedisStore
from dialoop_services.replay.store import QueueLimits, QueueStore

from tests.support.queue_model.ledger import GroupState
from tests.support.queue_model.store import ModelStore
from tests.support.redis_server import new_run, redis_url  # noqa: F401
from tests.support.samples.replay_samples import (
    Clock,
    assert_adds_up,
    bare_group,
    make_task,
    purge,
    stage_name,
    stats_of,
)

pytestmark = pytest.mark.redis

NUM_MOVES = 500
# Of the groups here, which are all about as large: how many one call may hand out.
NUM_THAT_FIT = 2


class Schedule:
    """Draws moves that are mostly sensible, from what the stores answered so far."""

    def __init__(self, seed: int, run: str) -> None:
        self.random = random.Random(seed)
        self.run = run
        self.num_tasks = 0
        self.cursor = ""
        self.policy = ("l0", 0)
        self.tasks: list[tuple[str, str]] = []
        self.leases: list[str] = []
        self.letters: list[str] = []
        self.groups: dict[str, trajectory_pb2.Group] = {}

    def draw(self) -> Any:
        """One request."""
        moves = (
            (self.offer, 3),
            (self.lease_tasks, 8),
            (self.append_played, 4),
            (self.append_members, 14),
            (self.lease_groups, 12),
            (self.append_scored, 12),
            (self.acknowledge, 10),
            (self.give_back, 3),
            (self.extend, 2),
            (self.reopen, 2),
            (self.list_leases, 1),
            (self.advance, 3),
            (self.list_dead_letters, 1),
            (self.requeue, 1),
            (self.peek, 1),
            (self.append_turns, 6),
            (self.get_turns, 3),
        )
        names, weights = zip(*moves, strict=True)
        drawn: Callable[[], Any] = self.random.choices(names, weights)[0]
        return drawn()

    def learn(self, request: object, answer: object) -> None:
        """Remember what an answer gave."""
        for lease in getattr(answer, "leases", ()):
            self.leases.append(lease.lease_id)
            if isinstance(lease, pb.GroupLease):
                self.groups[lease.group.group_id] = lease.group
            if isinstance(lease, pb.TaskLease):
                self.tasks.append((lease.task.task_id, lease.lease_id))
        if isinstance(answer, pb.OfferTasksResponse):
            self.cursor = answer.cursor
        if isinstance(answer, pb.ListDeadLettersResponse):
            self.letters = [letter.group_id for letter in answer.dead_letters]
        if isinstance(request, pb.AdvancePolicyRequest) and not isinstance(answer, tuple):
            self.policy = (request.policy_version.lineage, request.policy_version.number)

    def offer(self) -> pb.OfferTasksRequest:
        start = max(0, self.num_tasks - 1)
        self.num_tasks = start + self.random.randint(1, 6)
        request = pb.OfferTasksRequest(run=self.run)
        for i in range(start, self.num_tasks):
            purpose = Purpose.EVALUATION if i % 5 == 0 else Purpose.TRAINING
            task = make_task(f"t/{i}", purpose=purpose, min_trajectories=i % 2)
            request.tasks.append(task)
        if self.random.random() < 0.5:
            known = self.random.random() < 0.9
            request.expected_cursor = self.cursor if known else str(start)
            request.next_cursor = str(self.num_tasks)
        return request

    def lease_tasks(self) -> pb.LeaseTasksRequest:
        num = self.random.randint(1, 4)
        return pb.LeaseTasksRequest(run=self.run, worker="c", max_tasks=num, lease_s=60)

    def append_played(self) -> pb.AppendMembersRequest:
        recent = self.tasks[-8:]
        picked = self.random.sample(recent, min(len(recent), self.random.randint(1, 3)))
        lineage, number = self.policy
        oldest = max(0, number - self.random.randint(0, 2))
        newest = number + (self.random.random() < 0.05)
        items = [
            bare_group(
                task_id,
                lease_id,
                versions={lineage: (oldest, newest)},
                size=2 if self.random.random() < 0.95 else 3,
                content="d" if self.random.random() < 0.97 else "e",
                num_discarded=self.random.choice((0, 0, 0, 1)),
            )
            for task_id, lease_id in picked
        ]
        return pb.AppendMembersRequest(
            run=self.run,
            items=[
                pb.MemberItem(
                    lease_id=item.lease_id,
                    member=member,
                    trajectory=trajectory,
                    num_discarded=0 if member else item.num_discarded,
                )
                for item in items
                for member, trajectory in enumerate(item.group.trajectories)
            ],
        )

    def append_members(self) -> pb.AppendMembersRequest:
        """Some members of groups that are being played, and some that are not."""
        items = list(self.append_played().items)
        kept = self.random.sample(items, (len(items) + 1) // 2)
        for item in kept:
            if self.random.random() < 0.05:
                item.member = self.random.choice((-1, 0, 1, 9))
        return pb.AppendMembersRequest(run=self.run, items=kept)

    def append_turns(self) -> pb.AppendTurnsRequest:
        """Turns in order, mostly; of few trajectories, so that some are kept already."""
        request = pb.AppendTurnsRequest(run=self.run)
        for lease_id in [lease_id for _, lease_id in self.tasks[-3:]]:
            trajectory_id = self.random.choice("ttttu")
            for number in range(self.random.choice((0, 0, 0, 1)), self.random.randint(1, 4)):
                turn = pb.RecordedTurn(trajectory_id=trajectory_id, turn=number)
                turn.sampled.samples.add(stop_string=self.random.choice("aaaaaaaab"))
                request.items.add(lease_id=lease_id, member=number % 2, turn=turn)
                request.items.add(lease_id=lease_id, member=0, turn=turn)
        return request

    def get_turns(self) -> pb.GetTurnsRequest:
        lease_id = self.random.choice([lease_id for _, lease_id in self.tasks[-4:]])
        return pb.GetTurnsRequest(
            run=self.run, lease_id=lease_id, member=self.random.choice((0, 1))
        )

    def lease_groups(self) -> pb.LeaseGroupsRequest:
        num = self.random.randint(1, 4)
        stage = self.random.choice((Stage.UNSCORED, Stage.UNSCORED, Stage.SCORED, *Stage))
        return pb.LeaseGroupsRequest(
            run=self.run,
            stage=stage_name(stage),
            worker=f"w{self.random.randint(0, 2)}",
            max_groups=num,
            min_groups=self.random.randint(1, num),
            lease_s=self.random.choice((30, 60)),
            max_staleness=self.random.choice((None, 1, 3)),
            selection=self.random.choice((0, 1, 2, 3)),
            task_id_prefix=self.random.choice(("", "t/1")) if stage is Stage.EVALUATION else "",
        )

    def append_scored(self) -> pb.AppendGroupsRequest:
        unscored = [lease_id for lease_id in self.leases[-15:] if lease_id.startswith("unscored/")]
        picked = self.random.sample(unscored, min(len(unscored), 2))
        items = [
            pb.AppendItem(
                group=self.groups[lease_id.split("/", 2)[2]],
                lease_id=lease_id,
                priority=self.random.choice((0, 0, 1, 2.5)),
            )
            for lease_id in picked
        ]
        return pb.AppendGroupsRequest(run=self.run, stage=stage_name(Stage.SCORED), items=items)

    def acknowledge(self) -> pb.AcknowledgeRequest:
        request = pb.AcknowledgeRequest(run=self.run)
        for lease_id in self.some_leases():
            is_drop = self.random.random() < 0.25
            outcome = pb.OUTCOME_DROPPED if is_drop else pb.OUTCOME_CONSUMED
            reason = "oversize" if is_drop else ""
            request.items.add(lease_id=lease_id, outcome=outcome, reason=reason)
        return request

    def give_back(self) -> pb.ReturnRequest:
        request = pb.ReturnRequest(run=self.run)
        for lease_id in self.some_leases():
            failed = self.random.random() < 0.6
            request.items.add(
                lease_id=lease_id,
                reason="broken",
                num_trajectories=self.random.randint(0, 2),
                failed=failed,
                set_aside=self.random.random() < 0.1,
                failed_members=self.random.choice(([], [0], [1])) if failed else [],
            )
        return request

    def extend(self) -> pb.ExtendRequest:
        return pb.ExtendRequest(run=self.run, lease_ids=self.some_leases(), lease_s=60)

    def reopen(self) -> pb.ReopenLeasesRequest:
        leases = self.some_leases()[: self.random.choice((1, 1, 2, 4))]
        return pb.ReopenLeasesRequest(run=self.run, lease_ids=leases, lease_s=60)

    def list_leases(self) -> pb.ListLeasesRequest:
        stage, worker = self.random.choice(list(Stage)), f"w{self.random.randint(0, 2)}"
        return pb.ListLeasesRequest(run=self.run, stage=stage_name(stage), worker=worker)

    def advance(self) -> pb.AdvancePolicyRequest:
        lineage, number = self.policy
        number = max(0, number + self.random.choice((1, 1, 1, 0, -1)))
        if self.random.random() < 0.03:
            lineage, number = f"l{self.random.randint(0, 3)}", 0
        return pb.AdvancePolicyRequest(
            run=self.run,
            policy_version=trajectory_pb2.PolicyVersion(lineage=lineage, number=number),
            trained_lease_ids=[held for held in self.leases[-12:] if held.startswith("scored/")],
            max_outstanding_groups=self.random.randint(4, 12),
        )

    def list_dead_letters(self) -> pb.ListDeadLettersRequest:
        return pb.ListDeadLettersRequest(run=self.run, max_groups=2)

    def requeue(self) -> pb.RequeueRequest:
        return pb.RequeueRequest(run=self.run, group_ids=self.letters)

    def peek(self) -> pb.PeekRequest:
        stage = self.random.choice(list(Stage))
        return pb.PeekRequest(run=self.run, stage=stage_name(stage), max_groups=3)

    def some_leases(self) -> list[str]:
        recent = self.leases[-12:]
        return self.random.sample(recent, min(len(recent), self.random.randint(1, 4)))


async def answer_of(store: QueueStore, request: Any) -> object:
    """The response, or the kind and reason of the error."""
    name = type(request).__name__.replace("Request", "Response")
    try:
        return await store.apply(request, getattr(pb, name))
    except DialoopError as error:
        return type(error), error.reason, error.message


async def play_out(seed: int, redis_url: str, *, overflow: Overflow, most: int) -> set[str]:
    """Play one schedule on both stores; the states, drops and refusals it came to."""
    clock, run = Clock(), new_run()
    limits = QueueLimits(
        max_attempts=3,
        max_deliveries=2,
        max_dead_letters=1,
        max_finished=8,
        lease_s=60,
        max_lease_bytes=NUM_THAT_FIT * bare_group("t/00", "").group.ByteSize(),
        max_waiting_groups=most,
        overflow=overflow,
    )
    twin, real = ModelStore(limits, clock=clock), RedisStore(redis_url, limits, clock=clock)
    schedule = Schedule(seed, run)
    # The first lease fixes the tokens, so that lease ids are the same from here on.
    first = pb.OfferTasksRequest(run=run, tasks=[make_task("t/0", purpose=Purpose.EVALUATION)])
    requests = [first, schedule.lease_tasks()]
    seen = set[str]()
    for number in range(NUM_MOVES):
        request = requests[number] if number < len(requests) else schedule.draw()
        expected = await answer_of(twin, request)
        assert await answer_of(real, request) == expected, f"seed {seed}, move {number}"
        schedule.learn(request, expected)
        before, after = await stats_of(twin, run), await stats_of(real, run)
        after.store = before.store
        assert after == before, f"seed {seed}, after move {number}"
        assert_adds_up(after)
        seen |= {field.name for field, _ in after.training.ListFields()}
        seen |= set(after.training.num_groups_dropped)
        seen |= {expected[1]} if isinstance(expected, tuple) else set()
        seen |= {outcome.reason for outcome in getattr(expected, "outcomes", ())}
        seen |= {"is_cut"} if getattr(expected, "is_cut", False) else set()
        if schedule.random.random() < 0.08 and number >= len(requests):
            clock.pass_s(schedule.random.choice((5, 20, 65)))
    await purge(real, run)
    await real.close()
    return seen


async def test_redis_and_its_twin_give_the_same_answers(redis_url: str) -> None:
    seen = set[str]()
    bounds: Sequence[tuple[Overflow, int]] = (
        ("block", 0),
        ("drop_oldest", 3),
        ("reject", 3),
        ("block", 5),
    )
    for seed in range(10):
        overflow, most = bounds[seed % len(bounds)]
        seen |= await play_out(seed, redis_url, overflow=overflow, most=most)
    assert set(GroupState) <= seen, "the schedules reach every state"
    assert {DropReason.DEAD_LETTER, DropReason.DEAD_LETTER_FORGOTTEN} <= seen
    assert {DropReason.NO_ROOM, DropReason.DROPPED_OLDEST, "NO_ROOM"} <= seen
    assert {"CURSOR_MOVED", "VERSION_NOT_NEWER", "GROUP_NOT_FOUND"} <= seen
    assert {"num_groups_closed_short", "num_trajectories_waiting"} <= seen
    assert {"LEASE_LOST", "DIGEST_MISMATCH", "WRONG_SIZE", "FUTURE_VERSION"} <= seen, "of members"
    assert "is_cut" in seen, "a batch is leased in parts"
