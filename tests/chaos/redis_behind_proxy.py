"""A Redis that can lose its power, behind a proxy that cuts, delays and swallows what passes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import redis

_POLL_S = 0.05


class RedisBehindProxy:
    """`url` leads through the proxy. The server keeps its file in `folder`."""

    def __init__(
        self,
        program: str,
        folder: Path,
        *,
        appendfsync: str = "always",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._program = program
        self._appendfsync = appendfsync
        self._variables = variables or {}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.proxy = Proxy(self._port)
        self._sizes: list[tuple[float, int]] = []
        self._stopping = threading.Event()
        self._start()
        self._watcher = threading.Thread(target=self._watch_file, daemon=True)
        self._watcher.start()

    @property
    def url(self) -> str:
        """The address for the stack."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._server.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watcher.join()
        self.proxy.close()
        self._server.terminate()
        self._server.wait(30)

    def kill(self) -> None:
        """Kill the server and start it again; its file is whole."""
        self._server.kill()
        self._server.wait()
        self._start()

    def revive(self, *, is_ready: bool = False) -> None:
        """Start the server again if it has ended itself; wait until it answers if asked to."""
        if self._server.poll() is not None:
            self._launch()
        if is_ready:
            self._wait_ready()

    def lose_power(self) -> int:
        """Kill the server, cut what it wrote in the last second, and start it; return the bytes."""
        self._server.kill()
        self._server.wait()
        killed_at = time.monotonic()
        file = self.folder / "appendonly.aof"
        before = [size for at, size in self._sizes if at <= killed_at - 1.0]
        num_lost = file.stat().st_size - (before[-1] if before else 0)
        os.truncate(file, file.stat().st_size - num_lost)
        self._start()
        return num_lost

    def _start(self) -> None:
        self._launch()
        self._wait_ready()

    def _launch(self) -> None:
        options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "aof-load-truncated": "yes",
            "auto-aof-rewrite-percentage": "0",  # so that the file only grows, and can be cut
            "save": "",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._server = subprocess.Popen(
            [self._program, *words], stdout=subprocess.DEVNULL, env=os.environ | self._variables
        )

    def _wait_ready(self) -> None:
        client, deadline = redis.Redis(port=self._port), time.monotonic() + 60.0
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert time.monotonic() < deadline, "Redis does not start"
                if self._server.poll() is not None:
                    self._launch()
                time.sleep(_POLL_S)
        client.close()

    def _watch_file(self) -> None:
        file = self.folder / "appendonly.aof"
        while not self._stopping.wait(_POLL_S):
            if file.exists():
                self._sizes.append((time.monotonic(), file.stat().st_size))


class Proxy:
    """Passes bytes between clients and a port of this machine, as its switches say.

    delay_s: seconds before each piece is passed on. is_half_open: connections stay, nothing passes.
    drops_answers: what the server answers is thrown away, and the connection is cut.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self.delay_s = 0.0
        self.is_half_open = False
        self.drops_answers = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no connection any more, and cut those there are."""
        self._is_closed = True
        self._door.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for pair in tuple(self._pairs):
            for end in pair:
                _shut(end)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                _shut(client)
                continue
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        pair = (client, server)
        self._pairs.add(pair)
        try:
            while self._pass_once(client, server):
                pass
        except (OSError, ValueError):  # another thread has closed one of them
            pass
        finally:
            self._pairs.discard(pair)
            _shut(client)
            _shut(server)

    def _pass_once(self, client: socket.socket, server: socket.socket) -> bool:
        poll = select.poll()  # `select.select` takes no file beyond the 1024th of a process
        for end in (client, server):
            poll.register(end, select.POLLIN)
        ready = {file for file, _ in poll.poll(500)}
        if self.is_half_open:
            time.sleep(_POLL_S)
            return True
        for end in (client, server):
            if end.fileno() not in ready:
                continue
            piece = end.recv(65536)
            if not piece or (end is server and self.drops_answers):
                return False
            if self.delay_s:
                time.sleep(self.delay_s)
            (server if end is client else client).sendall(piece)
        return True


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def stop_for(pid: int, seconds: float) -> None:
    """Stop a process and let it go on."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
