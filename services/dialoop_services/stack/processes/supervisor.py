"""Keep the services of a stack running: start, readiness, restart with back-off, orderly end.

async with supervise(log) as supervisor:
    await supervisor.start(redis)              # returns once it is ready
    await supervisor.start(replay)
    ...
# here all of them have ended, the last started first, whatever happened inside
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from dialoop.clients.retry import RetryPolicy
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason

from dialoop_services.stack.processes.child import Child
from dialoop_services.stack.processes.guardian import Guardian

if TYPE_CHECKING:
    from dialoop_services.stack.processes.child import ServiceSpec
    from dialoop_services.stack.processes.log_stream import LogStream

CONFIG_ERROR = 2
"""Exit code of a service with a wrong setting, which a restart cannot help."""

# `_keep` decides what counts as a failure, and how many end the stack. Only the waits are those of
# other retries. They have no jitter, since no two services wait for the same thing.
_RESTARTS, _NO_JITTER = RetryPolicy(first_wait_s=0.5, max_wait_s=15.0), 1.0
_MAX_FAILURES, _MAX_FAILURES_TO_START = 6, 2
_STABLE_S = 60.0
_POLL_S = 0.15


class State(Enum):
    """Where a service is in its life."""

    STARTING = auto()
    READY = auto()
    WAITING_TO_RESTART = auto()
    STOPPING = auto()
    ENDED = auto()


@dataclass(slots=True, kw_only=True)
class Service:
    """A supervised service. Only the task that keeps it running writes it; anyone may read it."""

    spec: ServiceSpec
    state: State = State.STARTING
    child: Child | None = None
    num_restarts: int = 0
    num_failures: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_stopping(self) -> bool:
        """Return whether it has been asked to stop; its end is then no failure."""
        return self.state in (State.STOPPING, State.ENDED)


class Supervisor:
    """The services of a stack, and the tasks that keep them running. `supervise` makes it."""

    def __init__(self, keepers: asyncio.TaskGroup, guardian: Guardian, log: LogStream) -> None:
        self._keepers = keepers
        self._guardian = guardian
        self._log = log
        self._services: dict[str, Service] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def services(self) -> Sequence[Service]:
        """Return all services in the order in which they were started."""
        return tuple(self._services.values())

    async def start(self, spec: ServiceSpec) -> None:
        """Start a service, keep it running from now on, and return once it is ready."""
        service = self._services[spec.name] = Service(spec=spec)
        self._tasks.append(self._keepers.create_task(self._keep(service)))
        await service.ready.wait()

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until the stack stops."""
        self._tasks.append(self._keepers.create_task(work))

    async def stop(self, *names: str) -> None:
        """Stop services one after the other; those that never started or have ended are skipped."""
        for name in names:
            service = self._services.get(name)
            if service is None or service.state is State.ENDED:
                continue
            service.state = State.STOPPING
            if service.child is not None:
                code = await service.child.stop(service.spec.stop_grace_s)
                if code == -9:
                    self._log.say(name, "had to be killed.", style="yellow")
            service.state = State.ENDED

    async def stop_all(self) -> None:
        """Stop everything in the order of the specs' `stop_rank`."""
        for task in self._tasks:
            task.cancel()
        await self.stop(*sorted(self._services, key=lambda n: self._services[n].spec.stop_rank))

    async def run_once(self, name: str, command: tuple[str, ...], **environment: str) -> int:
        """Run a command beside the services to its end, and return its exit code."""
        child = await Child.start(
            command,
            environment=environment,
            log=self._log.path_of(name),
            guardian=self._guardian,
        )
        try:
            return await child.wait()
        finally:
            await child.stop(0.0)

    async def _keep(self, service: Service) -> None:
        while not service.is_stopping:
            started = time.monotonic()
            code = await self._run(service)
            if service.is_stopping:
                return
            was_ready = service.ready.is_set()
            if was_ready and time.monotonic() - started > _STABLE_S:
                service.num_failures = 0
            service.num_failures += 1
            self._require_restartable(service, code, was_ready)
            await self._wait_to_restart(service, code)

    async def _run(self, service: Service) -> int:
        """Start the process, wait until it is ready, then until it ends."""
        spec = service.spec
        service.state = State.STARTING
        started = time.monotonic()
        service.child = child = await Child.start(
            spec.command,
            environment=spec.environment,
            log=self._log.path_of(spec.name),
            guardian=self._guardian,
        )
        if await self._becomes_ready(spec, child) and not service.is_stopping:
            service.state = State.READY
            service.ready.set()
            where = f" at {spec.address}" if spec.address else ""
            where += f", http://{spec.rest_address}" if spec.rest_address else ""
            self._log.say(spec.name, f"ready{where} after {time.monotonic() - started:.1f} s")
        return await child.wait()

    async def _becomes_ready(self, spec: ServiceSpec, child: Child) -> bool:
        try:
            async with asyncio.timeout(spec.ready_timeout_s) as limit:
                while child.exit_code is None:
                    if await spec.is_ready():
                        return True
                    if spec.is_held_up is not None and spec.is_held_up():
                        now = asyncio.get_running_loop().time()
                        limit.reschedule(now + spec.ready_timeout_s)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"{spec.name} was not ready within {spec.ready_timeout_s:g} s.",
                reason=Reason.NOT_READY,
                remedy=f"Read {self._log.path_of(spec.name)}.",
            ) from None
        return False

    def _require_restartable(self, service: Service, code: int, was_ready: bool) -> None:
        name = service.spec.name
        if code == CONFIG_ERROR:
            raise InvalidConfig(self._log.sentence_of(name), reason=Reason.SERVICE_CONFIG)
        limit = _MAX_FAILURES if was_ready else _MAX_FAILURES_TO_START
        if service.num_failures >= limit:
            raise Unavailable(
                f"{name} ended {service.num_failures} times, last with exit code {code}: "
                f"{self._log.last_line(name)}",
                reason=Reason.SERVICE_FAILED,
                remedy=f"Read {self._log.path_of(name)}.",
            )

    async def _wait_to_restart(self, service: Service, code: int) -> None:
        service.state = State.WAITING_TO_RESTART
        service.ready.clear()
        service.num_restarts += 1
        delay = _RESTARTS.wait_s(service.num_failures, _NO_JITTER)
        name = service.spec.name
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f" ({self._log.last_line(name)})" if code > 0 else ""
        self._log.say(name, f"{how}{reason}; starting again in {delay:g} s", style="yellow")
        await asyncio.sleep(delay)


@asynccontextmanager
async def supervise(log: LogStream) -> AsyncIterator[Supervisor]:
    """Yield a supervisor; when the context is left, all its services have ended.

    Raises what ended the stack: InvalidConfig of a service that exits with 2, Unavailable of one
    that keeps failing.
    """
    with Guardian() as guardian:
        supervisor: Supervisor | None = None
        try:
            async with asyncio.TaskGroup() as keepers:
                supervisor = Supervisor(keepers, guardian, log)
                supervisor.run_beside(log.follow())
                yield supervisor
                await supervisor.stop_all()
        finally:
            if supervisor is not None:
                # This stops services when something failed or the stack was cancelled.
                await supervisor.stop_all()
            log.flush()
