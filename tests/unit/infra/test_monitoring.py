"""Dashboard, alarm rules and docs/troubleshooting.md name metrics that the services export."""

from __future__ import annotations

import ast
import json
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from dialoop.waits import Waits
from dialoop_services.runtime.metrics import Metrics
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "infra" / "monitoring"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
OF_PROMETHEUS = {"instance", "job"}
SUFFIXES = ("_bucket", "_sum", "_count")


@cache
def exported_metrics() -> dict[str, set[str]]:
    """Each metric that a service exports, with its labels."""
    waits, metrics = Waits(), Metrics()
    waits.begin("replay", "groups to train")
    metrics.show_waits(waits)
    metrics.count_start("grpc")
    metrics.count_end("TrainerService.GetStatus", "grpc", "OK", 0.1)
    labels = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels[sample.name] = set(sample.labels)
    for path in (ROOT / "services" / "dialoop_services").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and is_metric(call):
                name, _, label = (ast.literal_eval(argument) for argument in call.args[:3])
                is_gauge = any(keyword.arg == "is_gauge" for keyword in call.keywords)
                labels[name if is_gauge else f"{name}_total"] = {label}
    return labels


def is_metric(call: ast.Call) -> bool:
    """Whether it is `server.show("dialoop_...", ...)`."""
    is_show = isinstance(call.func, ast.Attribute) and call.func.attr == "show"
    return is_show and ast.unparse(call.args[0]).startswith("'dialoop_")


def charts() -> list[dict[str, Any]]:
    panels = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


def alarms() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alarms.yml").read_text("utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


TARGETS = [target for chart in charts() for target in chart["targets"]]
QUERIES = [
    *((target["expr"], target["legendFormat"]) for target in TARGETS),
    *((rule["expr"], rule["annotations"]["summary"]) for rule in alarms()),
]


def rows_of_page(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n##")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(("query", "text"), QUERIES, ids=[query for query, _ in QUERIES])
def test_a_query_names_metrics_and_labels_that_exist(query: str, text: str) -> None:
    plain = re.sub(r'"[^"]*"', '""', query)
    names = set(re.findall(r"\b(dialoop_\w+|up)\b", plain))
    assert names
    labels = set(OF_PROMETHEUS)
    for name in names - {"up"}:
        assert name in exported_metrics(), name
        labels |= exported_metrics()[name]
    used = set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", query))
    for inside in re.findall(r"by \(([^)]*)\)", query):
        used |= set(re.split(r",\s*", inside))
    used |= set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text))
    assert used <= labels, used - labels


def test_a_number_of_the_newest_row_is_one_that_runs_write() -> None:
    explained = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    names = [n for query, _ in QUERIES for n in re.findall(r'dialoop_newest{name=~?"(.*?)"', query)]
    assert len(names) > 10
    for kind, *_, name in (name.split("/") for name in names):
        section = explained.partition(f"## `{kind}`")[2].partition("\n## ")[0]
        assert f"`{name}`" in section, f"{kind}/{name}"


def test_the_page_explains_each_metric_with_its_labels_and_no_other() -> None:
    explained = {
        name.strip("`"): set(re.findall(r"`(\w+)`", labels))
        for name, labels, _ in rows_of_page("What the services export")
    }
    histogram = {f"dialoop_call_seconds{suffix}" for suffix in SUFFIXES}
    others = {name: labels for name, labels in exported_metrics().items() if name not in histogram}
    assert explained == others | {"dialoop_call_seconds": {"rpc", "door"}}
    assert histogram < exported_metrics().keys()


def test_the_page_explains_each_alarm_and_no_other() -> None:
    rows = rows_of_page("Alarm rules")
    assert [row[0].strip("`") for row in rows] == [rule["alert"] for rule in alarms()]


def test_the_dashboard_is_what_its_script_writes() -> None:
    text = runpy.run_path(str(ROOT / "infra" / "grafana_dashboard.py"))["text"]
    written = (MONITORING / "dashboard.json").read_text("utf-8")
    assert written == text(), "run .venv/bin/python infra/grafana_dashboard.py"


def test_charts_do_not_cover_each_other() -> None:
    places = set()
    for chart in charts():
        at = chart["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & places, chart["title"]
        places |= cells
