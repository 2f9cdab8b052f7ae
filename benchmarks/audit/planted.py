"""Plant faults into simulated rollouts, in both formats, and count how many `dialoop audit` finds.

    python -m benchmarks.audit.planted > planted.json

The faults are those of `tests/support/samples/planted_faults.py`. While the checks were written,
worlds had 12 train steps of 4 groups of 8 episodes. Here the size of the steps, the groups and the
answers, the tasks, the share of tool calls and the lag of the policy are drawn anew for each case,
with seeds that no test uses. A case counts as found where a finding has the fault's name. Clean
worlds are drawn in the same way: each fault that is found there is an alarm.

The exit code is 1 where fewer than 95 % of a fault's cases are found in a format, or on an alarm.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_ops.audit import AuditReport, Claims, audit
from dialoop_ops.audit.audit import CHECKS

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor
from tests.support.samples.planted_faults import (
    PLANTS,
    TRL_PLANTS,
    NothingPlanted,
    engine_faults,
)
from tests.support.samples.rollout_worlds import Run, World, make_run, make_trl_dump

FOUND_AT_LEAST = 0.95
MAX_STALENESS = 4
MOST_DRAWN, FAR = 20, 10_000_000
"""Worlds that are drawn for a case until its fault changes something, and how far their seeds lie
from one another."""

Random = np.random.Generator
Audited = Callable[[Path], AuditReport]


def world_of(random: Random, seed: int, **settings: Any) -> World:
    """Return a world of drawn sizes."""
    drawn = {
        "num_steps": int(random.integers(14, 31)),
        "groups_per_step": int(random.integers(3, 7)),
        "group_size": int(random.choice([6, 10, 12])),
        "two_turns": float(random.uniform(0.25, 0.7)),
        "max_new_tokens": int(random.integers(10, 24)),
        "num_tasks": int(random.integers(7, 30)),
        "lag": int(random.integers(1, 4)),
    }
    return World(seed=seed, **(drawn | settings))


def own(world: World, plant: Any, random: Random) -> Audited:
    """Return the audit of a run of ours."""

    def make_faulty(folder: Path, world: World) -> Run:
        run = make_run(folder, world)
        run.config["collector"]["max_new_tokens"] = world.max_new_tokens
        if plant is not None:
            plant(run, random)
        return run

    def find(folder: Path) -> AuditReport:
        for again in range(MOST_DRAWN):
            with suppress(NothingPlanted):
                drawn = replace(world, seed=world.seed + again * FAR)
                return audit(make_faulty(folder, drawn).write(folder))
        raise NothingPlanted

    return find


def trl(world: World, plant: Any, random: Random) -> Audited:
    """Return the audit of a dump of TRL."""

    def find(folder: Path) -> AuditReport:
        dump = make_trl_dump(folder, world)
        if plant is not None:
            plant(dump, random)
        dump.write(folder, is_parquet=bool(random.random() < 0.5))
        claims = Claims(max_staleness=MAX_STALENESS)
        tokenizer = Tokenizer.from_directory(folder / "model")
        return audit(folder, claims=claims, tokenizer=tokenizer)

    return find


FORMATS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dialoop": (own, PLANTS, {}),
    "trl": (trl, TRL_PLANTS, {"branches": 0.0}),
}


def cases(form: str, count: int, first_seed: int) -> Iterator[tuple[str, str, int, Audited]]:
    """Yield fault, way of planting, seed and the audit of each case; "" is a clean one."""
    make, plants, settings = FORMATS[form]
    seeds = iter(range(first_seed, first_seed + 1_000_000))
    ways = [(fault, plant) for fault, own_plants in plants.items() for plant in own_plants]
    for fault, plant in [*ways, ("", None)]:
        for _ in range(count):
            seed = next(seeds)
            random = np.random.default_rng(seed)
            world = world_of(random, seed, **settings)
            yield fault, getattr(plant, "__name__", "clean"), seed, make(world, plant, random)
    for _ in range(count):
        seed = next(seeds)
        random = np.random.default_rng(seed)
        for fault, engines in engine_faults(random).items():
            for number, engine in enumerate(engines):
                world = world_of(random, seed, **settings, **engine)
                yield fault, f"engine_{number}_{fault}", seed, make(world, None, random)


def measure(form: str, count: int, first_seed: int, only: str) -> dict[str, Any]:
    """Audit every case of a format, or those of a fault and the clean ones.

    Return counts by fault, what was missed, and alarms.
    """
    faults: dict[str, dict[str, int]] = {}
    ways: dict[str, dict[str, int]] = {}
    missed: list[str] = []
    alarms: list[str] = []
    num_clean = 0
    for fault, way, seed, audited in cases(form, count, first_seed):
        if only not in ("", fault) and fault:
            continue
        with tempfile.TemporaryDirectory(prefix="dialoop-planted-") as folder:
            names = {finding.fault for finding in audited(Path(folder)).findings}
        if not fault:
            num_clean += 1
            alarms += [f"{name} {seed}" for name in sorted(names)]
            continue
        for table, key in ((faults, fault), (ways, way)):
            row = table.setdefault(key, {"cases": 0, "found": 0})
            row["cases"] += 1
            row["found"] += fault in names
        if fault not in names:
            missed.append(f"{way} {seed}")
            sys.stderr.write(f"{form}: missed {way} {seed}\n")
    return {
        "faults": faults,
        "ways": ways,
        "missed": missed,
        "clean": num_clean,
        "alarms": alarms,
    }


def main() -> int:
    """Measure both formats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10, help="of each way to plant a fault (10)")
    parser.add_argument("--seed", type=int, default=40_000, help="first seed (40000)")
    parser.add_argument("--fault", default="", choices=["", *CHECKS], help="one of them (all)")
    options = parser.parse_args()
    formats = {form: measure(form, options.cases, options.seed, options.fault) for form in FORMATS}
    rows = [row for result in formats.values() for row in result["faults"].values()]
    holds = all(row["found"] >= FOUND_AT_LEAST * row["cases"] for row in rows)
    holds = holds and not any(result["alarms"] for result in formats.values())
    report = {
        "benchmark": "audit/planted",
        "cores": os.cpu_count(),
        "processor": processor(),
        "options": " ".join(sys.argv[1:]),
        "holds": holds,
    }
    counts = {name: sum(row[name] for row in rows) for name in ("cases", "found")}
    print_figures(report | {"formats": formats}, counts)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
