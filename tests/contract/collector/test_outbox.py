"""Members on their way to the queue: no cancelled waiter and no bad member holds up others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import DeadlineExceeded
from dialoop_services.collector.outbox import Outbox

ONCE = RetryPolicy(max_attempts=1)


class Queue:
    """Takes members when it is open; `bad` ones make the call fail."""

    def __init__(self, *bad, error=None):
        self.open = asyncio.Event()
        self.bad, self.error = bad, error or ValueError("no such member")
        self.taken, self.num_calls = [], 0

    async def append_members(self, items):
        self.num_calls += 1
        await self.open.wait()
        if set(items) & set(self.bad):
            raise self.error
        self.taken += items
        return [SimpleNamespace(item=item) for item in items]


async def test_a_cancelled_waiter_stops_no_member_that_is_being_sent():
    queue = Queue()
    outbox = Outbox(queue.append_members, ONCE)
    first, second = outbox.put("a"), outbox.put("b")
    waiter = asyncio.create_task(outbox.flush())
    await asyncio.sleep(0)
    waiter.cancel()
    queue.open.set()
    await outbox.flush()
    assert queue.taken == ["a", "b"]
    assert (first.done(), second.done()) == (True, True)


async def test_an_unforeseen_error_of_one_member_reaches_its_waiter_alone():
    queue = Queue("bad")
    queue.open.set()
    outbox = Outbox(queue.append_members, ONCE)
    good, bad, late = outbox.put("good"), outbox.put("bad"), outbox.put("late")
    with pytest.raises(ValueError, match="no such member"):
        await bad
    await asyncio.gather(good, late)
    assert queue.taken == ["good", "late"]
    assert (await outbox.put("next")).item == "next"  # a new sender starts


async def test_a_queue_that_does_not_answer_is_asked_once_for_the_batch():
    queue = Queue("a", error=DeadlineExceeded("No answer."))
    queue.open.set()
    outbox = Outbox(queue.append_members, ONCE)
    for sent in [outbox.put("a"), outbox.put("b")]:
        with pytest.raises(DeadlineExceeded):
            await sent
    assert queue.num_calls == 1
