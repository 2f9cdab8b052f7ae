"""System calls for which Python has no function."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)

_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38


def syscall(number: int, *arguments: object) -> int:
    """Make a system call and return its result; OSError when the kernel refuses it."""
    result = int(_LIBC.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, argument: int, pointer: object = None) -> None:
    """Set one property of this process; OSError when the kernel refuses it."""
    more = ctypes.c_ulong(0) if pointer is None else pointer
    zero = ctypes.c_ulong(0)
    if _LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), more, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def limit_files(mount: bytes, max_files: int) -> None:
    """Let a tmpfs of this namespace hold so many files and folders; OSError when refused."""
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_REMOUNT)
    if _LIBC.mount(b"tmpfs", mount, b"tmpfs", flags, b"nr_inodes=%d" % max_files) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
