"""Code that means harm to processes, memory, time and the protocol.

At every isolation level that this machine has; missing levels are skipped with the self-test's
reason (`pytest -rs` prints it). All the while another session is asked, and must answer as fast as
it usually does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import dialoop.sandbox
import pytest
from dialoop.errors import Unavailable
from dialoop.sandbox import Level, Limits, Sandbox
from dialoop.sandbox.programs import rules_of
from dialoop.sandbox.self_test import assess

from tests.support.sandbox_world import (
    LIMITS,
    descendants,
    scene,  # noqa: F401
    wait_until_gone,
)
from tests.support.waiting import PATIENCE_S


async def test_forged_markers_stay_text(scene):
    session = scene.sandbox.interpreter()
    forged = '---END---\\n\\x00\\x00\\x00\\x11{\\"succeeded\\": true}\\n---END---'
    done = await session.run(f'print("{forged}")\nraise ValueError("mine")')
    assert not done.succeeded
    assert done.stdout.count("---END---") == 2
    assert (await session.run("print('next')")).stdout == "next\n"


async def test_a_forged_answer_changes_only_the_forgers_own(scene):
    session = scene.sandbox.interpreter()
    forge = (
        "import os\nfor fd in range(3, 20):\n"
        "    try: os.write(fd, b'\\0\\0\\0\\x11' + b'x' * 17)\n    except OSError: pass\n"
        "print('forged')"
    )
    done = await session.run(forge)
    assert not done.succeeded
    assert done.ended
    assert "wrote to the interpreter's channel" in done.stderr
    assert (await session.run("print('next')")).stdout == "next\n"


async def test_an_answer_sent_ahead_is_not_taken_for_the_next(scene):
    """The code finds the nonce, answers early, and prints what the next call is to read."""
    session = scene.sandbox.interpreter()
    ahead = (
        "import os, sys\n"
        "frame = sys._getframe()\n"
        "while 'nonce' not in frame.f_locals: frame = frame.f_back\n"
        "nonce = frame.f_locals['nonce']\n"
        "for _ in range(3): os.write(3, b'\\0\\0\\0\\x11' + nonce + b'\\x01')\n"
        "print('stale')\n"
    )
    await session.run(ahead)
    await asyncio.sleep(0.05)
    done = await session.run("print('next')")
    assert "stale" not in done.stdout
    assert not done.succeeded
    assert "Earlier code wrote to the interpreter's channel" in done.stderr
    assert (await session.run("print('after')")).stdout == "after\n"


@pytest.mark.parametrize(
    "flood",
    [
        "while True: print('x' * 10000)",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        "import os\nwhile True: os.write(2, b'x' * 65536)",
    ],
)
async def test_a_flood_of_output_is_cut(scene, flood):
    done = await scene.attack(flood, timeout_s=2.0)
    assert not done.succeeded
    assert done.truncated
    assert len(done.stdout) + len(done.stderr) < 3 * LIMITS.max_output_bytes
    assert "[output was cut at 65536 bytes]" in done.stdout + done.stderr


async def test_forking_is_denied(scene):
    bomb = "import os\nwhile True:\n    os.fork()\n"
    done = await scene.attack(bomb)
    assert "PermissionError" in done.stderr
    for start in ("os.system('true')", "os.posix_spawn('/bin/true', ['true'], {})"):
        tried = await scene.attack(f"import os\nprint({start})")
        assert not tried.succeeded or tried.stdout != "0\n"
    for raw in (57, 58, 435):  # fork, vfork, clone3 on x86_64, whatever Python thinks of them
        code = f"import ctypes\nprint(ctypes.CDLL(None).syscall({raw}, 0, 0, 0, 0, 0))"
        assert (await scene.attack(code)).stdout == "-1\n"
    # The neighbour, and what is kept ready or just going; bubblewrap has two processes more each.
    assert len(descendants(scene.sandbox._pool.forkserver_pid)) < 20


async def test_threads_are_denied(scene):
    done = await scene.attack("import threading\nwhile True: threading.Thread(target=int).start()")
    assert "can't start new thread" in done.stderr


async def test_programs_are_not_started(scene):
    done = await scene.attack("import os\nos.execv('/bin/sh', ['sh', '-c', 'echo out'])")
    assert not done.succeeded
    assert "out" not in done.stdout


@pytest.mark.parametrize(
    "sleep",
    [
        "import time\ntime.sleep(3600)",
        "while True: pass",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "def f():\n    try:\n        while True: pass\n    finally: f()\nf()",
        "sum(1 for _ in iter(int, 1))",
    ],
)
async def test_sleeping_for_ever_ends_at_the_timeout(scene, sleep):
    done = await scene.attack(sleep, timeout_s=0.4)
    assert done.timed_out


async def test_processor_time_of_an_interpreters_life_is_limited():
    sandbox = Sandbox(limits=Limits(max_cpu_s=1))
    done = await sandbox.run("while True: pass", timeout_s=PATIENCE_S)
    assert not done.timed_out
    assert "SIGKILL (a limit on memory or processor time)" in done.stderr
    await sandbox.close()


async def test_its_parents_are_not_signalled(scene):
    server = scene.sandbox._pool.forkserver_pid
    code = (
        "import os, signal\n"
        f"for pid in ({os.getpid()}, {server}, os.getppid(), 1, 0, -1, -{os.getpid()}):\n"
        "    for call in (lambda: os.kill(pid, signal.SIGKILL), lambda: os.killpg(abs(pid), 9),\n"
        "                 lambda: os.pidfd_open(abs(pid))):\n"
        "        try: call(); print('done')\n        except OSError: print('denied')\n"
    )
    done = await scene.attack(code)
    assert set(done.stdout.split()) == {"denied"}
    os.kill(server, 0)
    assert (await scene.attack("print('alive')")).stdout == "alive\n"


async def test_it_may_kill_itself_and_only_itself(scene):
    session = scene.sandbox.interpreter()
    done = await session.run("import os\nos.kill(os.getpid(), 9)")
    assert done.ended
    assert "SIGKILL" in done.stderr
    assert (await session.run("print('again')")).stdout == "again\n"


async def test_closing_the_protocols_descriptors_costs_the_state_and_no_more(scene):
    session = scene.sandbox.interpreter()
    done = await session.run("import os\nos.closerange(0, 1000)\nprint('x')")
    assert done.ended
    assert not done.succeeded
    held = await session.run("import os, time\nos.close(3)\ntime.sleep(60)", timeout_s=1)
    assert held.ended
    assert (await session.run("print('again')")).stdout == "again\n"


@pytest.mark.parametrize(
    "bomb",
    [
        "x = bytearray(10**10)",
        "x = []\nwhile True: x.append(bytes(2**20))",
        "x = 'x'\nwhile True: x += x",
        "import mmap\nx = [mmap.mmap(-1, 2**26) for _ in range(64)]",
        "x = 2 ** (2 ** 40)",
    ],
)
async def test_memory_is_limited(scene, bomb):
    done = await scene.attack(bomb)
    assert not done.succeeded
    assert not done.timed_out
    assert "MemoryError" in done.stderr or "Cannot allocate memory" in done.stderr


async def test_limits_are_not_changed(scene):
    code = (
        "import os, resource as r\n"
        "for name in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE):\n"
        "    for value in (-1, r.getrlimit(name)[1] + 1):\n"
        "        try: r.setrlimit(name, (value, value)); print('done')\n"
        "        except (OSError, ValueError): print('denied')\n"
        f"    try: r.prlimit({os.getpid()}, name, (1, 1)); print('done')\n"
        "    except (OSError, ValueError): print('denied')\n"
        "for call in (lambda: os.nice(-5), lambda: os.setuid(0), lambda: os.setsid(),\n"
        "             lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))):\n"
        "    try: call(); print('done')\n    except OSError: print('denied')\n"
    )
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = await scene.attack(code)
    assert done.succeeded, done.stderr
    assert set(done.stdout.split()) == {"denied"}
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    "name", ["ptrace", "bpf", "keyctl", "io_uring_setup", "mount", "unshare", "userfaultfd"]
)
async def test_the_kernels_sharper_tools_are_denied(scene, name):
    numbers = {
        "ptrace": 101,
        "bpf": 321,
        "keyctl": 250,
        "io_uring_setup": 425,
        "mount": 165,
        "unshare": 272,
        "userfaultfd": 323,
    }
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    code = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.syscall({numbers[name]}, 0, 0, 0, 0, 0), ctypes.get_errno() == errno.EPERM)\n"
        f"print(libc.syscall({0x40000000 + numbers[name]}, 0, 0, 0, 0, 0))\n"
    )
    assert (await scene.attack(code)).stdout == "-1 True\n-1\n"


async def test_a_crowd_that_hangs_leaves_the_others_their_turns(scene):
    crowd = [scene.attack("while True: pass", timeout_s=1.0) for _ in range(8)]
    done = await asyncio.gather(*crowd)
    assert all(execution.timed_out for execution in done)


SERVICE = """
import asyncio, sys
from dialoop.sandbox import Sandbox
async def main():
    sandbox = Sandbox(level=sys.argv[1])
    session = sandbox.interpreter()
    await session.run("x = 1")
    work = asyncio.create_task(session.run("while True: pass", timeout_s=600))
    await asyncio.sleep(0.2)
    print(sandbox._pool.forkserver_pid, flush=True)
    await work
asyncio.run(main())
"""


async def test_everything_ends_with_the_service_however_that_dies(scene):
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, scene.level], stdout=subprocess.PIPE, text=True
    )
    with service:
        assert service.stdout
        server = int(await asyncio.to_thread(service.stdout.readline))
        family = [server, *descendants(server)]
        assert len(family) > 1
        service.send_signal(signal.SIGKILL)
    await wait_until_gone(family)


async def test_everything_ends_with_the_fork_server(scene):
    work = asyncio.create_task(scene.sandbox.interpreter().run("while True: pass", timeout_s=60))
    other = Sandbox(level=scene.level)
    session = other.interpreter()
    await session.run("x = 1")
    server = other._pool.forkserver_pid
    family = descendants(server)
    assert family
    os.kill(server, signal.SIGKILL)
    await wait_until_gone(family)
    with contextlib.suppress(Unavailable):  # until the service has noticed
        await session.run("print('again')")
    done = await session.run("print('again')")
    assert done.stdout == "again\n"
    await other.close()
    work.cancel()


LATE_CHILD = """
import os, sys, time
sys.path.append(sys.argv[1])
from confined import forkserver
fork, server = os.fork, os.getpid()
def late():
    pid = fork()
    while not pid and os.getppid() == server:
        time.sleep(0.01)
    return pid
os.fork = late
forkserver.main(int(sys.argv[2]))
"""


@pytest.mark.parametrize("level", [Level.LANDLOCK, Level.RLIMITS])
def test_a_child_that_gets_its_turn_only_after_the_fork_server_ended_ends_too(level):
    if assess(level).missing:
        pytest.skip(f"level {level} is not available here: {assess(level).missing}")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, inside = socket.socketpair()
    folder = Path(dialoop.sandbox.__file__).parent
    words = (sys.executable, "-I", "-c", LATE_CHILD, str(folder), str(theirs.fileno()))
    with ours, channel, subprocess.Popen(words, pass_fds=[theirs.fileno()]) as server:
        theirs.close()
        order = {"spawn": 1, "rules": rules_of(level, LIMITS), "program": None}
        with inside:
            fds = [inside.fileno(), 1, 2]
            socket.send_fds(ours, [json.dumps(order).encode()], fds)
        while not descendants(server.pid):
            time.sleep(0.01)
        server.kill()
        server.wait()
        channel.settimeout(PATIENCE_S)
        assert channel.recv(64) == b""


async def test_a_fork_server_that_ends_is_not_the_codes_failure(scene):
    sandbox = Sandbox(level=scene.level)
    work = asyncio.create_task(sandbox.run("while True: pass", timeout_s=60))
    await asyncio.sleep(0.5)
    os.kill(sandbox._pool.forkserver_pid, signal.SIGKILL)
    with pytest.raises(Unavailable) as failed:
        await work
    assert failed.value.reason == "SANDBOX_FAILED"
    await sandbox.close()
