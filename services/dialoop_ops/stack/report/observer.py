"""Watch a running job: take one snapshot a second from the services themselves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dialoop.clients.channel import Channel, Credentials
from dialoop.clients.inference import InferenceClient, PolicyStatus
from dialoop.clients.replay import ReplayClient, ReplayStats
from dialoop.clients.trainer import Phase, TrainerClient, TrainerStatus
from dialoop.errors import DialoopError

from dialoop_ops.now.rates import SampledRate, TrainedRate
from dialoop_ops.stack.layout import Layout, service_of
from dialoop_ops.stack.processes.processes import total_cpu_s

_DEADLINE_S = 3.0
_CLOCK, _SAVE_S = "clock.json", 1.0


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


class PhaseClock:
    """Wall and CPU seconds of all processes by phase, and sampled tokens, over all starts of a run.

    The run's folder keeps them: a kill loses what was counted since the last second.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _CLOCK
        earlier = _counted_before(self._path)
        self.seconds: dict[str, dict[str, float]] = earlier["seconds_by_phase"]
        self._earlier_tokens = int(earlier["num_sampled_tokens"])
        self.num_sampled_tokens = self._earlier_tokens
        self._wall, self._cpu = time.monotonic(), total_cpu_s()
        self._saved_at = self._wall

    def record(self, phase: str, num_sampled_tokens: int | None = None) -> None:
        """Add everything since the last call to `phase`.

        num_sampled_tokens: since this start; None where it is not known now.
        """
        wall, cpu = time.monotonic(), total_cpu_s()
        is_new = phase not in self.seconds
        entry = self.seconds.setdefault(phase, {"wall_s": 0.0, "cpu_s": 0.0})
        entry["wall_s"] += wall - self._wall
        # A killed process's unread CPU time is lost, so the sum can shrink; never count backwards.
        entry["cpu_s"] += max(0.0, cpu - self._cpu)
        self._wall, self._cpu = wall, cpu
        if num_sampled_tokens is not None:
            self.num_sampled_tokens = self._earlier_tokens + num_sampled_tokens
        if is_new or wall - self._saved_at >= _SAVE_S:
            self._saved_at = wall
            self._save()

    def _save(self) -> None:
        fresh = self._path.with_suffix(".tmp")
        counted = {
            "seconds_by_phase": self.seconds,
            "num_sampled_tokens": self.num_sampled_tokens,
        }
        with suppress(OSError):  # a full disk: what is counted stays in memory, and is tried again
            fresh.write_text(json.dumps(counted), encoding="utf-8")
            fresh.replace(self._path)


def _counted_before(path: Path) -> dict[str, Any]:
    """Return what earlier starts counted; nothing where the disk lost or damaged it."""
    nothing: dict[str, Any] = {"seconds_by_phase": {}, "num_sampled_tokens": 0}
    try:
        counted = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return nothing
    return nothing | (counted if isinstance(counted, dict) else {})


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
