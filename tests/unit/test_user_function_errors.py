"""What a user's function raises has type, line, owner and one line in the log; it has a thread."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from dialoop import failures, user_functions
from dialoop.environments import NamedReward, Rewards
from dialoop.failures import Repeats, failure_of, log_repeated
from dialoop.trajectory import Failure, Owner
from dialoop.user_functions import OwnCancellation, TimeIsUp, call, call_now, raised_at
from dialoop_extras.games import Play
from dialoop_extras.trials.trial import run_trial

from tests.unit.test_user_functions import DONE, Count, _async, _sync, chat, double, step


def fails(*_: Any) -> Any:
    raise KeyError("secret")


def stops(*_: Any) -> Any:
    raise StopIteration


def hangs(*_: Any) -> Any:
    time.sleep(1.0)


async def fails_later(*_: Any) -> Any:
    raise KeyError("secret")


@pytest.mark.parametrize("function", [fails, fails_later])
async def test_an_error_is_named_with_its_type_and_line(function: Any) -> None:
    score = await Rewards([NamedReward(function, name="mine")]).score(DONE)
    place = f"test_user_function_errors.py, line {inspect.getsourcelines(function)[1] + 1}"
    (failure,) = score.failures
    assert failure.owner is Owner.REWARD
    assert f"Reward mine failed: KeyError at {place}" in failure.message
    assert "secret" not in failure.message


async def test_an_agents_error_is_the_agents_and_a_games_the_environments() -> None:
    agent = SimpleNamespace(get_action=fails)
    result = await run_trial(Count(_sync), [{}], agent)
    (failure,) = result.trials[0].final.failures
    assert failure.owner is Owner.AGENT
    assert "The agent failed: KeyError at test_user_function_errors.py" in failure.message
    game = Count(_sync)
    game.play = fails
    (failure,) = (await step(chat(Play(game)), "1")).failures
    assert failure.owner is Owner.ENVIRONMENT
    assert "KeyError at test_user_function_errors.py" in failure.message


async def test_an_error_that_a_future_cannot_hold_keeps_its_line() -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await call(stops)
    assert "at test_user_function_errors.py, line" in raised_at(caught.value)


async def test_a_function_that_hangs_is_left_behind_after_its_time() -> None:
    released = asyncio.Event()
    with pytest.raises(TimeoutError):
        await call(released.wait, timeout_s=0.01)
    place = rf"test_user_function_errors.py, line {inspect.getsourcelines(hangs)[1]}"
    for function in (hangs, partial(hangs), NamedReward(hangs, name="mine")):
        with pytest.raises(TimeIsUp, match=rf"it took more than 0.01 s \({place}\)"):
            await call(function, None, timeout_s=0.01)
        with pytest.raises(TimeIsUp, match=rf"it took more than 0.01 s \({place}\)"):
            call_now(function, None, timeout_s=0.01)


def test_an_error_without_a_line_of_the_users_is_its_type() -> None:
    assert raised_at(ValueError("secret")) == "ValueError"


def test_an_async_function_is_called_where_nobody_can_await() -> None:
    assert call_now(_async(double), 2) == 4
    assert call_now(_async(double), 2, timeout_s=9.0) == call_now(double, 2, timeout_s=9.0) == 4


async def test_no_call_waits_for_one_that_hangs() -> None:
    release = threading.Event()
    hanging = asyncio.create_task(call(release.wait))
    await asyncio.sleep(0.01)
    assert await call(lambda: 7, timeout_s=9) == 7
    release.set()
    await hanging


async def test_a_fork_calls_functions_in_threads_of_its_own() -> None:
    child = os.fork()
    if not child:
        asyncio.events._set_running_loop(None)
        os._exit(asyncio.run(call(lambda: 7, timeout_s=9)))
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


async def cancelled_within(*_: Any, **__: Any) -> Any:
    inner = asyncio.ensure_future(asyncio.sleep(5))
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner


async def cancels_itself(*_: Any, **__: Any) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(5)


def returns_a_cancelled_one(*_: Any, **__: Any) -> Any:
    return cancelled_within()


async def exits(*_: Any, **__: Any) -> Any:
    raise SystemExit(1)


WITHIN = [cancelled_within, cancels_itself, returns_a_cancelled_one]


@pytest.mark.parametrize("function", WITHIN)
async def test_a_cancellation_within_a_function_is_its_own_error(function: Any) -> None:
    with pytest.raises(OwnCancellation) as caught:
        await call(function, timeout_s=5)
    if function is not cancels_itself:
        assert "OwnCancellation at test_user_function_errors.py" in raised_at(caught.value)


async def test_without_a_time_limit_too_it_is_told_from_the_callers() -> None:
    with pytest.raises(OwnCancellation):
        await call(cancelled_within)
    for timeout_s in (None, 30.0):
        waiting = asyncio.create_task(call(asyncio.sleep, 30, timeout_s=timeout_s))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@pytest.mark.parametrize("timeout_s", [None, 5.0])
async def test_a_coroutine_that_exits_does_not_end_the_service(timeout_s: float | None) -> None:
    with pytest.raises(RuntimeError, match="SystemExit"):
        await call(exits, timeout_s=timeout_s)


async def test_a_coroutine_that_ignores_its_cancellation_is_left_behind() -> None:
    ends = asyncio.Event()

    async def goes_on() -> float:
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ends.wait()
        return 1.0

    with patch("dialoop.user_functions._FREES_IN_S", 0.01), pytest.raises(TimeIsUp):
        await call(goes_on, timeout_s=0.01)
    (left,) = user_functions._LEFT_BEHIND
    ends.set()
    assert await left == 1.0
    assert not user_functions._LEFT_BEHIND


async def test_a_time_out_of_its_own_is_not_the_time_limit() -> None:
    async def gives_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError) as caught:
        await call(gives_up, timeout_s=5)
    assert not isinstance(caught.value, TimeIsUp)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failures, "REPEATS", Repeats(clock))
    return clock


def fail(what: str, text: str = "x") -> Failure:
    try:
        raise KeyError(text)
    except KeyError as error:
        return failure_of(error, owner=Owner.AGENT, reason="AGENT_FAILED", what=what)


def test_a_kind_of_failure_has_one_line_and_its_error_id(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first = [fail("The agent", str(number)).message for number in range(50)]
    other = fail("The tool").message
    assert len(set(first)) == 1
    assert len(caplog.records) == 2
    for message, record in zip((first[0], other), caplog.records, strict=True):
        assert record.exc_info
        assert record.getMessage().rpartition(" ")[2] in message
    clock.now = 61.0
    later = fail("The agent").message
    assert caplog.records[2].getMessage().endswith("(50 times since the last line)")
    assert later != first[0]
    assert len(caplog.records) == 3


def test_what_has_the_error_id_of_a_line_is_not_logged_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("dialoop.test")
    known = f"A member failed: {fail('The agent').message}"
    assert not log_repeated(log, logging.WARNING, known, kind="agent: AGENT_FAILED")
    elsewhere = "A member failed: Tool x failed: KeyError (error_id 0123456789ab)."
    due = [log_repeated(log, logging.WARNING, elsewhere, kind="tool", group_id=n) for n in range(9)]
    assert due == [True] + [False] * 8
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]


def test_kinds_without_end_take_no_memory_without_end(clock: Clock) -> None:
    repeats = Repeats(clock)
    for number in range(3000):
        assert repeats.due(number) == 1
    assert len(repeats._kinds) <= 1000
