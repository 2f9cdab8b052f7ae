"""Waiting and trying again: what is repeated, how often, for how long; and nowhere else."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest
from dialoop.clients import retry as module
from dialoop.clients.errors import is_outage
from dialoop.clients.retry import RetryPolicy, retry
from dialoop.errors import Busy, CapacityExhausted, DeadlineExceeded, InvalidInput, Unavailable
from dialoop.reasons import Reason

ROOT = Path(__file__).parents[3]

# Looks into a store more and more rarely: no call is repeated, and `learning` may not know grpc.
POLLS = {
    "services/dialoop_learning/parallel/group_commands.py",
    "services/dialoop_ops/launch/ray.py",  # it waits evenly; its power of 2 is a GiB
}


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self):
        self.now_s = 0.0
        self.waits = []

    def monotonic(self):
        return self.now_s

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.now_s += seconds


class Call:
    """Raises the errors one after the other, then answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.num_calls = 0

    async def __call__(self):
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module.asyncio, "sleep", clock.sleep)
    monkeypatch.setattr(module.random, "random", lambda: 1.0)
    return clock


def away(count, reason="UNAVAILABLE"):
    return [Unavailable("away", reason=reason) for _ in range(count)]


async def test_waits_double_up_to_the_longest(clock):
    call = Call(*away(7))
    assert await retry(call, RetryPolicy(max_attempts=None, max_wait_s=1.0)) == "done"
    assert clock.waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("chance", [None, 0.0, 0.3, 1.0])
def test_jitter_takes_half_of_a_wait_at_most(chance):
    waits = [RetryPolicy().wait_s(attempt, chance) for attempt in (1, 6, 5000)]
    assert all(0.5 * b <= w <= b for w, b in zip(waits, (0.1, 3.2, 5.0), strict=True))


async def test_the_last_attempts_error_is_raised_as_it_is(clock):
    call = Call(*away(9))
    with pytest.raises(Unavailable, match="away") as caught:
        await retry(call, RetryPolicy(max_attempts=3))
    assert (call.num_calls, len(clock.waits)) == (3, 2)
    assert caught.value.reason == "UNAVAILABLE"


async def test_a_service_that_is_away_for_too_long_is_named_with_its_error(clock):
    call = Call(*away(99))
    with pytest.raises(Unavailable, match="No answer within 2 s: away") as caught:
        await retry(call, RetryPolicy(max_attempts=None, total_s=2.0))
    assert caught.value.reason == "SERVICE_AWAY"
    assert clock.now_s <= 2.0


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("late"),
        Unavailable("no episode", reason=Reason.OPEN_FAILED),
        Unavailable("no episode", reason=Reason.OPEN_TIMEOUT),
    ],
)
async def test_a_request_that_fails_by_itself_for_long_is_no_outage(clock, error):
    call = Call(*[error] * 99)
    with pytest.raises(type(error)) as caught:
        await retry(call, RetryPolicy(max_attempts=None, total_s=2.0))
    assert caught.value is error
    assert call.num_calls > 2
    assert not is_outage(error)


@pytest.mark.parametrize("reason", [Reason.ENGINE_DIED, Reason.SERVICE_DIED])
async def test_a_request_under_which_a_service_dies_twice_is_tried_no_more(clock, reason):
    call = Call(*away(1, reason), *away(99, reason))
    with pytest.raises(Unavailable) as caught:
        await retry(call, RetryPolicy(max_attempts=None, total_s=120.0))
    assert (caught.value.reason, call.num_calls) == (reason, 2)
    assert not is_outage(caught.value)


async def test_a_death_is_not_forgotten_while_the_service_restarts_slowly(clock):
    policy = RetryPolicy(max_attempts=None, max_wait_s=1.0, total_s=2.0)
    call = Call(*away(1, "ENGINE_DIED"), *away(50), *away(1, "SERVICE_DIED"))
    with pytest.raises(Unavailable) as caught:
        await retry(call, policy)
    assert caught.value.reason == "SERVICE_DIED"
    assert clock.now_s > 10 * policy.total_s


async def test_sleep_of_a_replica_is_no_outage(clock):
    call = Call(*away(50, "ASLEEP"), *away(2))
    policy = RetryPolicy(max_attempts=None, max_wait_s=0.5, total_s=1.5)
    assert await retry(call, policy) == "done"
    assert clock.now_s > 10 * policy.total_s


async def test_a_deadline_ends_also_the_wait_for_a_sleeper(clock):
    with pytest.raises(Unavailable, match="away"):
        await retry(Call(*away(99, "ASLEEP")), RetryPolicy(max_attempts=None), within_s=3.0)
    assert clock.now_s <= 3.0


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("wrong"),
        CapacityExhausted("large", reason="MESSAGE_TOO_LARGE"),
        Busy("moved", reason="CURSOR_MOVED"),
        KeyError("ours"),
    ],
)
async def test_what_would_only_repeat_itself_is_raised_at_once(clock, error):
    call = Call(error)
    with pytest.raises(type(error)):
        await retry(call, RetryPolicy())
    assert (call.num_calls, clock.waits) == (1, [])


async def test_a_caller_may_wait_otherwise(clock):
    await retry(Call(*away(3)), RetryPolicy(), wait_s=float)
    assert clock.waits == [1.0, 2.0, 3.0]


async def test_a_cancelled_wait_ends_at_once():
    task = asyncio.ensure_future(retry(Call(*away(9)), RetryPolicy(first_wait_s=60, max_wait_s=60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_no_other_module_computes_growing_waits():
    """A back-off doubles something in a module that sleeps."""
    paths = set()
    for folder in ("client/dialoop", "services/dialoop_services"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if _sleeps(tree) and any(_doubles(node) for node in ast.walk(tree)):
                paths.add(path.relative_to(ROOT).as_posix())
    assert paths - POLLS == {"client/dialoop/clients/retry.py"}, "wait with dialoop.clients.retry"


def _sleeps(tree):
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(f, ast.Attribute) and f.attr in ("sleep", "wait_for") for f in calls)


def _doubles(node):
    """Return whether it is `2 ** n`, `wait *= 2`, or `wait = min(2 * wait, ...)`."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Mult) and _is_factor(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_factor(node.left)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "min":
        products = (a for a in node.args if isinstance(a, ast.BinOp) and isinstance(a.op, ast.Mult))
        return any(_is_factor(p.left) or _is_factor(p.right) for p in products)
    return False


def _is_factor(node):
    return isinstance(node, ast.Constant) and node.value in (1.5, 2, 2.0, 3, 10)
