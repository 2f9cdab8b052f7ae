"""Measure the registry with many simulated instances that join, renew, leave and are replaced.

python -m benchmarks.fleet.registry_members --instances 1000 --seconds 60

Starts the replay service, and a redis-server for it, in processes of their own. Every instance
renews a lease of 10 s three times in it, as a replica does. Twice a second a seeded schedule joins
a new instance, ends one with a withdrawal, ends one without a word, or starts one again under its
name. Two followers watch the list. At the end the list must be that of the instances that live: a
name that is missing, doubled or of an older epoch fails the run.

Prints one JSON line: calls a second, CPU milliseconds a call of the service and of Redis, how long
a renewal takes, and how long after a join or a withdrawal a follower sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dialoop.clients.channel import Channel
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.errors import DialoopError

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from tests.support.redis_server import RedisServer

RUN, ROLE = "registry", "collector"
LEASE_S, RENEWALS = 10.0, 3
CHANGE_EVERY_S = 0.5


@dataclass
class Fleet:
    """The simulated instances, and what was measured."""

    registry: RegistryClient
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    renewals_s: list[float] = field(default_factory=list)
    changed_at: dict[str, float] = field(default_factory=dict)
    seen_after_s: list[float] = field(default_factory=list)
    num_calls: int = 0
    num_started: int = 0

    def start(self, name: str = "") -> None:
        """Let an instance join, or start one again under its name."""
        if not name:
            self.num_started += 1
            name = f"instance-{self.num_started}"
            self.changed_at[name] = time.monotonic()
        self.tasks[name] = asyncio.create_task(self._live(name))

    async def _live(self, name: str) -> None:
        instance = ServiceInstance(role=ROLE, name=name, address=f"10.0.0.1:{len(name)}")
        epoch = 0
        await asyncio.sleep(0)
        while True:
            began = time.perf_counter()
            joined = await self.registry.announce(
                RUN,
                ServiceInstance(role=ROLE, name=name, address=instance.address, epoch=epoch),
                lease_s=LEASE_S,
            )
            self.renewals_s.append(time.perf_counter() - began)
            self.num_calls += 1
            epoch = self.epochs[name] = joined.epoch
            await asyncio.sleep(LEASE_S / RENEWALS)

    async def end(self, name: str) -> None:
        """End an instance without a word."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])

    async def change(self, choice: random.Random) -> None:
        """Join, leave, die, or start again."""
        kind = choice.choice(("join", "leave", "die", "again"))
        name = choice.choice([name for name in self.tasks if name in self.epochs])
        if kind == "join":
            self.start()
            return
        await self.end(name)
        if kind == "again":
            self.start(name)
            return
        epoch = self.epochs.pop(name)
        if kind == "leave":
            self.changed_at[name] = time.monotonic()
            instance = ServiceInstance(role=ROLE, name=name, epoch=epoch)
            assert await self.registry.withdraw(RUN, instance), name
            self.num_calls += 1

    async def follow(self) -> None:
        """Watch the list, and note when a join or a withdrawal is seen."""
        present: set[str] = set()
        async for instances in self.registry.watch(RUN, ROLE, interval_s=0.5):
            now, names = time.monotonic(), {instance.name for instance in instances}
            for name in present ^ names:
                at = self.changed_at.pop(name, None)
                if at is not None and present:
                    self.seen_after_s.append(now - at)
            present = names

    def require_alive(self) -> None:
        """Raise what an instance's renewal met."""
        for task in self.tasks.values():
            if task.done():
                task.result()


async def measure(options: argparse.Namespace, address: str, pids: list[int]) -> dict[str, object]:
    """Return the figures of one run."""
    choice = random.Random(options.seed)
    async with AsyncExitStack() as exits:
        channel = await exits.enter_async_context(Channel(address))
        fleet = Fleet(RegistryClient(channel))
        for _ in range(options.instances):
            fleet.start()
        while len(fleet.epochs) < options.instances:
            await asyncio.sleep(0.05)
            fleet.require_alive()
        followers = [asyncio.create_task(fleet.follow()) for _ in range(2)]
        await asyncio.sleep(LEASE_S / RENEWALS)
        fleet.renewals_s.clear()
        num_before, cpu, began = fleet.num_calls, [_cpu_s(pid) for pid in pids], time.monotonic()
        while time.monotonic() - began < options.seconds:
            await asyncio.sleep(CHANGE_EVERY_S)
            await fleet.change(choice)
            fleet.require_alive()
        seconds, num_calls = time.monotonic() - began, fleet.num_calls - num_before
        used = [_cpu_s(pid) - before for pid, before in zip(pids, cpu, strict=True)]
        await asyncio.sleep(LEASE_S + 2)  # those that died without a word are forgotten
        listed = [(m.name, m.epoch) for m in await fleet.registry.list_instances(RUN, ROLE)]
        for task in (*followers, *fleet.tasks.values()):
            task.cancel()
        await asyncio.gather(*followers, *fleet.tasks.values(), return_exceptions=True)
    if sorted(listed) != sorted(fleet.epochs.items()):
        wrong = set(listed) ^ set(fleet.epochs.items())
        raise SystemExit(f"The list differs from the instances that live: {sorted(wrong)[:5]}")
    return {
        "instances": options.instances,
        "seconds": round(seconds, 1),
        "calls_per_s": round(num_calls / seconds, 1),
        "service_cpu_ms_per_call": round(1000 * used[0] / num_calls, 3),
        "redis_cpu_ms_per_call": round(1000 * used[1] / num_calls, 3),
        "renewal_p50_ms": round(1000 * statistics.median(fleet.renewals_s), 2),
        "renewal_p99_ms": round(1000 * statistics.quantiles(fleet.renewals_s, n=100)[98], 2),
        "num_changes_seen": len(fleet.seen_after_s),
        "seen_after_p50_s": round(statistics.median(fleet.seen_after_s), 3),
        "seen_after_max_s": round(max(fleet.seen_after_s), 3),
        "list_was_right": True,
    }


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _launch(settings: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dialoop_services.replay"],
        env={**os.environ, **settings},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "address=" in line:
            return process, line.rpartition("address=")[2].strip().rstrip("]")
    raise SystemExit("The replay service did not start.")


def main() -> None:
    """Measure the registry and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder), fsync="everysec")
        redis.start()
        service, address = _launch(
            {"DIALOOP_REPLAY_REDIS_URL": redis.url, "DIALOOP_REPLAY_PORT": "0"}
        )
        try:
            figures = asyncio.run(measure(options, address, [service.pid, redis.pid]))
        except DialoopError as error:
            raise SystemExit(str(error)) from error
        finally:
            service.terminate()
            service.wait()
            redis.stop()
    print_figures({"processor": processor(), "seed": options.seed}, figures, indent=None)


if __name__ == "__main__":
    main()
