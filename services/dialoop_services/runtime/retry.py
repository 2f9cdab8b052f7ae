"""Waiting for a service that is away: growing pauses with jitter, and an end to it.

await patiently(lambda: client.step(...), Patience(total_s=120))
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dialoop.clients.errors import is_worth_retrying
from dialoop.errors import DialoopError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

SERVICE_AWAY = "SERVICE_AWAY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Pauses of 0.1, 0.2, 0.4, ... up to `longest_s`, each halved at most, for `total_s` in all."""

    total_s: float = 120.0
    first_s: float = 0.1
    longest_s: float = 5.0

    def pause_s(self, attempt: int) -> float:
        """Seconds to wait after failed attempt number `attempt`, from 1."""
        # Jitter, so that those who lost the service together do not return together.
        pause = min(self.longest_s, self.first_s * 2.0 ** min(attempt - 1, 30))
        return pause * random.uniform(0.5, 1.0)


async def patiently(call: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """What `call` returns at last; Unavailable (SERVICE_AWAY) once patience has run out.

    Only for calls that may be repeated; an error that would only repeat itself is raised at once.
    """
    ends_at = time.monotonic() + patience.total_s
    attempt = 0
    while True:
        try:
            return await call()
        except DialoopError as error:
            if not is_worth_retrying(error):
                raise
            attempt += 1
            pause_s = patience.pause_s(attempt)
            if time.monotonic() + pause_s > ends_at:
                raise service_away(error) from error
        await asyncio.sleep(pause_s)


def service_away(error: DialoopError) -> Unavailable:
    """The error of lost patience: nobody's work is to blame."""
    return Unavailable(
        f"No answer within patience: {error.message}",
        reason=SERVICE_AWAY,
        remedy="The work is given back and done when the service is there again.",
    )
