"""Says which tests a run leaves out or skips, and why; splits a run; no example has a deadline.

With `-n 2 --dist loadfile` two processes share the files: each file is whole in one of them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any

import hypothesis
import pytest
from dialoop import failures

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

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            heavy = [[*key, num] for key, num in self._heavy.items()]
            session.config.workeroutput["heavy"] = heavy

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker left out: each of them sees all tests."""
        for file, why, num in getattr(node, "workeroutput", {}).get("heavy", ()):
            self._heavy[file, why] = num

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, None, None]:
        if self._heavy:
            terminalreporter.section(f"{self._heavy.total()} heavy tests left out: make nightly")
            terminalreporter.write_line("\n".join(_lines(self._heavy)))
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


def part_of(files: Iterable[str], part: str) -> set[str]:
    """Return the files of a part: "2/3" is every third one, from the second on."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if match is None or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"There is no part {part!r}: write PART=i/n, with i from 1 to n.")
    return set(sorted(set(files))[int(match[1]) - 1 :: int(match[2])])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="i/n: every n-th file, from the i-th on")


@pytest.hookimpl(trylast=True)  # of what `-m` and `-k` leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = {item: item.nodeid.partition("::")[0] for item in items}
    kept = part_of(files.values(), config.getoption("--part"))
    items[:] = [item for item in items if files[item] in kept]


@pytest.fixture(autouse=True)
def _nothing_logged() -> None:
    """Let each test see its own failures in the log, also if one before had the same kind."""
    failures.REPEATS.forget()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_LeftOut(), "left-out")
    # A machine that is busy is no fault of what is tested.
    patient = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=patient)
    hypothesis.settings.load_profile("patient")
