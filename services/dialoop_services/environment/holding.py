"""What environments hold while the service runs: taken before it listens, watched, given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from dialoop.environments import Environment, Managed

log = logging.getLogger(__name__)

Report = Callable[[bool, str], Awaitable[None]]


@asynccontextmanager
async def held(environments: Iterable[Environment]) -> AsyncIterator[tuple[Environment, ...]]:
    """The environments with all they need; InvalidConfig when one cannot have it."""
    everything = tuple(environments)
    async with AsyncExitStack() as exits:
        for environment in everything:
            if isinstance(environment, Managed):
                await environment.acquire()
                exits.push_async_callback(environment.release)
        yield everything


async def watched(
    environments: Iterable[Environment], report: Report, *, interval_s: float
) -> None:
    """Report, under `environments/<name>`, each managed environment that works or stops working."""
    managed = [e for e in environments if isinstance(e, Managed)]
    said: dict[str, str] = {}
    while True:
        for environment in managed:
            name = f"environments/{environment.name}"
            problem = environment.problem()
            if said.get(name, "") != problem:
                if problem:
                    log.error("%s cannot work: %s", name, problem)
                await report(not problem, name)
                said[name] = problem
        await asyncio.sleep(interval_s)
