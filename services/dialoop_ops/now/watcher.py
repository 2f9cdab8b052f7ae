"""Ask all services of a stack for their state, at once and as often as the caller wants.

A `Watcher` gets the stack that `find_stack` returns for a run's directory. While its context is
open, each `look` returns the state of that moment.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Self, TypeVar

import grpc
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient, PolicyStatus
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.clients.replay import ReplayClient, ReplayStats
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.tls import open_channel
from dialoop.clients.trainer import TrainerClient
from dialoop.errors import DialoopError
from dialoop.running_stacks import Stack, read_announcement
from dialoop.waits import Wait

from dialoop_ops.now.blocked import blocked_by
from dialoop_ops.now.rates import SampledRate
from dialoop_ops.now.snapshot import SERVING, Now, ServiceNow

Check = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

T = TypeVar("T")

_TIMEOUT_S = 3.0
_LOOKS = 60
"""Looks of which a replica's busy share is; they are a second apart."""
# grpc.health.v1.HealthCheckResponse with status SERVING, as it travels.
_SERVING_ANSWER = b"\x08\x01"
_WAIT = re.compile(
    r'^dialoop_wait(?P<kind>s|_seconds)\{idle="(?P<idle>\w+)",target="(?P<target>[^"]*)",'
    r'what="(?P<what>[^"]*)"\} (?P<value>\S+)$',
    re.MULTILINE,
)


class Watcher:
    """Looks at one stack while its context is open; it remembers since when a service is silent."""

    def __init__(self, stack: Stack, *, token: str = "") -> None:
        self.stack = stack
        self._token = token
        self._exits = AsyncExitStack()
        self._served_at: dict[str, float] = {}
        self._sampled = SampledRate()
        self._had_requests: dict[str, deque[bool]] = {}

    async def __aenter__(self) -> Self:
        self.stack.require_own(self._token)
        self._health = {
            name: await self._exits.enter_async_context(open_channel(address))
            for name, address in self.stack.addresses.items()
        }
        self._channels = {
            name: await self._exits.enter_async_context(
                Channel(address, token=self._token, retry=RetryPolicy(max_attempts=1))
            )
            for name, address in self.stack.addresses.items()
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def look(self, processes: Mapping[str, Mapping[str, object]] | None = None) -> Now:
        """Ask everybody; whoever does not answer within three seconds is None or silent.

        `processes`: what the supervisor says of each process; None reads stack.json again.
        """
        names = list(self.stack.addresses)
        of_processes = self._processes() if processes is None else processes
        async with asyncio.TaskGroup() as asking:
            begin = asking.create_task
            healths = {name: begin(self._health_of(name)) for name in names}
            waits = {name: begin(self._waits_of(name)) for name in names}
            trainer = begin(self._ask("trainer", lambda c: TrainerClient(c).get_status()))
            queue = begin(self._ask("replay", self._stats))
            instances = begin(self._ask("replay", self._instances))
            policies = {
                name: begin(self._ask(name, lambda c: InferenceClient(c).get_policy()))
                for name in names
                if name.partition("-")[0] == "inference"
            }
        now = time.monotonic()
        health_of = {name: task.result() for name, task in healths.items()}
        for name in of_processes.keys() - health_of.keys():  # Redis, or a stack that starts
            state = str(of_processes[name].get("state", ""))
            health_of[name] = SERVING if state == "ready" else state.replace("_", " ")
        silent = self._silences(health_of, now)
        waits_of = {name: task.result() for name, task in waits.items()}
        answers = {name: task.result() for name, task in policies.items()}
        return Now(
            time=time.time(),
            services=tuple(
                ServiceNow(
                    name=name,
                    address=self.stack.addresses.get(name, ""),
                    rest_address=self.stack.rest.get(name, ""),
                    health=health,
                    silent_s=silent.get(name, 0.0),
                    incarnation=_incarnation_of(
                        self.stack.addresses.get(name, ""),
                        of_processes.get(name, {}),
                        instances.result() or (),
                    ),
                    process=of_processes.get(name, {}),
                    waits=waits_of.get(name, ()),
                )
                for name, health in health_of.items()
            ),
            trainer=trainer.result(),
            queue=queue.result(),
            replicas={name: policy for name, policy in answers.items() if policy is not None},
            sampled_tokens_per_s=self._sampled.look(answers, now),
            busy_shares=self._shares_busy(answers),
            blocked=blocked_by(
                waits_of,
                silent=silent,
                names={address: name for name, address in self.stack.addresses.items()},
                stats=queue.result(),
            ),
        )

    def _silences(self, healths: Mapping[str, str], now: float) -> dict[str, float]:
        """Return for how long each service that does not serve has been so."""
        silent = {}
        for name, health in healths.items():
            if health == SERVING:
                self._served_at[name] = now
            else:
                silent[name] = now - self._served_at.setdefault(name, now)
        return silent

    def _shares_busy(self, replicas: Mapping[str, PolicyStatus | None]) -> dict[str, float]:
        """Return for each replica the share of the last looks at which it had requests."""
        for name, policy in replicas.items():
            looks = self._had_requests.setdefault(name, deque(maxlen=_LOOKS))
            if policy is not None:
                looks.append(policy.num_requests_running > 0)
        return {
            name: sum(looks) / len(looks) for name, looks in self._had_requests.items() if looks
        }

    def _processes(self) -> Mapping[str, Mapping[str, object]]:
        announced = read_announcement(self.stack.run_dir, self.stack.pid)
        return announced.processes if announced else {}

    async def _stats(self, channel: Channel) -> ReplayStats:
        return await ReplayClient(channel).get_stats(self.stack.run_id)

    async def _instances(self, channel: Channel) -> tuple[ServiceInstance, ...]:
        return await RegistryClient(channel).list_instances(self.stack.run_id)

    async def _ask(self, name: str, ask: Callable[[Channel], Awaitable[T]]) -> T | None:
        """Return a service's answer; None if it gives none in time."""
        if name not in self._channels:
            return None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await ask(self._channels[name])
        except (DialoopError, TimeoutError):
            return None

    async def _health_of(self, name: str) -> str:
        check: Check = self._health[name].unary_unary("/grpc.health.v1.Health/Check")
        try:
            answer = await check(b"", timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return "does not answer"
        return SERVING if answer == _SERVING_ANSWER else "is not ready"

    async def _waits_of(self, name: str) -> tuple[Wait, ...]:
        address = self.stack.rest.get(name)
        if address is None:
            return ()
        text = await asyncio.to_thread(_metrics_of, address, self._token)
        return _waits_in(text)


def _incarnation_of(
    address: str, process: Mapping[str, object], instances: Iterable[ServiceInstance]
) -> str:
    """Return which life of a service answers: its epoch, or else the number of its process.

    An address that two instances claim is of the newer one.
    """
    epochs = [instance.epoch for instance in instances if address and instance.address == address]
    if epochs:
        return f"epoch {max(epochs)}"
    restarts = process.get("num_restarts")
    return f"process {restarts + 1}" if isinstance(restarts, int) else ""


def _metrics_of(address: str, token: str) -> str:
    """Return a service's metrics as text; empty where it does not answer."""
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == http.HTTPStatus.OK else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def _waits_in(metrics: str) -> tuple[Wait, ...]:
    """Return the waits that a service's metrics show."""
    values: dict[tuple[str, str, str], dict[str, float]] = {}
    for match in _WAIT.finditer(metrics):
        key = (match["target"], match["what"], match["idle"])
        values.setdefault(key, {})[match["kind"]] = float(match["value"])
    return tuple(
        Wait(
            target=target,
            what=what,
            is_idle=idle == "true",
            seconds=numbers.get("_seconds", 0.0),
            count=round(numbers.get("s", 1.0)),
        )
        for (target, what, idle), numbers in values.items()
    )
