"""Watch a running job: take one snapshot a second from the services themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from dialoop.clients.channel import Channel, Credentials
from dialoop.clients.inference import InferenceClient, PolicyStatus
from dialoop.clients.replay import ReplayClient, ReplayStats
from dialoop.clients.trainer import Phase, TrainerClient, TrainerStatus
from dialoop.errors import DialoopError

from dialoop_ops.now.rates import SampledRate, TrainedRate
from dialoop_ops.stack.layout import Layout, service_of
from dialoop_ops.stack.processes.processes import total_cpu_s

_DEADLINE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The services' answers at one moment; None for a service that did not answer.

    The rates are those of `dialoop_ops.now.rates`, None while they are unknown.
    """

    status: TrainerStatus | None
    stats: ReplayStats | None
    num_sampled_tokens: int
    sampled_tokens_per_s: float | None
    trained_tokens_per_s: float | None
    alarms: tuple[str, ...] = ()
    """What the supervisor finds wrong with processes."""

    @property
    def phase(self) -> Phase:
        """Return what the trainer is doing; STARTING while it does not answer."""
        return self.status.phase if self.status else Phase.STARTING


@dataclass(slots=True)
class PhaseClock:
    """Wall and CPU seconds of all processes by phase, updated with every snapshot."""

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    _wall: float = field(default_factory=time.monotonic)
    _cpu: float = field(default_factory=total_cpu_s)

    def record(self, phase: str) -> None:
        """Add everything since the last call to `phase`."""
        wall, cpu = time.monotonic(), total_cpu_s()
        entry = self.seconds.setdefault(phase, {"wall_s": 0.0, "cpu_s": 0.0})
        entry["wall_s"] += wall - self._wall
        # A killed process's unread CPU time is lost, so the sum can shrink; never count backwards.
        entry["cpu_s"] += max(0.0, cpu - self._cpu)
        self._wall, self._cpu = wall, cpu


class Observer:
    """Asks the services of a stack for their state; `observing` makes it."""

    def __init__(
        self,
        run: str,
        trainer: TrainerClient,
        replay: ReplayClient,
        replicas: list[InferenceClient],
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._replay = replay
        self._replicas = replicas
        self._sampled = SampledRate()
        self._trained = TrainedRate()

    async def snapshot(self) -> Snapshot:
        """Ask all services at once."""
        status, stats, policies = await asyncio.gather(
            self._status(), self._stats(), asyncio.gather(*map(_policy_of, self._replicas))
        )
        now = time.monotonic()
        replicas = {str(number): policy for number, policy in enumerate(policies)}
        sampled_tokens_per_s = self._sampled.look(replicas, now)
        return Snapshot(
            status=status,
            stats=stats,
            num_sampled_tokens=self._sampled.total,
            sampled_tokens_per_s=sampled_tokens_per_s,
            trained_tokens_per_s=self._trained.look(status, now),
        )

    async def final_stats(self) -> ReplayStats:
        """Return the queue's counts; raise when the replay service does not answer."""
        return await self._replay.get_stats(self._run)

    async def _status(self) -> TrainerStatus | None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._trainer.get_status()
        except (DialoopError, TimeoutError):
            return None

    async def _stats(self) -> ReplayStats | None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await self._replay.get_stats(self._run)
        except (DialoopError, TimeoutError):
            return None


async def _policy_of(replica: InferenceClient) -> PolicyStatus | None:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await replica.get_policy()
    except (DialoopError, TimeoutError):
        return None


@asynccontextmanager
async def observing(layout: Layout) -> AsyncIterator[Observer]:
    """Yield an observer of a stack that is connected until the context is left."""
    credentials = _credentials_of(layout)
    async with AsyncExitStack() as exits:

        async def connect(name: str) -> Channel:
            channel = Channel(layout.address(name), token=credentials(service_of(name)))
            return await exits.enter_async_context(channel)

        yield Observer(
            layout.run_dir.run_id,
            TrainerClient(await connect("trainer")),
            ReplayClient(await connect("replay")),
            [InferenceClient(await connect(name)) for name in layout.replicas],
        )


def _credentials_of(layout: Layout) -> Callable[[str], Credentials]:
    """Return what gives the stack's own proofs for a role; empty tokens where the job has none."""
    if layout.authority is None:
        return lambda role: lambda: ""
    from dialoop_services.runtime.access.tickets import Proofs

    proofs = Proofs(layout.authority.issue(run=layout.run_dir.run_id, role="stack"))
    return lambda role: partial(proofs.to, role)
