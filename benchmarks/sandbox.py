"""Measure a sandboxed call, cold and persistent, beside a bare subprocess in the same run.

python -m benchmarks.sandbox --calls 200 --output benchmarks/results/sandbox.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from dialoop.sandbox import Level, Sandbox
from dialoop.sandbox.self_test import assess

from benchmarks.servers.figures import print_figures

CODE = "print(6 * 7)"


def _quantiles(took_s: list[float]) -> dict[str, float]:
    ordered = sorted(took_s)
    at = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3)
        for name, q in at.items()
    }


def _bare(calls: int) -> dict[str, float]:
    took_s = []
    for _ in range(calls):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True)
        took_s.append(time.perf_counter() - started)
        assert done.stdout == b"42\n"
    return _quantiles(took_s)


async def _time_calls(
    call: Callable[[], Awaitable[str]], calls: int, *, pause_s: float = 0.0
) -> dict[str, float]:
    took_s = []
    for _ in range(calls):
        await asyncio.sleep(pause_s)
        started = time.perf_counter()
        printed = await call()
        took_s.append(time.perf_counter() - started)
        assert printed == "42\n"
    return _quantiles(took_s)


async def _level(level: Level, calls: int) -> dict[str, dict[str, float]]:
    ready, bare = Sandbox(level=level, num_spares=2), Sandbox(level=level, num_spares=0)
    session = bare.interpreter()

    async def from_spares() -> str:
        return (await ready.run(CODE)).stdout

    async def without_spares() -> str:
        return (await bare.run(CODE)).stdout

    async def persistent() -> str:
        return (await session.run(CODE)).stdout

    await ready.start()
    await persistent()
    try:
        return {
            "cold_with_spares": await _time_calls(from_spares, calls, pause_s=0.1),
            "cold_back_to_back": await _time_calls(without_spares, calls),
            "persistent": await _time_calls(persistent, 5 * calls),
        }
    finally:
        await ready.close()
        await bare.close()


async def _measure(calls: int) -> dict[str, object]:
    levels: dict[str, object] = {}
    for level in Level:
        missing = assess(level).missing
        levels[level] = {"missing": missing} if missing else await _level(level, calls)
    return {
        "calls": calls,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "subprocess_run": _bare(calls),
        "levels": levels,
    }


def main() -> None:
    """Measure every level this machine has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print_figures({}, figures := asyncio.run(_measure(options.calls)))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
