"""Who waits for whom: from what services say they wait for, and from the queue's counts."""

from __future__ import annotations

import pytest
from dialoop.clients.replay import LedgerCounts, ReplayStats
from dialoop.waits import Wait
from dialoop_ops.now.blocked import blocked_by
from dialoop_ops.now.snapshot import Now, ServiceNow

NAMES = {f"127.0.0.1:{port}": name for port, name in enumerate(("environment", "inference-1"), 1)}


def counts(**fields: int) -> LedgerCounts:
    zero = dict.fromkeys(LedgerCounts.__dataclass_fields__, 0)
    return LedgerCounts(
        **{**zero, "num_groups_dropped": {}, "num_trajectories_dropped": {}, "oldest_s": {}}
        | fields
    )


def stats(*, is_full: bool = False, evaluation: LedgerCounts | None = None, **training: int):
    return ReplayStats(
        training=counts(**training),
        evaluation=evaluation or counts(),
        policy_version=None,
        max_outstanding_groups=8,
        credits=0,
        num_redelivered=0,
        num_dead_letters=0,
        num_duplicate_appends=0,
        num_rejected_appends=0,
        cursor="",
        store="memory",
        is_full=is_full,
    )


def wait(target: str, what: str, seconds: float = 30.0, **fields) -> Wait:
    return Wait(target=target, what=what, seconds=seconds, **fields)


TO_TRAIN = {"trainer": [wait("replay", "groups to train", 40.0)]}
STEP = {"collector": [wait("127.0.0.1:1", "Step", count=8)]}


@pytest.mark.parametrize(
    ("waits", "queue", "silent", "lines"),
    [
        (  # an environment that is slow
            TO_TRAIN | STEP,
            stats(num_groups_leased=4),
            (),
            [
                "trainer waits for collector (groups to train: 4 playing), 40 s"
                " <- collector waits for environment (Step)",
                "collector waits for environment (Step, 8 calls), 30 s",
            ],
        ),
        (  # one that is stopped
            STEP,
            stats(num_groups_leased=4),
            ("environment",),
            ["collector waits for environment (Step, 8 calls), 30 s <- environment does not serve"],
        ),
        (
            TO_TRAIN,
            stats(num_groups_unscored=3, num_groups_leased=1),
            ("scorer",),
            [
                "trainer waits for scorer (groups to train: 3 unscored), 40 s"
                " <- scorer does not serve"
            ],
        ),
        (
            TO_TRAIN,
            stats(num_tasks_offered=9),
            (),
            ["trainer waits for collector (groups to train: 9 tasks offered, none playing), 40 s"],
        ),
        (
            TO_TRAIN,
            stats(),
            (),
            ["trainer waits for collector (groups to train: no task is offered), 40 s"],
        ),
        (
            TO_TRAIN,
            stats(is_full=True, num_groups_unscored=3),
            (),
            ["trainer waits for replay (groups to train: its memory is full), 40 s"],
        ),
        (
            {"trainer": [wait("replay", "groups of an evaluation")]},
            stats(evaluation=counts(num_groups_leased=2), num_groups_unscored=5),
            (),
            ["trainer waits for collector (groups of an evaluation: 2 playing), 30 s"],
        ),
        (
            {"trainer": [wait("127.0.0.1:2", "LoadWeights")]},
            stats(),
            ("inference-1",),
            ["trainer waits for inference-1 (LoadWeights), 30 s <- inference-1 does not serve"],
        ),
        (
            {"trainer": [wait("disk", "room for the next step")]},
            stats(),
            (),
            ["trainer waits for disk (room for the next step), 30 s"],
        ),
        (
            {"trainer": [wait("resume", "the next step")]},
            stats(),
            (),
            ["trainer waits for resume (the next step), 30 s"],
        ),
        (
            {"replay": [wait("redis", "lease_groups")], **TO_TRAIN},
            None,
            ("redis",),
            [
                "trainer waits for replay (groups to train), 40 s"
                " <- replay waits for redis (lease_groups) <- redis does not serve",
                "replay waits for redis (lease_groups), 30 s <- redis does not serve",
            ],
        ),
        (  # nothing is due: no stall
            {
                "scorer": [wait("replay", "groups to score", is_idle=True)],
                "collector": [wait("replay", "tasks to play", is_idle=True)],
            },
            stats(),
            (),
            [],
        ),
        (  # a circle ends
            {"trainer": [wait("inference", "the device")], "inference": [wait("trainer", "x")]},
            stats(),
            (),
            [
                "trainer waits for inference (the device), 30 s <- inference waits for trainer (x)",
                "inference waits for trainer (x), 30 s <- trainer waits for inference (the device)",
            ],
        ),
    ],
)
def test_each_stall_is_named_with_its_chain(waits, queue, silent, lines):
    blocked = blocked_by(waits, silent=silent, names=NAMES, stats=queue)
    assert [str(each) for each in blocked] == lines
    assert all(each.is_stall for each in blocked)


def test_alarms_name_one_stall_for_each_cause():
    waits = {**TO_TRAIN, **STEP, "scorer": [wait("127.0.0.1:2", "LogProb", 25.0)]}
    blocked = blocked_by(
        waits, silent={"environment"}, names=NAMES, stats=stats(num_groups_leased=4)
    )
    service = ServiceNow(
        name="environment",
        address="127.0.0.1:1",
        rest_address="",
        health="does not answer",
        silent_s=30.0,
        process={"alarm": "environment has ended 3 times in a row"},
    )
    now = Now(
        time=0.0,
        services=(service,),
        trainer=None,
        queue=stats(num_groups_leased=4),
        replicas={},
        sampled_tokens_per_s=None,
        blocked=blocked,
    )
    assert now.alarms == (
        "environment has ended 3 times in a row",
        "environment has not served for 30 s",
        "trainer waits for collector (groups to train: 4 playing), 40 s"
        " <- collector waits for environment (Step) <- environment does not serve",
        "scorer waits for inference-1 (LogProb), 25 s",
    )
    answer = now.as_json()
    assert (answer["is_healthy"], answer["trainer"]) == (False, None)
    assert answer["queue"]["training"]["playing"] == 4
    assert [each["is_stall"] for each in answer["blocked"]] == [True, True, True]
