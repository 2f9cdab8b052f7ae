"""Keep the services of a stack running: start, readiness, liveness, restart, orderly end.

async with supervise(log) as supervisor:
    await supervisor.start(redis)              # returns once it is ready
    await supervisor.start(replay)
    ...
# here all of them have ended, the last started first, whatever happened inside

Its spec's RestartRule says when a service is started again, and what ends the stack instead.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from dialoop.clients.retry import RetryPolicy
from dialoop.clients.tls import rest_scheme
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.reasons import Reason
from dialoop_services.runtime.exit_reason import (
    EXIT_REASON_VARIABLE,
    ExitReason,
    read_exit_reason,
)
from dialoop_services.runtime.process import RESTARTS_VARIABLE

from dialoop_ops.stack.processes.child import Child, Process, ServiceSpec, StartOrder, stop
from dialoop_ops.stack.processes.guardian import Guardian

if TYPE_CHECKING:
    from dialoop_ops.stack.processes.log_stream import LogStream

# Waits between starts have no jitter, since no two services wait for the same thing.
_NO_JITTER = 1.0
_FAILURES_TO_ALARM = 3
_STABLE_S = 60.0
_POLL_S = 0.15
# Several short questions, not one long one: the time in which this process was itself suspended
# then counts as one question without an answer.
_ASK_EVERY_S, _ANSWER_S = 5.0, 10.0


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
    child: Process | None = None
    num_restarts: int = 0
    num_failures: int = 0
    """Ends in a row, since it was last ready for a minute."""
    last_error: str = ""
    """The error of its own by which it ended last, unless that may pass."""
    num_same_ends: int = 0
    """Ends in a row by that error."""
    was_ready: bool = False
    """Whether it was ready at any time."""
    ready_since: float = math.inf
    silent_s: float = 0.0
    """Seconds in which it has answered nothing, up to the newest question."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_stopping(self) -> bool:
        """Return whether it has been asked to stop; its end is then no failure."""
        return self.state in (State.STOPPING, State.ENDED)

    @property
    def is_stable(self) -> bool:
        """Return whether it has been ready for a minute."""
        return time.monotonic() - self.ready_since > _STABLE_S

    @property
    def is_serving(self) -> bool:
        """Return whether it is ready and answers."""
        return self.ready.is_set() and not self.silent_s

    @property
    def alarm(self) -> str:
        """Return what is wrong with it at present; empty if nothing is."""
        if self.silent_s and self.silent_s >= self.spec.hang_timeout_s / 4:
            return f"{self.spec.name} has not answered for {self.silent_s:.0f} s"
        if self.num_failures >= _FAILURES_TO_ALARM and not self.is_stable:
            return f"{self.spec.name} has ended {self.num_failures} times in a row"
        return ""


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

    @property
    def alarms(self) -> tuple[str, ...]:
        """Return a sentence for each service that hangs, or that does not stay up."""
        return tuple(service.alarm for service in self._services.values() if service.alarm)

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
                code = await stop(service.child, service.spec.stop_grace_s)
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
        log = self._log.path_of(name)
        child = await Child.start(
            StartOrder(command=command, environment=environment, log=log, guardian=self._guardian)
        )
        try:
            return await child.wait()
        finally:
            await stop(child, 0.0)

    async def _keep(self, service: Service) -> None:
        while not service.is_stopping:
            end = await self._run(service)
            if service.is_stopping:
                return
            if service.is_stable:
                service.num_failures, service.num_same_ends = 0, min(1, service.num_same_ends)
            service.num_failures += 1
            self._require_restartable(service, end)
            await self._wait_to_restart(service, end)

    async def _run(self, service: Service) -> str:
        """Start the process, wait until it is ready, then until it ends; return how it ended.

        Raises InvalidConfig for exit code 2.
        """
        spec = service.spec
        service.state, service.ready_since, service.silent_s = State.STARTING, math.inf, 0.0
        started = time.monotonic()
        reason_file = self._log.path_of(spec.name).with_suffix(".exit.json")
        reason_file.unlink(missing_ok=True)
        start = spec.starter or Child.start
        order = StartOrder(
            command=spec.command,
            environment={
                **spec.environment,
                EXIT_REASON_VARIABLE: str(reason_file.resolve()),
                RESTARTS_VARIABLE: str(service.num_restarts),
            },
            log=self._log.path_of(spec.name),
            guardian=self._guardian,
            folder=spec.folder,
        )
        service.child = child = await start(order)
        killed = ""
        if await self._becomes_ready(service, child):
            service.state, service.was_ready = State.READY, True
            service.ready_since = time.monotonic()
            service.ready.set()
            where = f" at {spec.address}" if spec.address else ""
            where += f", {rest_scheme()}://{spec.rest_address}" if spec.rest_address else ""
            self._log.say(spec.name, f"ready{where} after {time.monotonic() - started:.1f} s")
            code = await self._until_it_ends(service, child)
            if 0 < spec.hang_timeout_s <= service.silent_s:
                killed = f"did not answer for {spec.hang_timeout_s:g} s and was killed"
        else:
            if child.exit_code is None and not service.is_stopping:
                killed = self._give_up_starting(service, child)
            code = await child.wait()
        reason = read_exit_reason(reason_file)
        own = reason.message if reason is not None and code > 0 and not reason.may_pass else ""
        is_same = bool(own) and own == service.last_error
        service.num_same_ends = service.num_same_ends + 1 if is_same else int(bool(own))
        service.last_error = own
        return killed or self._how_it_ended(spec, code, reason)

    async def _becomes_ready(self, service: Service, child: Process) -> bool:
        """Return False when the process has ended, or its time for becoming ready."""
        spec = service.spec
        try:
            async with asyncio.timeout(spec.ready_timeout_s) as limit:
                while child.exit_code is None and not service.is_stopping:
                    if await spec.is_ready():
                        return True
                    if spec.is_held_up is not None and spec.is_held_up():
                        now = asyncio.get_running_loop().time()
                        limit.reschedule(now + spec.ready_timeout_s)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        return False

    def _give_up_starting(self, service: Service, child: Process) -> str:
        """Kill a process that does not become ready; Unavailable if the service never was."""
        late = f"was not ready within {service.spec.ready_timeout_s:g} s"
        if not service.was_ready:
            name = service.spec.name
            raise Unavailable(
                f"{name} {late}.",
                reason=Reason.NOT_READY,
                remedy=f"Read {self._log.path_of(name)}.",
            )
        child.kill()
        return f"{late} and was killed"

    async def _until_it_ends(self, service: Service, child: Process) -> int:
        """Wait for the process's end, and kill it when it answers nothing for too long."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._kill_if_it_hangs(service, child))
            code = await child.wait()
            watching.cancel()
        return code

    async def _kill_if_it_hangs(self, service: Service, child: Process) -> None:
        spec, limit_s = service.spec, service.spec.hang_timeout_s
        if spec.is_alive is None or not limit_s:
            return
        pause_s, answer_s = min(_ASK_EVERY_S, limit_s / 4), min(_ANSWER_S, limit_s / 4)
        while service.silent_s < limit_s:
            await asyncio.sleep(pause_s)
            started, was_well = time.monotonic(), not service.alarm
            if await spec.is_alive(answer_s):
                service.silent_s = 0.0
                continue
            service.silent_s += pause_s + min(time.monotonic() - started, answer_s)
            if was_well and service.alarm:
                self._log.say(spec.name, f"ALARM: {service.alarm}", style="bold red")
        if not service.is_stopping:
            child.kill()

    def _how_it_ended(self, spec: ServiceSpec, code: int, reason: ExitReason | None) -> str:
        """Return how a process ended, in its own words if it left any."""
        last_line = self._log.last_line(spec.name)
        if code in spec.restart.fatal_exit_codes:
            message = reason.message if reason else last_line
            raise InvalidConfig(message, reason=Reason.SERVICE_CONFIG)
        if code < 0:
            return f"was ended by signal {-code}"
        if code == 0:  # it was told to stop by somebody else, and its log says nothing of an error
            return "ended with exit code 0"
        if reason is not None:
            return f"ended with exit code {code}: {reason.message}"
        return f"ended with exit code {code}; the last line of its log is: {last_line}"

    def _require_restartable(self, service: Service, end: str) -> None:
        rule, name = service.spec.restart, service.spec.name
        if service.num_same_ends >= rule.max_same_ends:
            raise Unavailable(
                f"{name} {end} It did so {service.num_same_ends} times in a row.",
                reason=Reason.SERVICE_FAILED,
                remedy=f"No restart mends it. Read {self._log.path_of(name)}.",
            )
        if service.was_ready or service.num_failures < rule.max_failures_to_start:
            return
        raise Unavailable(
            f"{name} ended {service.num_failures} times before it was ready. At last it {end}",
            reason=Reason.SERVICE_FAILED,
            remedy=f"Read {self._log.path_of(name)}.",
        )

    async def _wait_to_restart(self, service: Service, end: str) -> None:
        service.state = State.WAITING_TO_RESTART
        service.ready.clear()
        service.num_restarts += 1
        service.ready_since, service.silent_s = math.inf, 0.0
        rule = service.spec.restart
        waits = RetryPolicy(first_wait_s=rule.first_wait_s, max_wait_s=rule.max_wait_s)
        delay = waits.wait_s(service.num_failures, _NO_JITTER)
        name = service.spec.name
        self._log.say(name, f"{end}; starting again in {delay:g} s", style="yellow")
        if service.alarm:
            self._log.say(name, f"ALARM: {service.alarm}", style="bold red")
        await asyncio.sleep(delay)


@asynccontextmanager
async def supervise(log: LogStream) -> AsyncIterator[Supervisor]:
    """Yield a supervisor; when the context is left, all its services have ended.

    Raises what ended the stack: InvalidConfig of a service that exits with 2, Unavailable of one
    that never became ready.
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
