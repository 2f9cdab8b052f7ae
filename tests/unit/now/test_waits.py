"""What a process waits for: counted by kind, shown as metrics, logged when it lasts."""

from __future__ import annotations

import asyncio
import logging

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.trainer import TrainerClient
from dialoop.trajectory import Stage
from dialoop.waits import STALL_S, Wait, Waits, current_waits, waiting_for
from dialoop_ops.now import watcher
from dialoop_services.runtime.logs import log_stalls
from dialoop_services.runtime.metrics import Metrics

from tests.support.waiting import until


@pytest.fixture
def waits():
    token = current_waits.set(Waits())
    yield current_waits.get()
    current_waits.reset(token)


def age(waits: Waits, seconds: float) -> None:
    """Let all open waits have begun so much earlier."""
    for wait in waits._open:
        wait.began_at -= seconds


def test_waits_are_counted_by_kind_with_the_age_of_the_oldest(waits):
    with waiting_for("environment", "Step"):
        age(waits, 30.0)
        with waiting_for("environment", "Step"), waiting_for("replay", "tasks", is_idle=True):
            step, tasks = waits.current()
    assert (step.target, step.what, step.count, step.is_stall) == ("environment", "Step", 2, True)
    assert 30.0 <= step.seconds < 40.0
    assert tasks.is_idle
    assert not tasks.is_stall
    assert waits.current() == []


def test_a_wait_that_restarts_is_young_again(waits):
    with waiting_for("replay", "groups") as wait:
        age(waits, 2 * STALL_S)
        assert waits.current()[0].is_stall
        wait.restart()
        assert not waits.current()[0].is_stall


def test_a_wait_ends_with_an_error_too(waits):
    with pytest.raises(RuntimeError), waiting_for("disk", "room"):
        raise RuntimeError
    assert waits.current() == []


async def test_a_call_in_flight_is_a_wait_and_a_poll_is_none(waits):
    address = "127.0.0.1:1"
    async with Channel(address, retry=RetryPolicy(max_attempts=None, first_wait_s=0.05)) as channel:
        status = asyncio.create_task(TrainerClient(channel).get_status())
        poll = asyncio.create_task(
            ReplayClient(channel).lease_groups(
                "r", Stage.SCORED, worker="w", max_groups=1, lease_s=1.0, wait_s=1.0
            )
        )
        await until(waits.current)
        assert [(w.target, w.what, w.count) for w in waits.current()] == [(address, "GetStatus", 1)]
        for task in (status, poll):
            task.cancel()
        await asyncio.wait([status, poll])
    assert waits.current() == []


def test_metrics_show_waits_as_the_watcher_reads_them(waits):
    metrics = Metrics()
    metrics.show_waits(waits)
    with waiting_for("127.0.0.1:7000", "Step"), waiting_for("127.0.0.1:7000", "Step"):
        age(waits, 25.0)
        with waiting_for("replay", "tasks to play", is_idle=True):
            text = metrics.exposition().decode()
    step, tasks = watcher._waits_in(text)
    assert (step.target, step.what, step.count) == ("127.0.0.1:7000", "Step", 2)
    assert 25.0 <= step.seconds < 35.0
    assert (tasks.target, tasks.what, tasks.is_idle) == ("replay", "tasks to play", True)
    assert watcher._waits_in("# nothing of ours\n") == ()


async def test_a_stall_is_logged_once_then_when_it_doubled_and_at_its_end(waits, caplog):
    caplog.set_level(logging.INFO, logger="dialoop_services")
    checking = asyncio.create_task(log_stalls(waits, every_s=0.01))

    def lines(text: str) -> int:
        return sum(text in record.message for record in caplog.records)

    with waiting_for("replay", "tasks", is_idle=True), waiting_for("inference", "Generate"):
        age(waits, STALL_S)
        await until(lambda: lines("Waits for Generate."))
        for _ in range(20):  # checks that find the same stall, not yet twice as old
            await asyncio.sleep(0.01)
        assert lines("Waits for Generate.") == 1
        age(waits, 2 * STALL_S)
        await until(lambda: lines("Waits for Generate.") == 2)
    await until(lambda: lines("Goes on, after a wait for Generate."))
    checking.cancel()
    record = caplog.records[0]
    assert (record.target, record.waits) == ("inference", 1)
    # A real model's step on a CPU takes longer than a stall, and no normal start warns.
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert not lines("tasks")


async def test_waits_as_long_as_the_last_of_their_kind_are_the_rule_and_not_told(waits, caplog):
    caplog.set_level(logging.INFO, logger="dialoop_services")
    checking = asyncio.create_task(log_stalls(waits, every_s=0.01))

    async def wait(seconds: float) -> list[str]:
        """Wait so long in the eyes of the log, and return what it said of that."""
        caplog.clear()
        with waiting_for("inference", "Generate"):
            age(waits, seconds)
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        return [record.message for record in caplog.records]

    both = ["Waits for Generate.", "Goes on, after a wait for Generate."]
    assert await wait(1.3 * STALL_S) == both
    assert caplog.records[-1].seconds == pytest.approx(1.3 * STALL_S, abs=2.0)
    for _ in range(3):  # as a step after the other has it, where a batch takes that long
        assert await wait(1.5 * STALL_S) == []
    assert await wait(0.5 * STALL_S) == []  # no stall at all
    assert await wait(4 * STALL_S) == both
    assert await wait(5 * STALL_S) == []
    checking.cancel()


def test_a_wait_is_a_stall_from_a_bound_on():
    assert Wait(target="a", what="b", seconds=STALL_S).is_stall
    assert not Wait(target="a", what="b", seconds=STALL_S - 0.1).is_stall
