"""Functions in processes that can be killed."""

from __future__ import annotations

import asyncio
import os

import pytest
from dialoop.errors import DeadlineExceeded, InternalError, InvalidConfig, InvalidInput
from dialoop.sandbox import KillableFunction, run_killable

from tests.support.waiting import PATIENCE_S

HERE = "tests.unit.sandbox.test_killable"


def add(a: float, b: float) -> float:
    print("not an answer")  # noqa: T201
    return a + b


async def add_later(a: float, b: float) -> float:
    await asyncio.sleep(0)
    return a + b


def pid() -> int:
    return os.getpid()


def pid_or_hang(hangs: bool) -> int:
    while hangs:
        pass
    return os.getpid()


def hang(path: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123
        file.write(str(os.getpid()))
    while True:
        pass


def broken(kind: str) -> object:
    if kind == "exit":
        raise SystemExit(0)
    if kind == "die":
        os._exit(3)
    if kind == "value":
        raise ValueError("the secret path /etc/x")
    return object()


async def test_a_sync_or_async_function_is_called_by_its_path():
    assert await run_killable(f"{HERE}:add", {"a": 1, "b": 2}, PATIENCE_S) == 3
    assert await run_killable(f"{HERE}:add_later", {"a": 1, "b": 2}, PATIENCE_S) == 3
    assert await run_killable("math:gcd", {}, PATIENCE_S) == 0


async def test_a_process_is_used_again():
    function = KillableFunction(f"{HERE}:pid")
    first = await function({}, timeout_s=PATIENCE_S)
    assert first != os.getpid()
    assert await function({}, timeout_s=PATIENCE_S) == first
    await function.close()


async def test_a_call_that_hangs_is_killed_and_the_next_is_answered():
    function = KillableFunction(f"{HERE}:pid_or_hang", max_processes=1)
    number = await function({"hangs": False}, timeout_s=PATIENCE_S)
    with pytest.raises(DeadlineExceeded) as killed:
        await function({"hangs": True}, timeout_s=0.5)
    assert killed.value.reason == "FUNCTION_TIMEOUT"
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert await function({"hangs": False}, timeout_s=PATIENCE_S) != number
    await function.close()


async def test_others_are_answered_while_one_hangs(tmp_path):
    hanging = asyncio.create_task(
        run_killable(f"{HERE}:hang", {"path": str(tmp_path / "pid")}, 1.5)
    )
    assert await run_killable(f"{HERE}:add", {"a": 1, "b": 2}, PATIENCE_S) == 3
    with pytest.raises(DeadlineExceeded):
        await hanging


@pytest.mark.parametrize("kind", ["exit", "die", "value", "no json"])
async def test_a_failure_is_ours_to_read_and_nobody_elses(kind, caplog):
    with pytest.raises(InternalError) as failed:
        await run_killable(f"{HERE}:broken", {"kind": kind}, PATIENCE_S)
    assert failed.value.reason == "FUNCTION_FAILED"
    assert "secret" not in str(failed.value)
    error_id = failed.value.message.partition("error_id ")[2].strip(").")
    assert error_id in caplog.text


async def test_a_missing_function_is_a_failure(caplog):
    with pytest.raises(InternalError):
        await run_killable("math:no_such", {}, PATIENCE_S)
    assert "no_such" in caplog.text


@pytest.mark.parametrize("path", ["math", ":f", "math:"])
def test_a_path_that_names_nothing_is_refused(path):
    with pytest.raises(InvalidConfig):
        KillableFunction(path)


async def test_no_time_is_refused():
    with pytest.raises(InvalidInput):
        await run_killable("math:gcd", {}, 0)


async def test_a_cancelled_call_ends_its_process(tmp_path):
    path = tmp_path / "pid"
    call = asyncio.create_task(run_killable(f"{HERE}:hang", {"path": str(path)}, 60))
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
