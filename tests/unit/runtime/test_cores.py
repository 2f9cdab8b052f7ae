"""Threads by cores, and a process that lets others go first."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from dialoop_services.runtime.cores import threads_of

AUTOGROUP = Path("/proc/self/autogroup")
HAS_AUTOGROUPS = AUTOGROUP.exists() and bool(AUTOGROUP.read_text("utf-8").strip())
"""In some containers the file is there, and empty."""


def test_zero_is_a_thread_on_each_core_that_the_process_may_use(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(6), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8 if logical else 4)
    assert threads_of(3) == threads_of(3, num_processes=2) == 3
    assert threads_of(0) == 4, "two threads on one core compute no faster"
    assert threads_of(0, num_processes=2) == 2
    assert threads_of(0, num_processes=9) == 1


@pytest.mark.skipif(not HAS_AUTOGROUPS, reason="of Linux with autogroups")
@pytest.mark.parametrize("is_own", [True, False])
def test_others_go_first_also_in_other_sessions_and_a_terminal_keeps_its_weight(
    is_own: bool,
) -> None:
    code = (
        "from dialoop_services.runtime.cores import let_others_go_first\n"
        "let_others_go_first()\n"
        f"print(__import__('os').nice(0), open({str(AUTOGROUP)!r}).read())"
    )
    before = int(AUTOGROUP.read_text("utf-8").split()[-1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=is_own,
    )
    niceness, _, _, of_session = done.stdout.split()
    assert int(niceness) == min(19, os.nice(0) + 15)
    assert int(of_session) == (15 if is_own else before)
