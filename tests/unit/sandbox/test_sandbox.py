"""The sandbox: what it runs, what it remembers, what it refuses to be."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from dialoop.errors import CapacityExhausted, InvalidConfig, InvalidInput, Unavailable
from dialoop.sandbox import Assessment, Level, Limits, Sandbox, self_test
from dialoop.sandbox.confined import syscall_numbers
from dialoop.sandbox.programs import _outermost, rules_of

from tests.support.waiting import PATIENCE_S

SUM = "print(sum(range(10)))"


@pytest.fixture
async def sandbox():
    made = Sandbox()
    yield made
    await made.close()


async def test_it_runs_code_and_tells_outputs_apart(sandbox):
    done = await sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (done.stdout, done.stderr, done.succeeded) == ("out\n", "err\n", True)
    assert (done.timed_out, done.truncated, done.ended) == (False, False, False)
    assert 0 < done.duration_s < PATIENCE_S


async def test_a_traceback_shows_the_code_and_nothing_of_ours(sandbox):
    done = await sandbox.run("def f():\n    return 1 / 0\n\nf()\n")
    assert not done.succeeded
    assert done.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<code>", line 4, in <module>\n    f()\n'
        '  File "<code>", line 2, in f\n    return 1 / 0\n'
        "           ~~^~~\nZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize(
    ("code", "succeeded", "stderr"),
    [
        ("exit()", True, ""),
        ("raise SystemExit(3)", False, ""),
        ("exit('no')", False, "no\n"),
        ("raise KeyboardInterrupt", False, "KeyboardInterrupt"),
        ("x = (", False, "SyntaxError"),
        ("def f(): f()\nf()", False, "RecursionError"),
        ("\0", False, "null bytes"),
        ("print('\\ud800')", True, ""),
        ("import sys; sys.stdout.close(); sys.stderr.close()", True, ""),
        ("print(1)\nimport sys\nsys.stdout = None", True, ""),
        ("input()", False, "EOFError"),
    ],
)
async def test_code_may_end_as_it_likes(sandbox, code, succeeded, stderr):
    done = await sandbox.run(code)
    assert done.succeeded is succeeded
    assert stderr in done.stderr
    assert not done.ended


async def test_the_standard_library_is_there(sandbox):
    code = (
        "import asyncio, dataclasses, decimal, fractions, json, random, re, statistics\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\n"
        "async def main():\n    await asyncio.sleep(0)\n    return A(1)\n"
        "print(asyncio.run(main()), decimal.Decimal('0.1') * 3)\n"
    )
    assert (await sandbox.run(code)).stdout == "A(x=1) 0.3\n"


async def test_an_interpreter_remembers_and_a_reset_forgets(sandbox):
    session, other = sandbox.interpreter(), sandbox.interpreter()
    await session.run("x = 20")
    assert (await session.run("print(x + 1)")).stdout == "21\n"
    assert "NameError" in (await other.run("x")).stderr
    await session.reset()
    assert "NameError" in (await session.run("x")).stderr


async def test_calls_to_one_interpreter_take_turns(sandbox):
    session = sandbox.interpreter()
    await session.run("x = []")
    await asyncio.gather(*(session.run(f"x.append({n}); print(len(x))") for n in range(20)))
    assert (await session.run("print(sorted(x) == list(range(20)))")).stdout == "True\n"


async def test_a_crash_is_named_and_the_state_is_known_to_be_lost(sandbox):
    session = sandbox.interpreter()
    await session.run("x = 1")
    done = await session.run("import ctypes; ctypes.string_at(0)")
    assert (done.succeeded, done.ended, done.timed_out) == (False, True, False)
    assert "SIGSEGV" in done.stderr
    assert "everything defined before is lost" in done.stderr
    assert "NameError" in (await session.run("x")).stderr


async def test_what_was_printed_before_a_timeout_is_kept(sandbox):
    done = await sandbox.run("print('so far')\nwhile True: pass", timeout_s=1.0)
    assert (done.stdout, done.timed_out, done.succeeded) == ("so far\n", True, False)
    assert done.stderr == "Timed out after 1 s.\n"


async def test_long_output_is_cut_with_a_note(sandbox):
    done = await sandbox.run("print('x' * 10_000_000)")
    assert done.succeeded
    assert done.truncated
    assert done.stdout.endswith("[output was cut at 65536 bytes]\n")
    assert len(done.stdout) < 66_000


async def test_a_cancelled_call_ends_its_process(sandbox):
    session = sandbox.interpreter()
    await session.run("x = 1")
    ended = session._held.worker._ended
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await session.run("while True: pass", timeout_s=600)
    await asyncio.wait_for(ended, PATIENCE_S)
    assert "NameError" in (await session.run("x")).stderr


async def test_callers_wait_for_their_turn_and_not_for_ever():
    sandbox = Sandbox(max_running=1, max_wait_s=0.3, num_spares=0)
    await sandbox.start()
    busy = asyncio.create_task(sandbox.run("while True: pass", timeout_s=600))
    await asyncio.sleep(0.05)
    with pytest.raises(CapacityExhausted) as refused:
        await sandbox.run(SUM)
    assert refused.value.reason == "SANDBOX_BUSY"
    busy.cancel()
    await asyncio.wait([busy])
    assert (await sandbox.run(SUM)).stdout == "45\n"
    await sandbox.close()


async def test_there_are_so_many_interpreters_and_a_dropped_one_makes_room():
    sandbox = Sandbox(max_interpreters=1, max_wait_s=0.2)
    first, second = sandbox.interpreter(), sandbox.interpreter()
    await first.run("x = 1")
    with pytest.raises(CapacityExhausted) as refused:
        await second.run("x = 1")
    assert refused.value.reason == "SANDBOX_FULL"
    del first, refused
    gc.collect()
    await asyncio.sleep(0.05)
    assert (await second.run(SUM)).stdout == "45\n"
    await sandbox.close()


async def test_a_dead_fork_server_is_replaced_and_the_loss_is_said():
    sandbox = Sandbox(num_spares=0)
    session = sandbox.interpreter()
    await session.run("x = 1")
    sandbox._pool._server._stop()
    done = await session.run("print(x)")
    assert "NameError" in done.stderr
    assert "everything defined before is lost" in done.stderr
    assert (await sandbox.run(SUM)).stdout == "45\n"
    await sandbox.close()


def test_each_event_loop_gets_processes_of_its_own():
    sandbox = Sandbox()
    for _ in range(2):
        assert asyncio.run(sandbox.run(SUM)).stdout == "45\n"


async def test_a_call_in_a_persistent_interpreter_takes_milliseconds(sandbox):
    session, times = sandbox.interpreter(), []
    for _ in range(51):
        started = time.perf_counter()
        await session.run("1 + 1")
        times.append(time.perf_counter() - started)
    assert sorted(times)[25] < 0.2


@pytest.fixture
def levels(monkeypatch):
    """Pretend which levels the machine has."""

    def pretend(**missing: str) -> None:
        def assess(level):
            return Assessment(level=level, missing=missing.get(level, ""), denies=("network",))

        monkeypatch.setattr(self_test, "assess", assess)

    return pretend


def test_auto_is_the_best_level_there_is(levels):
    levels()
    assert self_test.effective_isolation("auto").level is Level.BUBBLEWRAP
    levels(bubblewrap="no bwrap")
    assert self_test.effective_isolation("auto").level is Level.LANDLOCK
    levels(bubblewrap="no bwrap", landlock="old kernel")
    isolation = self_test.effective_isolation("auto")
    assert str(isolation) == "rlimits (denies network)"


def test_a_configured_level_that_is_missing_is_an_error_and_no_downgrade(levels):
    levels(bubblewrap="there is no bwrap on PATH")
    with pytest.raises(Unavailable) as refused:
        Sandbox(level="bubblewrap")
    assert refused.value.reason == "SANDBOX_LEVEL_MISSING"
    assert "no bwrap on PATH" in refused.value.message
    assert refused.value.remedy


def test_without_any_level_there_is_no_sandbox(levels):
    levels(bubblewrap="a", landlock="b", rlimits="c")
    with pytest.raises(Unavailable, match="bubblewrap: a; landlock: b; rlimits: c"):
        Sandbox()


def test_a_level_that_lets_something_out_does_not_count(tmp_path):
    assessment = self_test._judge(Level.LANDLOCK, True, '["network"]\n', str(tmp_path))
    assert assessment.missing == "it does not deny network"
    (tmp_path / "secret").touch()
    (tmp_path / "written").touch()
    assessment = self_test._judge(Level.LANDLOCK, True, "[]\n", str(tmp_path))
    assert assessment.missing == "it does not deny writing outside"
    assessment = self_test._judge(Level.LANDLOCK, False, "", str(tmp_path))
    assert assessment.missing == "code did not run to its end"


def test_the_self_tests_attempts_succeed_where_nothing_is_denied(tmp_path):
    """Else they would prove nothing; `raising limits` needs a lower limit to be raised."""
    (tmp_path / "secret").touch()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code = self_test._CODE.format(
            folder=tmp_path,
            port=listening.getsockname()[1],
            parent=os.getpid(),
            forkserver=os.getpid(),
        )
        code = code.replace(
            '"/bin/true", ["/bin/true"]', '"/bin/echo", ["echo", json.dumps(escaped)]'
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
    escaped = json.loads(done.stdout.splitlines()[-1])
    expected = set(self_test.ATTEMPTS) - {"programs", "raising limits"}
    assert set(escaped) - {"raising limits"} == expected


@pytest.mark.parametrize(
    "options", [{"level": "strong"}, {"max_running": 0}, {"max_wait_s": 0}, {"num_spares": -1}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(InvalidConfig):
        Sandbox(**options)


async def test_bad_limits_and_timeouts_are_refused(sandbox):
    with pytest.raises(InvalidConfig):
        Limits(max_memory_bytes=0)
    with pytest.raises(InvalidInput):
        await sandbox.run(SUM, timeout_s=0)
    with pytest.raises(InvalidInput):
        await sandbox.interpreter().run(SUM, timeout_s=-1)


async def test_packages_can_be_lent(tmp_path):
    (tmp_path / "lent.py").write_text("ANSWER = 42")
    sandbox = Sandbox(packages=(str(tmp_path),))
    if sandbox.isolation.level is Level.RLIMITS:
        pytest.skip("at level rlimits nothing is imported from files")
    done = await sandbox.run("import lent; print(lent.ANSWER)")
    assert done.stdout == "42\n"
    await sandbox.close()


def test_rules_are_stricter_where_there_are_no_namespaces():
    assert rules_of(Level.BUBBLEWRAP, Limits())["max_file_bytes"] == Limits().max_disk_bytes
    assert rules_of(Level.LANDLOCK, Limits())["max_file_bytes"] == Limits().max_output_bytes + 1
    assert _outermost(["/usr/lib", "/usr/lib/python3", "/lib"]) == ["/usr/lib", "/lib"]


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", sorted(HEADERS))
def test_system_call_numbers_are_the_kernels(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    defines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    numbers = {name: int(number) for name, number in defines}
    numbers.setdefault("newfstatat", numbers.get("fstatat", -1))
    table = syscall_numbers.MACHINES[machine][1]
    assert {name: numbers[name] for name in table} == table


def test_an_unknown_machine_has_no_filter(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(OSError, match="no system call table for riscv64"):
        syscall_numbers.this_machine()
