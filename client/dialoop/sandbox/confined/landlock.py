"""Landlock: the process can read only below the named paths, not write or execute or connect.

Structures and constants: include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

from .libc import syscall
from .syscall_numbers import this_machine

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# ABI -> file system rights it knows: execute .. make_sym, then refer, truncate, ioctl_dev.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_FS_RIGHTS = (1 << 16) - 1
_TCP_RIGHTS, _TCP_SINCE = 0b11, 4
_SCOPES, _SCOPES_SINCE = 0b11, 6
_RULE_PATH_BENEATH = 1
_FLAG_VERSION = 1


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Return the kernel's Landlock version; OSError if it is off or unknown."""
    number = this_machine()[1]["landlock_create_ruleset"]
    return syscall(number, None, ctypes.c_size_t(0), ctypes.c_uint32(_FLAG_VERSION))


def restrict(readable: Iterable[str]) -> None:
    """Confine this process for good; ignore paths that do not exist."""
    version, numbers = abi(), this_machine()[1]
    rules = _Ruleset(
        fs=_FS_RIGHTS.get(version, _ALL_FS_RIGHTS),
        net=_TCP_RIGHTS if version >= _TCP_SINCE else 0,
        scoped=_SCOPES if version >= _SCOPES_SINCE else 0,
    )
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _TCP_SINCE else 8
    ruleset = syscall(
        numbers["landlock_create_ruleset"],
        ctypes.byref(rules),
        ctypes.c_size_t(size),
        ctypes.c_uint32(0),
    )
    for path in readable:
        if os.path.exists(path):  # noqa: PTH110 - pathlib is not loaded in here
            _allow(ruleset, path)
    syscall(numbers["landlock_restrict_self"], ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    rule = _PathBeneath(access=_READ_FILE | (_READ_DIR if is_folder else 0), parent_fd=fd)
    syscall(
        this_machine()[1]["landlock_add_rule"],
        ctypes.c_int(ruleset),
        ctypes.c_int(_RULE_PATH_BENEATH),
        ctypes.byref(rule),
        ctypes.c_uint32(0),
    )
    os.close(fd)
