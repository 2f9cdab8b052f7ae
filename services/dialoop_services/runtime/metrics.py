"""Prometheus metrics of a service: calls by rpc, server and status, their times, those running."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dialoop.waits import Waits

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


@dataclass(frozen=True, slots=True)
class LabelledCounts(Collector):
    """Growing counts by the values of one label: `dialoop_forks_total{cause="..."}`.

    With `is_gauge` they are values that also fall, and the name gets no `_total`. They are read
    when Prometheus asks for them.
    """

    name: str
    text: str
    label: str
    read: Callable[[], Mapping[str, float]]
    is_gauge: bool = False

    def collect(self) -> Iterator[Metric]:
        """Yield the counts as they are now."""
        kind = GaugeMetricFamily if self.is_gauge else CounterMetricFamily
        family = kind(self.name, self.text, labels=[self.label])
        for value, count in self.read().items():
            family.add_metric([value], count)
        yield family


class _ShownWaits(Collector):
    """Reads what the service waits for when Prometheus asks."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["target", "what", "idle"]
        counts = GaugeMetricFamily("dialoop_waits", "Waits for a target.", labels=labels)
        ages = GaugeMetricFamily(
            "dialoop_wait_seconds", "Age of the oldest wait for a target.", labels=labels
        )
        for wait in self._waits.current():
            values = [wait.target, wait.what, str(wait.is_idle).lower()]
            counts.add_metric(values, wait.count)
            ages.add_metric(values, wait.seconds)
        yield counts
        yield ages


class _Times:
    """How many times fell below each bound and not below the one before, and their sum."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_S) + 1)
        self.seconds = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound with the number of times up to it, as Prometheus wants them."""
        bounds = (*map(floatToGoString, _BUCKETS_S), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


class _Calls(Collector):
    """Counts calls. Prometheus's own counters lock, and take a sixth of the time of a short call.

    All calls of a service run on its event loop, and so do those who ask for the counts.
    """

    def __init__(self) -> None:
        self.running = {"grpc": 0, "rest": 0}
        self.ended: dict[tuple[str, str, str], int] = defaultdict(int)
        self.times: dict[tuple[str, str], _Times] = defaultdict(_Times)

    def collect(self) -> Iterator[Metric]:
        labels = ["rpc", "door", "status"]
        ended = CounterMetricFamily("dialoop_calls", "Calls that have ended.", labels=labels)
        for key, count in self.ended.items():
            ended.add_metric(key, count)
        text = "Time from a call's request to its last answer."
        times = HistogramMetricFamily("dialoop_call_seconds", text, labels=labels[:2])
        for pair, observed in self.times.items():
            times.add_metric(pair, observed.buckets(), observed.seconds)
        running = GaugeMetricFamily("dialoop_calls_running", "Calls in flight.", labels=["door"])
        for server, count in self.running.items():
            running.add_metric([server], count)
        yield from (ended, times, running)


class Metrics:
    """The Prometheus registry of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = _Calls()
        self._registry.register(self._calls)

    def count_start(self, server: str) -> None:
        """Count a call that has begun."""
        self._calls.running[server] += 1

    def count_end(self, rpc: str, server: str, status: str, seconds: float) -> None:
        """Count a call that has ended; `status` is a name such as "OK" or "NOT_FOUND"."""
        calls = self._calls
        calls.running[server] -= 1
        calls.ended[rpc, server, status] += 1
        times = calls.times[rpc, server]
        times.counts[bisect_left(_BUCKETS_S, seconds)] += 1
        times.seconds += seconds

    def show(self, counts: LabelledCounts) -> None:
        """Show counts of another part of the service; they are read at each request."""
        self._registry.register(counts)

    def show_waits(self, waits: Waits) -> None:
        """Show what the service waits for; it is read at each request."""
        self._registry.register(_ShownWaits(waits))

    def exposition(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
