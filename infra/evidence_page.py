"""Write docs/evidence.md: each promise of README and docs, its tests, and their last recorded run.

.venv/bin/python infra/evidence_page.py                      # write the page
.venv/bin/python infra/evidence_page.py --check              # fail unless it is up to date
.venv/bin/python infra/evidence_page.py --run TEST...        # run tests of promises, record, write
.venv/bin/python infra/evidence_page.py --run --missing      # run those that have no record
.venv/bin/python infra/evidence_page.py --report REPORT      # record what `pytest --junitxml` wrote

A promise is an entry of infra/evidence/promises.toml or a row of a table `promise | test` in docs/.
Records are in infra/evidence/runs.json. Every command fails for a test that does not exist.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "evidence.md"
PROMISES = ROOT / "infra" / "evidence" / "promises.toml"
RUNS = ROOT / "infra" / "evidence" / "runs.json"
RESULTS = ROOT / "benchmarks" / "results"
NOT_RUN = "*not run*"
_MACHINE = ("machine", "processor", "cores", "cpu_cores")
_LOAD = ("load", "load_before", "load_1m", "load_1min", "load_near_the_end")
_HEAD = """# Evidence

What README and docs promise, the tests that show it, and what came out when these tests last ran. A
test without a record is *not run*. A record is of the commit that it names. It says how many of the
test functions were played, since some need software that a machine may lack.

`infra/evidence_page.py` writes this page from `infra/evidence/promises.toml`, the tables of
promises in the docs, `infra/evidence/runs.json` and `benchmarks/results/`. `make check` compares.
To run a test of a promise and record what comes out:

<!-- not run: it runs tests -->
```sh
.venv/bin/python infra/evidence_page.py --run tests/e2e/test_loop.py
```
"""


class EvidenceError(Exception):
    """A promise that its page does not make, or a test or file that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A sentence of a page, the tests and figures that show it, or why nothing does."""

    page: str
    text: str
    tests: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    why: str = ""


def promises() -> list[Promise]:
    """Return all promises, by page; EvidenceError for one that does not hold together."""
    entries = tomllib.loads(PROMISES.read_text("utf-8"))["promise"]
    listed = [
        Promise(
            page=entry["page"],
            text=entry["text"],
            tests=tuple(entry.get("tests", ())),
            figures=tuple(entry.get("figures", ())),
            why=entry.get("why", ""),
        )
        for entry in entries
    ]
    for promise in listed:
        if _plain(promise.text) not in _plain((ROOT / promise.page).read_text("utf-8")):
            raise EvidenceError(f"{promise.page} does not say: {promise.text}")
    pages = sorted((ROOT / "docs").glob("*.md"))
    listed += [row for page in pages if page != PAGE for row in _rows_of(page)]
    for promise in listed:
        _check(promise)
    return sorted(listed, key=lambda promise: (promise.page != "README.md", promise.page))


def _rows_of(page: Path) -> Iterator[Promise]:
    """Yield the rows of the page's tables `promise | test`."""
    is_inside = False
    for line in page.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells == ["promise", "test"]:
            is_inside = True
        elif not line.startswith("|"):
            is_inside = False
        elif is_inside and set(line) - set("|- "):
            tests = tuple(re.findall(r"`(tests/[^`]+)`", cells[1]))
            yield Promise(page=page.relative_to(ROOT).as_posix(), text=cells[0], tests=tests)


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\*\*|^#+ ", "", text, flags=re.M).split())


def _check(promise: Promise) -> None:
    if bool(promise.tests) == bool(promise.why):
        raise EvidenceError(
            f"A promise of {promise.page} needs tests, or else why there are none: {promise.text}"
        )
    for test in promise.tests:
        tests_of(test)
    for figure in promise.figures:
        if not (RESULTS / figure).is_file():
            raise EvidenceError(f"{promise.page} names figures that do not exist: {figure}")


@cache
def tests_of(node: str) -> tuple[str, ...]:
    """Return the test functions of `FILE` or `FILE::TEST`; EvidenceError where there are none."""
    file, _, name = node.partition("::")
    path = ROOT / file
    if not path.is_file():
        raise EvidenceError(f"There is no test {node}.")
    names = tuple(
        item.name
        for item in ast.parse(path.read_text("utf-8")).body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        and item.name.startswith("test_")
        and name in ("", item.name)
    )
    if not names:
        raise EvidenceError(f"There is no test {node}.")
    return names


def page(runs: Mapping[str, Any] | None = None) -> str:
    """Return the page's text, of the recorded runs if no others are given."""
    runs = _recorded_runs() if runs is None else runs
    listed = promises()
    states = Counter(
        "not run" if NOT_RUN in cell else "failed" if "**failed**" in cell else "passed"
        for promise in listed
        for cell in [_cells(promise, runs)[1]]
    )
    count = f"{len(listed)} promises: {states['passed']} with all their tests recorded as passed"
    count += f", {states['failed']} failed, {states['not run']} not run or in part."
    blocks = [_HEAD, f"{count}\n"]
    for name in dict.fromkeys(promise.page for promise in listed):
        rows = [
            "| promise | tests | last run |",
            "|---|---|---|",
            *(f"| {p.text} | {' | '.join(_cells(p, runs))} |" for p in listed if p.page == name),
        ]
        link = os.path.relpath(ROOT / name, PAGE.parent)
        blocks.append("\n".join((f"## [`{name}`]({link})", "", *rows, "")))
    blocks.append("\n".join(("## Machines", "", *_machines(runs), "")))
    blocks.append("\n".join(("## Figures", "", *_figures())))
    return "\n".join(blocks) + "\n"


def _cells(promise: Promise, runs: Mapping[str, Any]) -> tuple[str, str]:
    """Return the cells of a promise's tests and of their last runs, a line for each."""
    if promise.why:
        return "none", f"{NOT_RUN}: {promise.why}"
    tests = [f"`{test}`" for test in promise.tests]
    lines = [_line(test, runs) for test in promise.tests]
    tests += [f"`benchmarks/results/{figure}`" for figure in promise.figures]
    lines += ["[figures](#figures)"] * len(promise.figures)
    return "<br>".join(tests), "<br>".join(lines)


def _line(test: str, runs: Mapping[str, Any]) -> str:
    record = runs["tests"].get(test)
    if record is None or not record["passed"] + record["failed"]:
        return NOT_RUN + (f": skipped, {record['reason']}" if record else "")
    defined = record["functions"]
    at = f"{record['date']}, commit {record['commit']}, machine {record['machine']}"
    if record["failed"]:
        return f"**failed**: {record['failed']} of {defined}, {at}"
    verdict = f"{record['passed']} of {defined} passed in {record['seconds']} s, {at}"
    if record["passed"] < defined:
        verdict += f"; the others {NOT_RUN}"
    elif record["reason"]:
        verdict += f"; some of their cases {NOT_RUN}"
    return f"{verdict}: {record['reason']}" if record["reason"] else verdict


def _machines(runs: Mapping[str, Any]) -> list[str]:
    return [f"{place}. {machine}" for place, machine in enumerate(runs["machines"], start=1)]


def _figures() -> list[str]:
    """Return a table of benchmarks/results with what each file says about its machine."""
    rows = [
        "Of the files that say nothing about their machine, `benchmarks/README.md` may say more.",
        "",
        "| file | machine | load |",
        "|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        facts = dict(_facts(json.loads(path.read_text("utf-8"))))
        cores = facts.pop("cores", facts.pop("cpu_cores", None))
        loads = [facts.pop(name) for name in _LOAD if name in facts]
        words = [*facts.values(), *([f"{cores} cores"] if cores else [])]
        machine = ", ".join(map(str, words)) or "*not recorded*"
        load = str(loads[0]).strip("[]") if loads else "*not recorded*"
        rows.append(f"| `benchmarks/results/{path.name}` | {machine} | {load} |")
    return rows


def _facts(value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield machine and load, which a result names at its top or in its first run."""
    if isinstance(value, list) and depth:
        yield from _facts(value[0] if value else None, depth - 1)
    elif isinstance(value, dict) and depth:
        for inner in value.values():
            if isinstance(inner, dict | list):
                yield from _facts(inner, depth - 1)
        for name in (*_MACHINE, *_LOAD):
            if name in value:
                yield name, value[name]


def _recorded_runs() -> dict[str, Any]:
    if not RUNS.is_file():
        return {"machines": [], "tests": {}}
    runs: dict[str, Any] = json.loads(RUNS.read_text("utf-8"))
    return runs


def record(tests: Iterable[str], play: Callable[[str], dict[str, Any]]) -> bool:
    """Keep what comes out of each test as `play` has it; return whether none failed."""
    runs, machine, commit = _recorded_runs(), _machine(), _commit()
    if machine not in runs["machines"]:
        runs["machines"].append(machine)
    is_good, named = True, {test for promise in promises() for test in promise.tests}
    runs["tests"] = {test: runs["tests"][test] for test in runs["tests"] if test in named}
    for test in tests:
        outcome = play(test)
        is_good = is_good and not outcome["failed"]
        runs["tests"][test] = outcome | {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit,
            "machine": runs["machines"].index(machine) + 1,
        }
        RUNS.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        sys.stdout.write(f"{test}: {outcome}\n")
        sys.stdout.flush()
    return is_good


def _play(test: str) -> dict[str, Any]:
    """Run one test with pytest; return its functions by outcome, their seconds, and why not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", test, f"--junitxml={report}"]
        subprocess.run(words, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        if not report.is_file():
            raise EvidenceError(f"pytest did not run {test}.")
        return outcome_of(test, ElementTree.parse(report).getroot().iter("testcase"))


def outcomes_in(report: Path, tests: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what a report of pytest says of those tests all of whose functions were run."""
    cases: dict[tuple[str, str], list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        cases.setdefault((case.get("classname", ""), name), []).append(case)
    outcomes = {}
    for test in tests:
        module = test.partition("::")[0].removesuffix(".py").replace("/", ".")
        of_functions = [cases.get((module, name), []) for name in tests_of(test)]
        if all(of_functions):
            outcomes[test] = outcome_of(test, [case for each in of_functions for case in each])
    return outcomes


def outcome_of(test: str, cases: Iterable[ElementTree.Element]) -> dict[str, Any]:
    """Return a record of the cases of a report.

    A function passes if one of its cases does and none fails; it counts as skipped if all are.
    """
    names, seconds, reasons = tests_of(test), 0.0, set()
    states: dict[str, set[str]] = {name: set() for name in names}
    for case in cases:
        seconds += float(case.get("time", 0))
        tags = {child.tag for child in case}
        state = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else ""
        name = case.get("name", "").partition("[")[0]
        states.setdefault(name, set()).add(state or "passed")
        reasons |= {_reason(child.get("message", "")) for child in case if child.tag == "skipped"}
    counts = Counter(
        "failed" if "failed" in seen else "passed" if "passed" in seen else "skipped"
        for seen in states.values()
    )
    return {
        "functions": len(names),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "seconds": round(seconds),
        "reason": "; ".join(sorted(reasons)),
    }


def _reason(message: str) -> str:
    return " ".join(message.replace("|", "/").split())[:120]


def _machine() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        text = ""
    names = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    processor = names.get("model name", "unknown processor")
    if "cpu family" in names:
        processor += f" (family {names['cpu family']} model {names['model']})"
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        gpus = [line.partition(" (")[0] for line in listed.stdout.splitlines()]
    except OSError:
        gpus = []
    python = ".".join(map(str, sys.version_info[:2]))
    devices = ", ".join(gpus) or "no GPU"
    return f"{os.cpu_count()} cores of {processor}, {devices}, Python {python}"


def _commit() -> str:
    """Return the commit that is checked out; EvidenceError if files of the product were changed."""
    changed = ["git", "status", "--porcelain", "--", "client", "services", "tests", "proto"]
    if _output(changed):
        raise EvidenceError("Commit your changes first: a record names the commit that it is of.")
    return _output(["git", "rev-parse", "--short", "HEAD"])


def _output(words: Sequence[str]) -> str:
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 where a promise, the page or a test is not as it should be."""
    parser = argparse.ArgumentParser(description="Write docs/evidence.md.")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", nargs="*", metavar="TEST")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(arguments)
    try:
        named = list(dict.fromkeys(test for promise in promises() for test in promise.tests))
        is_good = True
        if options.run is not None:
            recorded = _recorded_runs()["tests"]
            missing = [test for test in named if test not in recorded] if options.missing else []
            for test in options.run:
                if test not in named:
                    raise EvidenceError(f"No promise names {test}.")
            is_good = record([*options.run, *missing], _play)
        if options.report:
            outcomes = outcomes_in(options.report, named)
            is_good = record(outcomes, outcomes.__getitem__) and is_good
        text = page()
    except EvidenceError as error:
        sys.stderr.write(f"evidence: {error}\n")
        return 1
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text("utf-8") != text:
        sys.stderr.write("docs/evidence.md is out of date: run infra/evidence_page.py\n")
        return 1
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
