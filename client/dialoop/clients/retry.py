"""Wait and try again: the only place that decides when, how often and for how long.

await retry(lambda: client.get_session("s"), RetryPolicy(max_attempts=None, total_s=120))
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from dialoop.clients.errors import DEATHS, is_outage, is_worth_retrying
from dialoop.errors import DialoopError, Unavailable
from dialoop.reasons import Reason

T = TypeVar("T")

SERVICE_AWAY = Reason.SERVICE_AWAY
# These are no outages: the trainer holds the replica's device while its step runs, or the queue has
# no room until groups are trained.
_WAITS = frozenset({Reason.ASLEEP, Reason.STORE_FULL})
_MOST_DOUBLINGS = 30
_MAX_DEATHS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with jitter: 0.1, 0.2, 0.4, ... s, each times a number in [0.5, 1].

    max_attempts: None for as many as the time allows. total_s: how long a service may be away;
    then the call ends with Unavailable (SERVICE_AWAY). A request that fails by itself for so long
    ends with its own error.
    """

    max_attempts: int | None = 6
    first_wait_s: float = 0.1
    max_wait_s: float = 5.0
    total_s: float = math.inf

    def wait_s(self, attempt: int, chance: float | None = None) -> float:
        """Return the seconds between attempt number `attempt` (from 1) and the next.

        `chance` in [0, 1] replaces the random number: 1 is the longest wait.
        """
        longest = min(self.max_wait_s, self.first_wait_s * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS))
        # With jitter, clients that lost the service together do not all return at once.
        return longest * (0.5 + 0.5 * (random.random() if chance is None else chance))


async def retry(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    *,
    within_s: float = math.inf,
    wait_s: Callable[[int], float] | None = None,
) -> T:
    """Call until it succeeds and return the result; `call` must be safe to repeat.

    An error that a retry cannot mend is raised at once. So is the second death of an engine or
    service under the call: it may be the cause, so whoever repeats it further must count. Between
    the two, an outage may last without limit, since a call given up as SERVICE_AWAY would count
    from zero. The last error is raised after
    `max_attempts`, or when the next attempt would begin later than `within_s` from now. `wait_s`
    takes the place of the policy's.
    """
    began_at = available_at = time.monotonic()
    attempt = num_deaths = 0
    while True:
        try:
            return await call()
        except DialoopError as error:
            attempt += 1
            num_deaths += error.reason in DEATHS
            is_last = attempt == policy.max_attempts or num_deaths == _MAX_DEATHS
            if is_last or not is_worth_retrying(error):
                raise
            now = time.monotonic()
            if error.reason in _WAITS | DEATHS or (num_deaths and is_outage(error)):
                available_at = now
            pause_s = (wait_s or policy.wait_s)(attempt)
            if now + pause_s > began_at + within_s:
                raise
            if now + pause_s > available_at + policy.total_s:
                if not is_outage(error):
                    raise
                raise Unavailable(
                    f"No answer within {policy.total_s:g} s: {error.message}",
                    reason=SERVICE_AWAY,
                    remedy="The work goes back and is done when the service is there again.",
                ) from error
        await asyncio.sleep(pause_s)
