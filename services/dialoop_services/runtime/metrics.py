"""Prometheus metrics of a service: calls by rpc, door and status, their times, those in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dialoop.waits import Waits

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledCounts:
    """Growing counts by the values of one label: `dialoop_forks_total{cause="..."}`.

    With `is_gauge` they are values that also fall, and the name gets no `_total`.
    """

    name: str
    text: str
    label: str
    read: Callable[[], Mapping[str, float]]
    is_gauge: bool = False


class _Shown(Collector):
    """Reads counts when Prometheus asks for them."""

    def __init__(self, counts: LabelledCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        kind = GaugeMetricFamily if counts.is_gauge else CounterMetricFamily
        family = kind(counts.name, counts.text, labels=[counts.label])
        for value, count in counts.read().items():
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


class Metrics:
    """The Prometheus registry of one service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "dialoop_calls",
            "Calls that have ended.",
            ["rpc", "door", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "dialoop_call_seconds",
            "Time from a call's request to its last answer.",
            ["rpc", "door"],
            registry=self._registry,
            buckets=_BUCKETS_S,
        )
        self._running = Gauge(
            "dialoop_calls_running", "Calls in flight.", ["door"], registry=self._registry
        )
        self._running_by_door = {door: self._running.labels(door) for door in ("grpc", "rest")}
        # Looking a labelled counter up costs more than counting; one entry per rpc and status.
        self._ended: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}

    def count_start(self, door: str) -> None:
        """Count a call that has begun."""
        self._running_by_door[door].inc()

    def count_end(self, rpc: str, door: str, status: str, seconds: float) -> None:
        """Count a call that has ended; `status` is a name such as "OK" or "NOT_FOUND"."""
        self._running_by_door[door].dec()
        key = (rpc, door, status)
        if key not in self._ended:
            pair = self._calls.labels(*key), self._seconds.labels(rpc, door)
            self._ended[key] = pair
        calls, times = self._ended[key]
        calls.inc()
        times.observe(seconds)

    def show(self, counts: LabelledCounts) -> None:
        """Show counts of another part of the service; they are read at each request."""
        self._registry.register(_Shown(counts))

    def show_waits(self, waits: Waits) -> None:
        """Show what the service waits for; it is read at each request."""
        self._registry.register(_ShownWaits(waits))

    def exposition(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
