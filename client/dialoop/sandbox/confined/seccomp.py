"""The system call filter, which refuses every call that is not on its list.

It lists allowed calls, since a list of forbidden ones would miss the new calls of later kernels.
Structures and constants: include/uapi/linux/{filter,seccomp,audit}.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from .libc import PR_SET_SECCOMP, prctl
from .syscall_numbers import this_machine


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ALWAYS = _words(
    """
    read write readv writev pread64 pwrite64 close close_range fstat newfstatat stat lstat
    statx lseek mmap mprotect munmap mremap madvise brk rt_sigaction rt_sigprocmask
    rt_sigreturn rt_sigpending sigaltstack poll ppoll select pselect6 epoll_create
    epoll_create1 epoll_ctl epoll_wait epoll_pwait pipe pipe2 dup dup2 dup3 getcwd sched_yield
    sched_getaffinity nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
    getpid gettid getppid getuid geteuid getgid getegid getgroups getpgrp getpgid getsid
    getresuid getresgid getrandom futex set_robust_list rseq set_tid_address exit exit_group
    getrusage times uname sysinfo getrlimit getcpu eventfd2 recvfrom shutdown getsockopt
    getsockname getpeername umask restart_syscall membarrier fsync fdatasync wait4 waitid
    pause fadvise64 flock fstatfs
    """
)
_READS = _words(
    """
    access faccessat faccessat2 getdents64 statfs chdir fchdir
    """
)
_WRITES = _words(
    """
    open openat creat mkdir mkdirat unlink unlinkat rmdir rename renameat renameat2 link
    linkat symlink symlinkat readlink readlinkat truncate ftruncate fallocate chmod fchmod
    fchmodat utime utimes utimensat futimesat copy_file_range sendfile
    """
)

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_O_TMPFILE = 0o20000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _O_TMPFILE
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: none of them reaches a device.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_GETLK F_SETLK F_SETLKW F_DUPFD_CLOEXEC F_GETPIPE_SZ:
# none of them sends a signal to another process or grows a kernel buffer.
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
_PRCTLS = (15, 16)  # PR_SET_NAME, PR_GET_NAME
_AF_UNIX = 1
# SOCK_STREAM, with or without SOCK_NONBLOCK and SOCK_CLOEXEC.
_STREAMS = (1, 1 | 0o4000, 1 | 0o2000000, 1 | 0o2004000)

Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(*, reads: bool, writes: bool) -> None:
    """Filter this process for good; set PR_SET_NO_NEW_PRIVS before."""
    program = filter_program(reads=reads, writes=writes, own_pid=os.getpid())
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed)
    header = _Program(len(program), ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(header))


def filter_program(*, reads: bool, writes: bool, own_pid: int) -> list[Instruction]:
    """Return the filter: `reads` allows opening files for reading, `writes` all file calls."""
    arch, numbers = this_machine()
    names = [*_ALWAYS, *(_READS if reads else ()), *(_WRITES if writes else ())]
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        _refuse(errno.EPERM),
    ]
    for number in sorted(numbers[name] for name in names if name in numbers):
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, body in _conditions(reads=reads, writes=writes, own_pid=own_pid):
        if name in numbers:
            program += [(_JUMP_EQUAL, 0, len(body), numbers[name]), *body]
    return [*program, _refuse(errno.EPERM)]


def _conditions(*, reads: bool, writes: bool, own_pid: int) -> list[tuple[str, list[Instruction]]]:
    """Return checks for calls that are allowed only with some arguments, or refused."""
    no_prlimit_of_others = [*_among(0, (0, own_pid)), *_null(2), (_RETURN, 0, 0, _ALLOW)]
    conditions = [
        ("ioctl", _if_among(1, _IOCTLS)),
        ("fcntl", _if_among(1, _FCNTLS)),
        ("prctl", _if_among(0, _PRCTLS)),
        ("kill", _if_among(0, (own_pid,))),
        ("tkill", _if_among(0, (own_pid,))),
        ("tgkill", _if_among(0, (own_pid,))),
        ("prlimit64", no_prlimit_of_others),
        # asyncio's wake-up uses these. Only streams, since a datagram can go to any socket.
        ("socketpair", [*_among(0, (_AF_UNIX,)), *_if_among(1, _STREAMS)]),
        ("sendto", [*_null(4), (_RETURN, 0, 0, _ALLOW)]),
        # Not EPERM: `shutil.copy2` goes on where a file system has no attributes to copy.
        *((name, [_refuse(errno.ENOTSUP)]) for name in ("listxattr", "llistxattr", "flistxattr")),
    ]
    if writes:
        return conditions
    open_flags = {"open": 1, "openat": 2}
    no_writing = [
        (name, _if_none(flags, _WRITING) if reads else [_refuse(errno.EACCES)])
        for name, flags in open_flags.items()
    ]
    refused = [
        (name, [_refuse(errno.EACCES)])
        for name in (*_WRITES, *(() if reads else _READS))
        if name not in open_flags
    ]
    return conditions + no_writing + refused


def _refuse(code: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


def _among(argument: int, values: Sequence[int]) -> list[Instruction]:
    """Continue if the argument's lower half (the whole of an int) is one of these values."""
    checks: list[Instruction] = [
        (_JUMP_EQUAL, len(values) - index, 0, value & 0xFFFFFFFF)
        for index, value in enumerate(values)
    ]
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *checks, _refuse(errno.EPERM)]


def _if_among(argument: int, values: Sequence[int]) -> list[Instruction]:
    return [*_among(argument, values), (_RETURN, 0, 0, _ALLOW)]


def _if_none(argument: int, bits: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        (_JUMP_ANY, 0, 1, bits),
        _refuse(errno.EACCES),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _null(argument: int) -> list[Instruction]:
    """Continue if both halves of the pointer are null."""
    offset = _ARGUMENTS + 8 * argument
    return [
        (_LOAD, 0, 0, offset),
        (_JUMP_EQUAL, 1, 0, 0),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, offset + 4),
        (_JUMP_EQUAL, 1, 0, 0),
        _refuse(errno.EPERM),
    ]
