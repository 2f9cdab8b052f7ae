"""How long tests wait for what must happen: a guard against hanging, never a measure of speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# A slow machine, or a disk that stalls for seconds, is no failure; pytest's own limit is 300 s.
PATIENCE_S = 60.0


async def until(condition: Callable[[], object], *, every_s: float = 0.005) -> None:
    """Wait for what must happen."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(every_s)
