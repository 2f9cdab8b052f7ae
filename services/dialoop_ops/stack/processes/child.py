"""Start one process of the stack in a session of its own, and end it with all that it started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from dialoop_services.runtime.access.principals import without_tokens

from dialoop_ops.launch.plan import Needs, RestartRule
from dialoop_ops.stack.processes.processes import kill_members, members

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_ops.stack.processes.guardian import Guardian

PARENT_VARIABLE = "DIALOOP_PARENT_PID"
_GONE_S, _POLL_S = 2.0, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """How to start a service, and how to tell that it is ready and that it is alive.

    `starter` starts one that runs elsewhere; None: on this machine.

    The time for becoming ready does not run while `is_held_up` returns true. A ready service is
    killed and started again when `is_alive`, which gets the seconds that it may take, has found no
    answer for `hang_timeout_s` seconds (0: never).

    ServiceSpec(name="replay", command=("python", "-m", "dialoop_services.replay"), is_ready=...)
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    address: str = ""
    rest_address: str = ""
    is_ready: Callable[[], Awaitable[bool]]
    ready_timeout_s: float = 120.0
    is_held_up: Callable[[], bool] | None = None
    is_alive: Callable[[float], Awaitable[bool]] | None = None
    hang_timeout_s: float = 60.0
    stop_grace_s: float = 20.0
    stop_rank: int = 0
    restart: RestartRule = field(default_factory=RestartRule)
    starter: Starter | None = None


class Process(Protocol):
    """What the supervisor does with a process, wherever that runs."""

    @property
    def pid(self) -> int:
        """Return the id of the process on this machine that stands for it."""

    @property
    def exit_code(self) -> int | None:
        """Return None while it runs; the code is negative when a signal ended it."""

    async def wait(self) -> int:
        """Wait for its end."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """Kill it and all that it started."""


async def stop(process: Process, grace_s: float) -> int:
    """Ask a process to end, kill it after `grace_s`, and return its exit code."""
    process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            return await process.wait()
    except TimeoutError:
        process.kill()
        return await process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """A command to start, in `folder` or the current one; its output is appended to `log`."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    guardian: Guardian
    folder: Path | None = None


Starter = Callable[[StartOrder], Awaitable[Process]]
"""Starts a process, wherever that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where one added process runs, and what gives the place back once it has ended.

    `host` is the address of its machine, `variables` are those for its devices.
    """

    host: str
    starter: Starter
    variables: Mapping[str, str]
    needs: Needs
    give_back: Callable[[], None]


Grow = Callable[[str, Callable[[], None]], Awaitable[Room]]
"""Takes the name of a process, and what to call when it can only go on in another room, since its
machine is gone. Raises Unavailable where there is no room."""


class Child:
    """A running process; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, guardian: Guardian) -> None:
        self._process = process
        self._guardian = guardian
        self._kill_elsewhere: Callable[[], None] | None = None
        guardian.watch(process.pid)

    def also_kill(self, kill: Callable[[], None]) -> None:
        """Call `kill` too when the process is killed, for what it runs on another machine."""
        self._kill_elsewhere = kill

    @classmethod
    async def start(cls, order: StartOrder) -> Self:
        """Start a command on this machine.

        The child writes to the file itself. With a pipe, a killed stack would break the output of
        children that are still shutting down.
        """
        order.log.parent.mkdir(parents=True, exist_ok=True)
        with order.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *order.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=without_tokens(os.environ)
                | dict(order.environment)
                | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
                cwd=order.folder,
            )
        return cls(process, order.guardian)

    @property
    def pid(self) -> int:
        """Return the process id, which is also that of its group and session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return None while the process runs; the code is negative when a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the process to end, then kill what it has left running and wait for that too.

        The kernel may take a moment to end what was killed, and up to `_GONE_S` is waited for it.
        """
        code = await self._process.wait()
        kill_members({self.pid})
        with suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                while members({self.pid}):  # noqa: ASYNC110 - of grandchildren nobody is told
                    await asyncio.sleep(_POLL_S)
        self._guardian.forget(self.pid)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process, which ends its own children."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        if self._kill_elsewhere is not None:
            self._kill_elsewhere()
        kill_members({self.pid})
