"""A user's function has a thread to itself; what it raises has type, line and an owner."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.environments import NamedReward, Rewards
from dialoop.trajectory import Owner
from dialoop.user_functions import call, call_now, raised_at
from dialoop_extras.games import Play
from dialoop_extras.trials.trial import run_trial

from tests.unit.test_user_functions import DONE, Count, _async, _sync, chat, double, step


def fails(*_: Any) -> Any:
    raise KeyError("secret")


def stops(*_: Any) -> Any:
    raise StopIteration


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


def test_an_error_without_a_line_of_the_users_is_its_type() -> None:
    assert raised_at(ValueError("secret")) == "ValueError"


def test_an_async_function_is_called_where_nobody_can_await() -> None:
    assert call_now(_async(double), 2) == 4


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
