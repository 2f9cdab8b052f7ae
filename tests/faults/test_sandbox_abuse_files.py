"""Code that means harm to files, secrets and the network.

At every isolation level that this machine has; missing levels are skipped with the self-test's
reason (`pytest -rs` prints it). All the while another session is asked, and must answer as fast as
it usually does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from dialoop.sandbox import Level, Sandbox

from tests.support.sandbox_world import LIMITS, scene  # noqa: F401


async def test_the_disk_is_not_filled(scene):
    code = (
        "import os\nfor number in range(1000):\n"
        "    with open(f'/tmp/dialoop-abuse-{number}', 'wb') as file:\n"
        "        for _ in range(64): file.write(bytes(2**20))\n"
    )
    done = await scene.attack(code)
    assert not done.succeeded
    if scene.level is Level.BUBBLEWRAP:
        assert "No space left" in done.stderr or "File too large" in done.stderr
    else:
        assert "PermissionError" in done.stderr
    assert not list(Path("/tmp").glob("dialoop-abuse-*"))


async def test_files_are_counted(scene):
    """Each takes memory of the kernel, which no other limit of a process counts."""
    code = (
        "import os\nnumber = 0\ntry:\n"
        "    for number in range(100_000):\n"
        "        os.close(os.open(f'/tmp/dialoop-abuse-{number}', os.O_CREAT))\n"
        "except OSError as error:\n    print(number, type(error).__name__)\n"
    )
    done = await scene.attack(code)
    if scene.level is Level.BUBBLEWRAP:
        assert done.stdout == f"{LIMITS.max_files - 1} OSError\n"
    else:
        assert done.stdout == "0 PermissionError\n"


async def test_in_namespaces_nothing_tells_what_the_host_has(scene, tmp_path):
    paths = [str(tmp_path), "/etc/passwd", f"/proc/{os.getpid()}"]
    done = await scene.attack(f"import os\nprint(sum(map(os.path.exists, {paths!r})))")
    assert (done.stdout == "0\n") == (scene.level is Level.BUBBLEWRAP)


async def test_memory_files_and_shared_memory_are_denied(scene):
    code = "import os\nfds = [os.memfd_create('x') for _ in range(9)]"
    assert "PermissionError" in (await scene.attack(code)).stderr
    shm = "import ctypes\nprint(ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600))"
    assert (await scene.attack(shm)).stdout == "-1\n"


async def test_no_environment_reaches_it(scene, monkeypatch):
    monkeypatch.setenv("DIALOOP_TOKEN", "very-secret")
    sandbox = Sandbox(level=scene.level, limits=LIMITS)
    code = (
        "import ctypes, os, sys\nfound = [dict(os.environ), sys.argv]\n"
        "for path in ('/proc/self/environ', f'/proc/{os.getppid()}/environ', '/proc/1/environ'):\n"
        "    try: found.append(open(path).read())\n    except OSError: pass\n"
        "libc = ctypes.CDLL(None)\nlibc.getenv.restype = ctypes.c_char_p\n"
        "found.append(libc.getenv(b'DIALOOP_TOKEN'))\nprint(found)\n"
    )
    done = await sandbox.run(code)
    assert done.succeeded
    assert "very-secret" not in done.stdout
    assert "PATH" not in done.stdout
    await sandbox.close()


@pytest.mark.parametrize("kind", ["inet", "inet6", "unix", "abstract", "netlink", "datagram"])
async def test_no_socket_is_opened(scene, kind, tmp_path):
    tmp_path.chmod(0o777)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(str(tmp_path / "socket"))
        local.listen()
        port = listening.getsockname()[1]
        attempts = {
            "inet": f"socket.create_connection(('127.0.0.1', {port}), 1)",
            "inet6": "socket.socket(socket.AF_INET6).connect(('::1', 80))",
            "unix": f"socket.socket(socket.AF_UNIX).connect('{tmp_path / 'socket'}')",
            "abstract": "socket.socket(socket.AF_UNIX).bind('\\0dialoop')",
            "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "datagram": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        }
        done = await scene.attack(f"import socket\n{attempts[kind]}\nprint('connected')")
        assert "connected" not in done.stdout
        assert "PermissionError" in done.stderr
        for server in (listening, local):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()


async def test_host_files_are_not_read(scene, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("very-secret")
    code = (
        f"import os\nfor path in ('/etc/passwd', '/etc/shadow', {str(secret)!r}, '/root/.bashrc',\n"
        f"             '/proc/self/root{secret}', '/etc/ssl/openssl.cnf', '/proc/self/maps'):\n"
        "    try: print(path, open(path).read())\n    except OSError: pass\n"
        "for path in ('/etc', '/root', '/home', '/proc', '/sys'):\n"
        "    try: print(os.listdir(path))\n    except OSError: pass\n"
    )
    done = await scene.attack(code)
    assert done.succeeded
    printed = done.stdout
    if scene.level is Level.BUBBLEWRAP:  # its own /etc, with what was bound into it
        printed = "".join(line for line in printed.splitlines() if "ld.so.cache" not in line)
        assert "passwd" not in printed
    assert "very-secret" not in printed
    assert "root:" not in printed


async def test_symlinks_do_not_lead_out(scene, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("very-secret")
    code = (
        "import os\n"
        f"for target in ({str(tmp_path)!r}, '/proc/1/root{tmp_path}'):\n"
        "    for name in ('/tmp/dialoop-abuse-out', 'out'):\n"
        "        try:\n            os.symlink(target, name)\n"
        "            print(os.listdir(name), open(name + '/secret').read())\n"
        "        except OSError as error: print(type(error).__name__)\n"
        f"        try: os.link({str(tmp_path / 'secret')!r}, name + '2')\n"
        "        except OSError as error: print(type(error).__name__)\n"
        "        try: open(name + '/written', 'w').write('x')\n"
        "        except OSError as error: print(type(error).__name__)\n"
    )
    done = await scene.attack(code)
    assert "secret" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert not os.path.lexists("/tmp/dialoop-abuse-out")


async def test_nothing_is_written_outside(scene, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "kept").chmod(0o666)
    there = str(tmp_path)
    code = (
        "import os\n"
        "def tries():\n"
        f"    yield lambda: open('{there}/new', 'w')\n"
        f"    yield lambda: open('{there}/kept', 'w')\n"
        f"    yield lambda: open('{there}/kept', 'a').write('x')\n"
        f"    yield lambda: os.open('{there}', os.O_TMPFILE | os.O_RDWR)\n"
        f"    yield lambda: os.unlink('{there}/kept')\n"
        f"    yield lambda: os.rename('{there}/kept', '{there}/moved')\n"
        f"    yield lambda: os.truncate('{there}/kept', 0)\n"
        f"    yield lambda: os.mkdir('{there}/folder')\n"
        f"    yield lambda: os.mkfifo('{there}/fifo')\n"
        f"    yield lambda: os.chmod('{there}/kept', 0)\n"
        f"    yield lambda: os.utime('{there}/kept', (0, 0))\n"
        f"    yield lambda: os.setxattr('{there}/kept', 'user.x', b'x')\n"
        "    yield lambda: open('/dialoop-written', 'w')\n"
        "    yield lambda: open('/usr/lib/dialoop-written', 'w')\n"
        "    yield lambda: open('/dev/shm/dialoop-written', 'w')\n"
        "    yield lambda: os.mount if False else os.chroot('/')\n"
        "for attempt in tries():\n"
        "    try: attempt(); print('done')\n"
        "    except OSError: print('denied')\n"
    )
    done = await scene.attack(code)
    assert set(done.stdout.split()) == {"denied"}
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    kept = (tmp_path / "kept").stat()
    assert (kept.st_size, kept.st_mode & 0o777) == (4, 0o666)


async def test_open_files_are_limited(scene):
    done = await scene.attack("import os\nx = [os.dup(1) for _ in range(100)]")
    assert "Too many open files" in done.stderr


async def test_it_holds_no_descriptor_of_the_service(scene):
    tries = "for fd in range(256):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass"
    code = f"import os\n{tries}"
    assert (await scene.attack(code)).stdout.split() == ["0", "1", "2", "3"]


async def test_the_files_of_one_interpreter_are_no_others(scene):
    if scene.level is not Level.BUBBLEWRAP:
        pytest.skip(f"at level {scene.level} there are no files to write")
    session, other = scene.sandbox.interpreter(), scene.sandbox.interpreter()
    assert (await session.run("open('/tmp/dialoop-abuse-mine', 'w').write('x')")).succeeded
    assert (await session.run("print(open('/tmp/dialoop-abuse-mine').read())")).stdout == "x\n"
    assert "FileNotFoundError" in (await other.run("open('/tmp/dialoop-abuse-mine')")).stderr
    assert not Path("/tmp/dialoop-abuse-mine").exists()
