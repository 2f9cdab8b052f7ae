"""Attack a service again and again while somebody else calls it, and measure what grows.

python -m benchmarks.soak.attacks > soak.json               # five minutes for each of two services
python -m benchmarks.soak.attacks --minutes 30 --times 10   # at their full size
python -m benchmarks.soak.attacks --without "calls that are reset at once"

The attacks are those of tests/hostile/availability, one after the other in turn: on an environment,
bodies of JSON, requests of many messages and floods of frames, on a queue, requests with
trajectories. `idle_mb` is the service's resident memory before the first of them, `peak_mb` the
highest while they went on, and `after_mb` a quarter of a minute after the last. Waits are those of
the other client's calls: `alone` before the first attack, `honest` beside them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from tests.hostile.availability.attacked import RIGHT, Service, service
from tests.hostile.availability.test_memory import attacks_on

SERVICES = {"environment": {"UNREAD_S": "2"}, "replay": {"STORE": "memory"}}
ALONE_S, AFTER_S = 5.0, 15.0


class Caller:
    """Somebody with a token, who calls all the while and notes how long each call took."""

    def __init__(self, service: Service) -> None:
        self.waits_s: list[float] = []
        self.failures: list[str] = []
        self.peak_mb = 0.0
        self._service = service
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def _call(self) -> None:
        path, request = self._service.asked
        with grpc.insecure_channel(self._service.address) as channel:
            ask = channel.unary_unary(path)
            while not self._stop.wait(0.01):
                started = time.perf_counter()
                try:
                    ask(request, metadata=RIGHT, timeout=60)
                except grpc.RpcError as error:
                    self.failures.append(str(error.code()))
                self.waits_s.append(time.perf_counter() - started)
                self.peak_mb = max(self.peak_mb, self._service.memory_mb())

    def end(self) -> None:
        """End the calls."""
        self._stop.set()
        self._thread.join()


def waits_of(waits_s: list[float]) -> dict[str, float]:
    """Return milliseconds of the median, of one in a hundred, and of the longest."""
    waits = sorted(waits_s)
    parts = {"p50": waits[len(waits) // 2], "p99": waits[int(0.99 * (len(waits) - 1))]}
    return {name: round(1000 * wait, 1) for name, wait in {**parts, "most": waits[-1]}.items()}


def soak(role: str, minutes: float, times: int, without: Container[str]) -> dict[str, Any]:
    """Attack one service for so long, and return what was measured."""
    attacks = {k: attack for k, attack in attacks_on(role, times).items() if k not in without}
    settings = SERVICES[role]
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), role, **settings) as own:
        process = psutil.Process(own.process.pid)
        caller = Caller(own)
        time.sleep(ALONE_S)
        alone, caller.waits_s = caller.waits_s, []
        idle_mb, descriptors = own.memory_mb(), process.num_fds()
        begun, num_attacks, mb = time.monotonic(), 0, [idle_mb]
        while (passed := time.monotonic() - begun) < 60 * minutes:
            for attack in attacks.values():
                attack(own)
                num_attacks += 1
            if passed >= len(mb) * 60 * minutes / 10:
                mb.append(own.memory_mb())
        caller.end()
        time.sleep(AFTER_S)
        return {
            "num_attacks": num_attacks,
            "num_honest_calls": len(caller.waits_s),
            "failures": sorted(set(caller.failures)),
            "alone_ms": waits_of(alone),
            "honest_ms": waits_of(caller.waits_s),
            "idle_mb": round(idle_mb, 1),
            "peak_mb": round(caller.peak_mb, 1),
            "mb": [round(each, 1) for each in mb],
            "after_mb": round(own.memory_mb(), 1),
            "descriptors": [descriptors, process.num_fds()],
            "log_bytes": own.log.stat().st_size,
        }


def main() -> None:
    """Print the figures of each service as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--times", type=int, default=1, help="tenths of the attacks' full size")
    parser.add_argument("--without", nargs="*", default=[], help="names of attacks to leave out")
    chosen = parser.parse_args()
    facts = {"processor": processor(), "load_before": os.getloadavg()[0], **vars(chosen)}
    minutes, times, without = chosen.minutes, chosen.times, chosen.without
    print_figures(facts, {role: soak(role, minutes, times, without) for role in SERVICES})


if __name__ == "__main__":
    main()
