"""The rights that a process gives up before it runs untrusted code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

from .landlock import restrict
from .libc import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, limit_files, prctl, syscall
from .seccomp import install
from .syscall_numbers import this_machine

TYPE_CHECKING = False  # typing takes longer to load than all the rest
if TYPE_CHECKING:
    from typing import Any

_CAPABILITY_VERSION_3 = 0x20080522


def confine(rules: dict[str, Any]) -> None:
    """Restrict limits, capabilities, Landlock and system calls, in this order and for good.

    `dialoop.sandbox.programs.rules_of` makes `rules`. Raise OSError when the kernel refuses a step.
    """
    os.nice(10)  # leave the processor to the service
    with contextlib.suppress(OSError):  # no /proc inside bubblewrap
        _prefer_for_oom_kill()
    _limit(rules)
    if rules["level"] == "bubblewrap":
        limit_files(b"/tmp", rules["max_files"])
    _drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if rules["level"] == "landlock":
        restrict(rules["readable"])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    install(reads=rules["level"] != "rlimits", writes=rules["level"] == "bubblewrap")


def _prefer_for_oom_kill() -> None:
    """Let the kernel kill this process first when memory runs out."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, b"1000")
    os.close(fd)


def _limit(rules: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: rules["max_memory_bytes"],
        resource.RLIMIT_CPU: rules["max_cpu_s"],
        resource.RLIMIT_FSIZE: rules["max_file_bytes"],
        resource.RLIMIT_NOFILE: rules["max_open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NPROC: 1,
    }
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (lower, lower))


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    syscall(this_machine()[1]["capset"], ctypes.byref(header), ctypes.byref(none))
