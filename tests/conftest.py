"""Says which tests a run leaves out or skips, and why; no example has a deadline."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import hypothesis
import pytest

# Before torch is imported, and for every process that tests start: on tiny models OpenMP's threads
# would burn ten times the CPU of the work while they wait for each other. As many as ever compute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


class _LeftOut:
    """A line for each file and reason, above the failures: those end a log of limited length."""

    def __init__(self) -> None:
        self._heavy: Counter[tuple[str, str]] = Counter()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            marker = item.get_closest_marker("heavy")
            if marker is not None:
                reason = marker.kwargs.get("reason", "it takes minutes")
                self._heavy[item.nodeid.partition("::")[0], reason] += 1

    def pytest_report_collectionfinish(self) -> list[str]:
        if not self._heavy:
            return []
        return [
            f"{self._heavy.total()} heavy tests left out: make test-heavy",
            *_lines(self._heavy),
        ]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, None, None]:
        skipped = Counter(
            (report.nodeid.partition("::")[0], _why(report))
            for report in terminalreporter.stats.get("skipped", [])
        )
        if skipped:
            terminalreporter.section(f"{skipped.total()} tests skipped")
            terminalreporter.write_line("\n".join(_lines(skipped)))
        return (yield)


def _why(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def _lines(counted: Counter[tuple[str, str]]) -> list[str]:
    return [f"{file}: {num} ({why})" for (file, why), num in counted.items()]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_LeftOut(), "left-out")
    # A machine that is busy is no fault of what is tested.
    patient = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=patient)
    hypothesis.settings.load_profile("patient")
