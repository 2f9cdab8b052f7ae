"""Says at the end of a run which heavy tests were left out, and why; no example has a deadline."""

from __future__ import annotations

import hypothesis
import pytest


class _LeftOut:
    def __init__(self) -> None:
        self.heavy: list[tuple[str, str]] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            marker = item.get_closest_marker("heavy")
            if marker is not None:
                self.heavy.append((item.nodeid, marker.kwargs.get("reason", "it takes minutes")))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.heavy:
            terminalreporter.section(f"{len(self.heavy)} heavy tests left out: make test-heavy")
            for name, reason in self.heavy:
                terminalreporter.line(f"{name}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_LeftOut(), "left-out")
    # A machine that is busy is no fault of what is tested.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")
