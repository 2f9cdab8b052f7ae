"""The start-up self-test of a level: code really tries to break out, and each attempt must fail.

isolation = effective_isolation("auto")
isolation.level                # Level.LANDLOCK, say
isolation.denies               # ("network", "processes", ...), each of them tried at start-up
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path

from dialoop.errors import DialoopError, Unavailable
from dialoop.reasons import Reason
from dialoop.sandbox.levels import AUTO, Assessment, Isolation, Level, parse_level
from dialoop.sandbox.limits import Limits
from dialoop.sandbox.pool import Pool, PoolSize
from dialoop.sandbox.programs import bubblewrap, bubblewrap_program, rules_of

_TIMEOUT_S = 30.0
# The names of the attempts below, in the order of reports.
ATTEMPTS = (
    "network",
    "local sockets",
    "processes",
    "threads",
    "programs",
    "signals",
    "environment",
    "host files",
    "writing outside",
    "file attributes",
    "raising limits",
)
_SIZE = PoolSize(max_running=1, max_interpreters=1, num_spares=0, max_wait_s=_TIMEOUT_S)


def effective_isolation(name: str = AUTO) -> Isolation:
    """Return the named level, or the best of this machine, after a self-test.

    Raise Unavailable (SANDBOX_LEVEL_MISSING) when the test fails; a weaker level never replaces a
    named one. The first call blocks for about 0.2 s.
    """
    wanted = parse_level(name)
    rejected: list[Assessment] = []
    for level in Level if wanted is None else (wanted,):
        assessment = assess(level)
        if not assessment.missing:
            return Isolation(level=level, denies=assessment.denies)
        rejected.append(assessment)
    reasons = "; ".join(f"{a.level}: {a.missing}" for a in rejected)
    raise Unavailable(
        f"The sandbox level '{name}' does not work on this machine ({reasons}).",
        reason=Reason.SANDBOX_LEVEL_MISSING,
        remedy="Install bubblewrap or allow user namespaces, run a kernel with Landlock and "
        "seccomp, or configure a level that this machine has.",
    )


@functools.cache
def assess(level: Level) -> Assessment:
    """Test whether this machine has the level, once per process and on a thread of its own."""
    if not sys.platform.startswith("linux"):
        return Assessment(level=level, missing="only Linux has it")
    if level is Level.BUBBLEWRAP and bubblewrap() is None:
        return Assessment(level=level, missing="there is no bwrap on PATH")
    assessments: list[Assessment] = []
    thread = threading.Thread(target=lambda: assessments.append(asyncio.run(_assess(level))))
    thread.start()
    thread.join()
    return (
        assessments[0] if assessments else Assessment(level=level, missing="the self-test failed")
    )


async def _assess(level: Level) -> Assessment:
    folder = tempfile.mkdtemp(prefix="dialoop-self-test-")
    try:
        (Path(folder) / "secret").write_text("secret")
        return await _attempt(level, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _attempt(level: Level, folder: str) -> Assessment:
    rules = rules_of(level, Limits())
    program = None
    if level is Level.BUBBLEWRAP:
        program = bubblewrap_program(bubblewrap() or "", Limits(), rules)
    pool = Pool(rules, program, _SIZE)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code = _CODE.format(
            folder=folder,
            port=listening.getsockname()[1],
            parent=os.getpid(),
            forkserver=pool.forkserver_pid,
        )
        try:
            worker = await pool.worker()
            execution = await worker.execute(code, _TIMEOUT_S)
            await worker.close()
        except DialoopError as error:
            why = "; ".join(getattr(error, "__notes__", [])) or error.message
            return Assessment(level=level, missing=why)
        finally:
            pool.close()
    return _judge(level, execution.succeeded, execution.stdout, folder)


def _judge(level: Level, succeeded: bool, printed: str, folder: str) -> Assessment:
    lines = printed.splitlines()
    if not succeeded or not lines:
        return Assessment(level=level, missing="code did not run to its end")
    escaped = json.loads(lines[-1])
    if len(list(Path(folder).iterdir())) > 1 and "writing outside" not in escaped:
        escaped.append("writing outside")
    if escaped:
        return Assessment(level=level, missing=f"it does not deny {', '.join(escaped)}")
    return Assessment(level=level, denies=ATTEMPTS)


_CODE = """
import ctypes, json, os, resource, socket, stat, threading
def network():
    socket.create_connection(("127.0.0.1", {port}), 1)
def local_sockets():
    socket.socket(socket.AF_UNIX)
def processes():
    if os.fork() == 0:
        os._exit(0)
def threads():
    threading.Thread(target=int).start()
def programs():
    os.execv("/bin/true", ["/bin/true"])
def signals():
    tried = []
    for pid in ({parent}, {forkserver}, os.getppid()):
        try:
            os.kill(pid, 0)
            tried.append(pid)
        except OSError:
            pass
    if not tried:
        raise OSError
def environment():
    if not set(os.environ) - {{"LC_CTYPE", "PWD"}}:
        raise OSError
def host_files():
    for path in ("/etc/passwd", "{folder}/secret", "/proc/self/environ"):
        try:
            open(path).close()
            return
        except OSError:
            pass
    raise OSError
def writing_outside():
    for path in ("{folder}/written", "/dialoop-written", "/usr/lib/dialoop-written"):
        try:
            open(path, "w").close()
            return
        except OSError:
            pass
    raise OSError
def file_attributes():
    for path in ("{folder}/secret", "/dev/null", os.__file__):
        try:  # the mode that it has: where this succeeds, it does no harm
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode))
            return
        except OSError:
            pass
    raise OSError
def raising_limits():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
escaped = []
for attempt in (network, local_sockets, processes, threads, signals, environment, host_files,
                writing_outside, file_attributes, raising_limits, programs):
    try:
        attempt()
        escaped.append(attempt.__name__.replace("_", " "))
    except (OSError, ValueError, RuntimeError):
        pass
print(json.dumps(escaped))
"""
