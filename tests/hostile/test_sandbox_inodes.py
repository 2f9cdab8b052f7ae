"""Code that means to change a file of the host without writing to it: its mode, owner, times.

At every level, by a service of root and by one of a user. Attempts on what belongs to the machine
set what is already there, so they do no harm where they succeed: the change time tells. The others
are on files of the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from dialoop.sandbox import Level, Sandbox
from dialoop.sandbox.limits import Limits
from dialoop.sandbox.programs import rules_of
from dialoop.sandbox.self_test import assess

from tests.support.sandbox_world import descendants
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
SERVICE = """
import asyncio, sys
from dialoop.errors import Unavailable
from dialoop.sandbox import Sandbox
async def main(level, lent, code):
    try:
        sandbox = Sandbox(level=level, packages=(lent,), num_spares=0)
    except Unavailable as error:
        sys.exit(f"missing: {error.message}")
    done = await sandbox.run(sys.stdin.read(), timeout_s=60)
    print(done.stdout, end="")
    await sandbox.close()
    if not done.succeeded:
        sys.exit(done.stderr)
asyncio.run(main(*sys.argv[1:], ""))
"""
ATTEMPTS = """
import ctypes, json, os, stat
libc = ctypes.CDLL(None, use_errno=True)
succeeded, seen, wait = [], [], os.O_NONBLOCK
is_x86 = os.uname().machine == "x86_64"
def call(number, *words):
    if libc.syscall(ctypes.c_long(number), *words) < 0:
        raise OSError(ctypes.get_errno(), "")
def on_path(path, is_own):
    now = os.lstat(path)
    mode, times = stat.S_IMODE(now.st_mode), (now.st_atime_ns, now.st_mtime_ns)
    name, here, zeros = os.fsencode(path), -100, ctypes.create_string_buffer(64)
    beside = path + ("/" if stat.S_ISDIR(now.st_mode) else "-")
    yield "chmod", lambda: os.chmod(path, mode)
    yield "fchmodat2", lambda: call(452, here, name, mode, 0x100)
    yield "chown", lambda: os.chown(path, now.st_uid, now.st_gid)
    yield "chown -1", lambda: os.chown(path, -1, -1)
    yield "lchown", lambda: os.lchown(path, now.st_uid, now.st_gid)
    yield "utime", lambda: os.utime(path, ns=times)
    yield "lutime", lambda: os.utime(path, ns=times, follow_symlinks=False)
    yield "removexattr", lambda: os.removexattr(path, "user.dialoop")
    yield "lremovexattr", lambda: os.removexattr(path, "user.dialoop", follow_symlinks=False)
    yield "removexattrat", lambda: call(466, here, name, 0, b"user.dialoop")
    if os.path.exists(path) and (is_own or stat.S_ISCHR(now.st_mode)):
        yield "utime now", lambda: os.utime(path)
        yield "truncate", lambda: os.truncate(path, now.st_size // 2)
        yield "setxattr", lambda: os.setxattr(path, "user.dialoop", b"x")
        if is_x86:
            yield "old utime", lambda: call(132, name, None)
            yield "utimes", lambda: call(235, name, None)
            yield "futimesat", lambda: call(261, here, name, None)
    if is_own:
        yield "chmod 0", lambda: os.chmod(path, 0)
        yield "utime 0", lambda: os.utime(path, (0, 0))
        yield "setxattrat", lambda: call(463, here, name, 0, b"user.dialoop", zeros, 16)
        yield "file_setattr", lambda: call(469, here, name, zeros, 24, 0)
        yield "link", lambda: os.link(path, path + "-link", follow_symlinks=False)
        yield "link into", lambda: os.link(path, "/tmp/dialoop-link", follow_symlinks=False)
        yield "symlink", lambda: os.symlink("x", beside + "symlink")
        yield "mkdir", lambda: os.mkdir(beside + "folder")
        yield "mknod", lambda: os.mknod(beside + "node", 0o600 | stat.S_IFIFO)
        yield "rename", lambda: os.rename(path, path + "-renamed")
        yield "write", lambda: os.write(os.open(path, wait | os.O_WRONLY), b"x")
        yield "append", lambda: os.write(os.open(path, wait | os.O_APPEND | os.O_WRONLY), b"x")
        yield "empty", lambda: os.open(path, wait | os.O_WRONLY | os.O_TRUNC)
        yield "create", lambda: os.open(beside + "new", os.O_CREAT | os.O_WRONLY)
        how = (ctypes.c_uint64 * 3)(wait | os.O_WRONLY)
        yield "openat2", lambda: call(437, here, name, how, 24)
        yield "unlink", lambda: os.unlink(path)
        yield "rmdir", lambda: os.rmdir(path)
def on_descriptor(fd, is_own):
    now = os.fstat(fd)
    mode, times = stat.S_IMODE(now.st_mode), (now.st_atime_ns, now.st_mtime_ns)
    zeros = ctypes.create_string_buffer(64)
    yield "fchmod", lambda: os.fchmod(fd, mode)
    yield "fchmodat2", lambda: call(452, fd, b"", mode, 0x1000)
    yield "fchown", lambda: os.fchown(fd, now.st_uid, now.st_gid)
    yield "fchownat", lambda: call(260 if is_x86 else 54, fd, b"", -1, -1, 0x1000)
    yield "futimens", lambda: os.utime(fd, ns=times)
    yield "fremovexattr", lambda: os.removexattr(fd, "user.dialoop")
    yield "chmod by proc", lambda: os.chmod(f"/proc/self/fd/{fd}", mode)
    if is_own or stat.S_ISCHR(now.st_mode):
        yield "futimens now", lambda: os.utime(fd)
        yield "fsetxattr", lambda: os.setxattr(fd, "user.dialoop", b"x")
        yield "ftruncate", lambda: os.ftruncate(fd, now.st_size // 2)
        yield "fallocate", lambda: os.posix_fallocate(fd, 0, now.st_size + 1)
    if is_own:
        yield "fchmod 0", lambda: os.fchmod(fd, 0)
        for number in (0x40086602, 0x401C5820):  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
            ioctl = 16 if is_x86 else 29
            yield f"ioctl {number:x}", lambda n=number: call(ioctl, fd, ctypes.c_ulong(n), zeros)
        yield "io_uring", lambda: call(425, 8, (ctypes.c_uint32 * 30)())
        yield "link of descriptor", lambda: os.link(f"/proc/self/fd/{fd}", "/tmp/dialoop-fd")
def attempt(what, calls):
    for name, tried in calls:
        try:
            tried()
            succeeded.append(f"{name} {what}")
        except OSError:
            pass
for path, is_own in TARGETS:
    try:
        os.lstat(path)
    except OSError:
        continue
    seen.append(path)
    for flags in (wait, os.O_PATH, os.O_PATH | os.O_NOFOLLOW):
        try:
            fd = os.open(path, flags)
        except OSError:
            continue
        attempt(path, on_descriptor(fd, is_own))
        os.close(fd)
    attempt(path, on_path(path, is_own))
print(json.dumps([seen, succeeded]))
for fd in range(4):
    attempt(fd, on_descriptor(fd, False))
    os.fstat(fd)
"""


def _inode(path: Path) -> tuple[object, ...]:
    """Return what calls could change; the access time alone is every reader's to change."""
    now = path.lstat()
    names = os.listxattr(path, follow_symlinks=False)
    attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    kept = (now.st_mode, now.st_uid, now.st_gid, now.st_nlink, now.st_size, now.st_rdev)
    return (*kept, now.st_mtime_ns, now.st_ctime_ns, attributes)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user reaches, and whose files every user may write."""
    made = Path(tempfile.mkdtemp(prefix="dialoop-inodes-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def _fill(folder: Path, owner: int) -> list[Path]:
    """Make the worst case: files that the service owns and all may write, and a device."""
    folder.mkdir()
    made = [folder, *(folder / name for name in ("file", "inner", "inner/file", "link", "pipe"))]
    (folder / "inner").mkdir()
    (folder / "file").write_text("file")
    (folder / "inner/file").write_text("file")
    (folder / "link").symlink_to("file")
    os.mkfifo(folder / "pipe")
    with suppress(PermissionError):  # what root alone may, and not in every container
        os.mknod(folder / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        made.append(folder / "null")
    for path in made:
        os.chown(path, owner, owner, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)
    return made


def _to_reach(paths: list[Path], spare: Path) -> list[str]:
    """Return commands that let everybody reach `paths`, in their mount namespace alone."""
    closed = {
        path: next(p for p in reversed(path.parents) if not p.stat().st_mode & stat.S_IXOTH)
        for path in paths
        if not all(p.stat().st_mode & stat.S_IXOTH for p in path.parents)
    }
    kept = {path: spare / str(number) for number, path in enumerate(closed)}
    return [
        *(f"mkdir -p {kept[path]}; mount --rbind {path} {kept[path]}" for path in closed),
        *(f"mount -t tmpfs -o mode=755 none {cover}" for cover in set(closed.values())),
        *(f"mkdir -p {path}; mount --rbind {kept[path]} {path}" for path in closed),
    ]


def _as_nobody(folder: Path) -> list[str]:
    """Return what goes before a command of root's, so that a user runs it."""
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    reach = _to_reach([path.resolve() for path in needed], folder / "spare")
    user = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    if not reach:
        return user
    script = "; ".join(("set -e", "umask 022", *reach, 'exec "$@"'))
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *user]


@pytest.mark.parametrize("who", ["root", "user"])
@pytest.mark.parametrize("level", list(Level))
def test_no_call_changes_an_inode_of_the_host(level: Level, who: str, folder: Path) -> None:
    if who == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    is_lowered = who == "user" and os.geteuid() == 0
    lent, near = folder / "lent", folder / "near"
    own = [path for made in (lent, near) for path in _fill(made, NOBODY if is_lowered else -1)]
    readable = rules_of(level, Limits())["readable"]
    machines = ("/", "/dev", "/etc", "/usr", "/etc/passwd", os.__file__, json.__file__)
    shared = [Path(path) for path in (*DEVICES, *readable, *machines) if Path(path).exists()]
    targets = [(str(p), False) for p in shared] + [(str(p), True) for p in own]
    before = {path: _inode(path) for path in (*shared, *own)}
    command = [sys.executable, "-c", SERVICE, level, str(lent)]
    ended = subprocess.run(
        [*(_as_nobody(folder) if is_lowered else []), *command],
        input=f"TARGETS = {targets!r}\n{ATTEMPTS}",
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
    )
    if ended.stderr.startswith(("missing:", "unshare:")) and "not deny" not in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stderr
    seen, succeeded = json.loads(ended.stdout)
    assert str(lent / "file") in seen
    assert (str(near / "file") in seen) is (level is not Level.BUBBLEWRAP)
    assert succeeded == []
    after = {path: _inode(path) for path in (*shared, *own)}
    assert after == before


MOUNTS = re.compile(r"^\S+ \S+ \S+ \S+ (?P<where>\S+) (?P<flags>\S+) ", re.MULTILINE)


async def test_every_mount_of_bubblewrap_but_its_own_tmp_is_read_only(tmp_path):
    if assess(Level.BUBBLEWRAP).missing:
        pytest.skip(assess(Level.BUBBLEWRAP).missing)
    sandbox = Sandbox(level="bubblewrap", num_spares=0, packages=(str(tmp_path),))
    session = sandbox.interpreter()
    await session.run("x = 1")
    inside = descendants(sandbox._pool.forkserver_pid)[-1]
    mounts = Path(f"/proc/{inside}/mountinfo").read_text()
    await session.close()
    await sandbox.close()
    flags = {row["where"]: row["flags"].split(",") for row in MOUNTS.finditer(mounts)}
    assert {"/", "/tmp", str(tmp_path), "/dialoop/confined"} <= flags.keys()
    assert [where for where in flags if "ro" not in flags[where]] == ["/tmp"]
    # Not even a device in a folder that somebody lends can be used; the first mount has none.
    assert [where for where in flags if "nodev" not in flags[where]] in ([], ["/"])


async def test_code_may_do_with_its_own_files_what_it_likes():
    if assess(Level.BUBBLEWRAP).missing:
        pytest.skip(assess(Level.BUBBLEWRAP).missing)
    sandbox = Sandbox(level="bubblewrap")
    code = (
        "import os, pathlib, secrets, shelve, shutil, stat, tarfile, tempfile\n"
        "os.makedirs('a/b')\n"
        "path = pathlib.Path('a/b/file')\n"
        "path.write_bytes(os.urandom(4) + secrets.token_bytes(4))\n"
        "path.chmod(0o600)\n"
        "os.utime(path, (1, 2))\n"
        "shutil.copytree('a', 'copy')\n"
        "with tarfile.open('tar', 'w') as made: made.add('copy')\n"
        "with tarfile.open('tar') as made: made.extractall('out')\n"
        "now = os.stat('out/copy/b/file')\n"
        "print(stat.S_IMODE(now.st_mode) == 0o600, now.st_mtime, now.st_size)\n"
        "with shelve.open('shelf') as shelf: shelf['x'] = 1\n"
        "shutil.rmtree('copy')\n"
        "with tempfile.TemporaryDirectory() as folder: shutil.copy2(path, folder)\n"
    )
    done = await sandbox.run(code)
    await sandbox.close()
    assert (done.stdout, done.stderr) == ("True 2.0 8\n", "")


# push rbx; mov ebx, edi; mov ecx, esi; mov eax, 15 (chmod of 32 bits); int 0x80; pop rbx; ret
CHMOD_32 = bytes.fromhex("53 89fb 89f1 b80f000000 cd80 5b c3")


@pytest.mark.parametrize("level", list(Level))
async def test_the_calls_of_32_bits_are_no_way_around(level, folder):
    if os.uname().machine != "x86_64":
        pytest.skip("the machine code is that of x86_64")
    if assess(level).missing:
        pytest.skip(assess(level).missing)
    victim = folder / "file"
    victim.touch(0o666)
    before = _inode(victim)
    code = (
        "import ctypes, mmap, os\n"
        "low = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, 7)\n"
        f"low.write({CHMOD_32!r}.ljust(64) + {os.fsencode(victim)!r})\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(low))\n"
        "chmod = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(at)\n"
        "print('here', flush=True)\n"
        "print(chmod(at + 64, 0))\n"
    )
    sandbox = Sandbox(level=level, packages=(str(folder),))
    done = await sandbox.run(code)
    await sandbox.close()
    assert done.ended
    assert done.stdout == "here\n"
    assert "SIGSYS" in done.stderr or "SIGSEGV" in done.stderr  # without calls of 32 bits
    assert _inode(victim) == before
