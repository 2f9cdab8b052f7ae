"""The sums of docs/scale.md: its examples follow from its formulas and from measured figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scale.md").read_text("utf-8")
PUBLISH = re.findall(
    r"^\| ([\d.]+) B \| (\d+) GB \| ([\d.]+) s \| ([\d.]+) s \|$", PAGE, flags=re.MULTILINE
)


@pytest.mark.parametrize(("billions", "gigabytes", "to_one", "to_eight"), PUBLISH)
def test_publish_times_are_bytes_over_bandwidth(
    billions: str, gigabytes: str, to_one: str, to_eight: str
) -> None:
    size = 2 * float(billions)
    assert size == float(gigabytes)
    assert float(to_one) == pytest.approx(size / (10 / 8), rel=0.03)
    assert float(to_eight) == pytest.approx(8 * size / (100 / 8), rel=0.08)


def test_the_table_of_publishes_was_found() -> None:
    assert len(PUBLISH) == 3


def test_the_queue_of_a_thousand_gpus_follows_from_what_was_measured() -> None:
    tokens, group = 1000 * 2000, 8 * 4000
    assert tokens / group == pytest.approx(63, rel=0.01)
    bytes_of_token = 3.07e6 / (8 * 32_000)
    assert round(tokens * bytes_of_token / 1e6) == 24
    share = 24 / 224
    assert share == pytest.approx(1 / 9, rel=0.1)
    results = ROOT / "benchmarks" / "results" / "replay_throughput.json"
    runs = json.loads(results.read_text("utf-8"))["runs"]
    short, long = (run["now"]["median"] for run in (runs[2], runs[5]))
    assert short["append_groups_per_s"] == 2729
    assert "appended 2,729 groups" in PAGE
    bytes_per_s = long["append_groups_per_s"] * long["group_bytes"]
    assert round(bytes_per_s / 1e6) == 224
    assert "224 MB a second in groups" in PAGE


def test_the_registrys_figures_are_those_that_were_measured() -> None:
    path = ROOT / "benchmarks" / "results" / "registry.json"
    [run] = json.loads(path.read_text("utf-8"))["runs"]
    assert 285 < run["calls_per_s"] < 305
    assert run["service_cpu_ms_per_call"] == pytest.approx(0.9, rel=0.05)
    assert 300 * run["service_cpu_ms_per_call"] / 1000 == pytest.approx(0.25, rel=0.1)


def test_the_gpus_of_each_line_add_up() -> None:
    assert 56 + 8 == 14 * 4 + 8 == 64
    assert 120 * 8 + 40 == 1000
    assert "56, or 14 with" in PAGE
    assert "120 with 8 GPUs each | 40 processes" in PAGE
