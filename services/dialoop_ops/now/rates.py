"""Tokens per second of counts that jump: a replica counts an answer's tokens when the answer ends.

    rate = BurstRate()
    rate.look(0, 0.0, is_idle=True)         # None: one look knows no rate
    rate.look(800, 40.0, is_idle=False)     # 20.0: an answer of 800 tokens has ended
    rate.look(0, 70.0, is_idle=False)       # 20.0: the next one is under way

Answers that begin together end together, so most looks find nothing new, and a rate from one look
to the next would be 0 for most of a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from dialoop.clients.inference import PolicyStatus
from dialoop.clients.trainer import Phase, TrainerStatus

WINDOW_S = 60.0
"""Seconds over which a rate goes at least, once there are so many."""
_LEAST_S = 5.0
"""A shorter time between two jumps may be one burst that two looks saw."""


class _Known(NamedTuple):
    """A count at a moment when it was complete: it had just jumped, or nothing was running."""

    time: float
    num_tokens: int
    is_idle: bool


class BurstRate:
    """The rate of a count from one jump to another, since between jumps nobody knows it.

    It goes from the last jump, or the last look at which nothing was running, back to one that is
    at least `WINDOW_S` older, or else to the oldest one. After a silence longer than that it goes
    to the present moment, so that it falls if nothing ends any more.
    """

    def __init__(self) -> None:
        self._known: deque[_Known] = deque()
        self._count = 0

    def look(self, num_new: int, now: float, *, is_idle: bool) -> float | None:
        """Take what was counted since the look before; return the rate, None while it is unknown.

        is_idle: whether nothing is running that would be counted later.
        """
        self._count += num_new
        known = self._known
        if num_new or is_idle:
            known.append(_Known(now, self._count, is_idle))
        while len(known) > 2 and known[1].time <= known[-1].time - WINDOW_S:
            known.popleft()
        if len(known) < 2:
            return None
        first, last = known[0], known[-1]
        num_tokens, seconds = last.num_tokens - first.num_tokens, last.time - first.time
        is_short = seconds < _LEAST_S and not first.is_idle
        if is_short or not (num_tokens or is_idle):
            return None
        silence = now - last.time
        return num_tokens / max(seconds + silence if silence > seconds else seconds, 1e-3)


class SampledRate:
    """Counts what replicas sample, also over a replica's restart, where its count begins at 0."""

    def __init__(self) -> None:
        self.total = 0
        """All that the replicas have counted, also before the first look."""
        self._counts: dict[str, int] = {}
        self._rate = BurstRate()

    def look(self, replicas: Mapping[str, PolicyStatus | None], now: float) -> float | None:
        """Take the answers of all replicas, None of one that gives none; return tokens/s."""
        answered = {name: policy for name, policy in replicas.items() if policy is not None}
        num_new = 0
        for name, policy in answered.items():
            count, before = policy.num_sampled_tokens, self._counts.get(name)
            is_again = before is not None and before <= count
            new = count - before if before is not None and is_again else count
            self.total += new
            num_new += 0 if before is None else new
            self._counts[name] = count
        is_idle = all(policy.num_requests_running == 0 for policy in answered.values())
        return self._rate.look(num_new, now, is_idle=bool(answered) and is_idle)


class TrainedRate:
    """Counts what train steps train; a step counts with the tokens of the newest one's row."""

    def __init__(self) -> None:
        self._num_steps: int | None = None
        self._rate = BurstRate()

    def look(self, trainer: TrainerStatus | None, now: float) -> float | None:
        """Take the trainer's answer, None if it gives none; return tokens/s."""
        if trainer is None:
            return self._rate.look(0, now, is_idle=False)
        before, self._num_steps = self._num_steps, trainer.num_train_steps
        num_steps = 0 if before is None else max(0, trainer.num_train_steps - before)
        num_tokens = num_steps * int(trainer.metrics.get("train/num_trained_tokens", 0))
        is_idle = trainer.phase is not Phase.TRAINING
        return self._rate.look(num_tokens, now, is_idle=is_idle)
