"""docs/evidence.md is what infra/evidence_page.py writes; what is not shown stands as *not run*."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
HERE = "tests/unit/infra/test_evidence_page.py"
RECORD = {
    "functions": 7,
    "failed": 0,
    "seconds": 3,
    "reason": "",
    "date": "2026-01-02",
    "commit": "abc",
    "machine": 1,
}


@pytest.fixture
def script() -> dict[str, Any]:
    """The script's names, of a fresh copy."""
    names: dict[str, Any] = runpy.run_path(str(ROOT / "infra" / "evidence_page.py"))["page"]
    return names.__globals__  # type: ignore[attr-defined, no-any-return]


def line(script: dict[str, Any], **outcome: Any) -> str:
    """The cell of this file's last run."""
    runs = {"tests": {HERE: RECORD | outcome}, "machines": ["m"]}
    return str(script["_line"](HERE, runs))


def test_the_page_is_up_to_date(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    assert page == script["page"](), "run .venv/bin/python infra/evidence_page.py"


def test_without_records_every_promise_is_not_run(script: dict[str, Any]) -> None:
    page = script["page"]({"tests": {}, "machines": []})
    rows = [row for row in page.splitlines() if row.startswith("| ") and "`tests/" in row]
    assert len(rows) > 40
    assert all("*not run*" in row for row in rows)
    assert f"{len(script['promises']())} promises: 0 with all their tests recorded" in page


def test_part_of_a_file_is_said_to_be_a_part(script: dict[str, Any]) -> None:
    whole = line(script, passed=7)
    assert whole == "7 of 7 passed in 3 s, 2026-01-02, commit abc, machine 1"
    part = line(script, passed=6, reason="needs vLLM")
    assert part.endswith("; the others *not run*: needs vLLM")
    cases = line(script, passed=7, reason="no bwrap")
    assert cases.endswith("machine 1; some of their cases *not run*: no bwrap")
    assert line(script, passed=0, reason="needs vLLM") == "*not run*: skipped, needs vLLM"
    assert line(script, passed=1, failed=2).startswith("**failed**: 2 of 7, ")


def test_cases_of_a_report_are_counted_by_function(script: dict[str, Any]) -> None:
    report = ElementTree.fromstring(
        """<testsuite>
        <testcase name="test_part_of_a_file_is_said_to_be_a_part[a]" time="1.5"/>
        <testcase name="test_part_of_a_file_is_said_to_be_a_part[b]" time="1.2">
        <failure/></testcase>
        <testcase name="test_the_page_is_up_to_date" time="0.6"/>
        <testcase name="test_a_test_that_does_not_exist_is_named" time="0">
        <skipped message="no | here"/></testcase>
        </testsuite>"""
    )
    outcome = script["outcome_of"](HERE, report.iter("testcase"))
    counts = {"passed": 1, "failed": 1, "functions": len(script["tests_of"](HERE))}
    assert outcome == counts | {"seconds": 3, "reason": "no / here"}


def test_a_report_records_the_tests_of_which_it_has_every_function(
    script: dict[str, Any], tmp_path: Path
) -> None:
    name = "test_the_page_is_up_to_date"
    case = f'<testcase classname="tests.unit.infra.test_evidence_page" name="{name}" time="2"/>'
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites>{case}</testsuites>", encoding="utf-8")
    outcomes = script["outcomes_in"](report, [HERE, f"{HERE}::{name}"])
    (outcome,) = outcomes.values()
    assert list(outcomes) == [f"{HERE}::{name}"]
    assert outcome == {"functions": 1, "passed": 1, "failed": 0, "seconds": 2, "reason": ""}


@pytest.mark.parametrize("test", ["tests/nowhere.py", f"{HERE}::test_nothing", "tests/unit"])
def test_a_test_that_does_not_exist_is_named(script: dict[str, Any], test: str) -> None:
    with pytest.raises(script["EvidenceError"], match="There is no test"):
        script["tests_of"](test)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('page = "README.md"\ntext = "It never fails."\ntests = ["tests/e2e/test_loop.py"]', "say"),
        ('page = "README.md"\ntext = "A config"', "needs tests, or else why"),
        ('page = "README.md"\ntext = "A config"\nwhy = "no GPU"\nfigures = ["no.json"]', "exist"),
        ('page = "README.md"\ntext = "A config"\ntests = ["tests/no.py"]', "There is no test"),
    ],
)
def test_a_promise_that_does_not_hold_together_is_refused(
    script: dict[str, Any], tmp_path: Path, entry: str, message: str
) -> None:
    script["PROMISES"] = tmp_path / "promises.toml"
    script["PROMISES"].write_text(f"[[promise]]\n{entry}\n")
    with pytest.raises(script["EvidenceError"], match=message):
        script["promises"]()


def test_a_page_that_is_out_of_date_fails_the_check(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script["main"](["--check"]) == 0
    script["RUNS"] = tmp_path / "runs.json"
    script["RUNS"].write_text('{"machines": ["another"], "tests": {}}')
    assert script["main"](["--check"]) == 1
    assert "docs/evidence.md is out of date" in capsys.readouterr().err
