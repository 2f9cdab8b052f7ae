"""Write infra/monitoring/dashboard.json: a Grafana dashboard over the services' metrics.

.venv/bin/python infra/grafana_dashboard.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent / "monitoring" / "dashboard.json"
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 7
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart: PromQL by the legend of its curves. unit: Grafana's name of the values' unit."""

    title: str
    text: str
    curves: dict[str, str]
    unit: str = "short"


def newest(*names: str) -> dict[str, str]:
    """Return a curve for each number of the newest rows of metrics.jsonl."""
    return {name: f'dialoop_newest{{name="{name}"}}' for name in names}


_ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What is learned",
        (
            Panel(
                title="Reward",
                text="Mean of the step's trajectories, trained or dropped.",
                curves=newest("train/reward", "train/reward_std"),
            ),
            Panel(
                title="Evaluations",
                text="Mean reward of the newest evaluation of each label.",
                curves={"{{name}}": 'dialoop_newest{name=~"evaluation/.*/mean_reward"}'},
            ),
            Panel(
                title="Entropy",
                text="Of the policy at a trained token, in nats.",
                curves=newest("train/entropy"),
            ),
            Panel(
                title="Engine and trainer",
                text="KL between them on tokens of the current policy, in nats.",
                curves=newest("train/fresh_mismatch_kl", "train/approx_kl"),
            ),
            Panel(
                title="Staleness",
                text="Age of a trajectory's oldest token, in policy versions.",
                curves=newest("train/staleness_mean", "train/staleness_max"),
            ),
            Panel(
                title="Effective sample size and clipped tokens",
                text="As shares of the trained tokens.",
                curves=newest("train/ess", "train/clip_fraction"),
                unit="percentunit",
            ),
        ),
    ),
    (
        "How it goes on",
        (
            Panel(
                title="Train steps a minute",
                text="Over the last ten minutes.",
                curves={"{{kind}}": "60 * rate(dialoop_steps_total[10m])"},
            ),
            Panel(
                title="Time of a step",
                text="Waiting for a batch, training, waiting for the publish before, publishing.",
                curves=newest("train/lease_s", "train/train_s", "train/wait_s", "train/publish_s"),
                unit="s",
            ),
            Panel(
                title="Alarms",
                text="The trainer's alarms that are on.",
                curves={"{{alarm}}": "dialoop_alarms"},
            ),
            Panel(
                title="Who waits for whom",
                text="Age of the oldest wait, of those where work is due.",
                curves={
                    "{{instance}} for {{target}} ({{what}})": 'dialoop_wait_seconds{idle="false"}'
                },
                unit="s",
            ),
            Panel(
                title="Waits",
                text="How many there are, where work is due.",
                curves={"{{instance}} for {{target}} ({{what}})": 'dialoop_waits{idle="false"}'},
            ),
            Panel(
                title="Services that answer",
                text="1 where the last scrape succeeded.",
                curves={"{{instance}}": 'up{job="dialoop"}'},
            ),
        ),
    ),
    (
        "Calls",
        (
            Panel(
                title="Calls a second",
                text="By rpc, through all servers.",
                curves={"{{rpc}}": "sum by (rpc) (rate(dialoop_calls_total[5m]))"},
                unit="reqps",
            ),
            Panel(
                title="Calls that failed, a second",
                text="By rpc and status.",
                curves={
                    "{{rpc}} {{status}}": "sum by (rpc, status) "
                    '(rate(dialoop_calls_total{status!="OK"}[5m]))'
                },
                unit="reqps",
            ),
            Panel(
                title="Time of a call, 95th percentile",
                text="From the request to the last answer.",
                curves={
                    "{{rpc}}": "histogram_quantile(0.95, "
                    "sum by (rpc, le) (rate(dialoop_call_seconds_bucket[5m])))"
                },
                unit="s",
            ),
            Panel(
                title="Calls in flight",
                text="By service and server.",
                curves={"{{instance}} {{door}}": "dialoop_calls_running"},
            ),
            Panel(
                title="Prefix cache",
                text="Share of each replica's prompt tokens whose keys it had already.",
                curves={
                    "{{instance}}": 'rate(dialoop_prompt_tokens_total{keys="cached"}[5m]) '
                    "/ ignoring (keys) sum without (keys) (rate(dialoop_prompt_tokens_total[5m]))"
                },
            ),
            Panel(
                title="Queue time of a sample",
                text="Seconds that a sample waits in the engine of a replica.",
                curves={
                    "{{instance}}": "sum by (instance) "
                    "(rate(dialoop_sample_queue_seconds_total[5m])) "
                    "/ sum by (instance) (rate(dialoop_samples_total[5m]))"
                },
                unit="s",
            ),
            Panel(
                title="Routing",
                text="Samples asked of each replica, calls that left the one with their prefix, "
                "and tokens kept of answers whose replica died, a second.",
                curves={
                    "samples, {{replica}}": "sum by (replica) "
                    "(rate(dialoop_replica_samples_total[5m]))",
                    "moved to {{replica}}": "sum by (replica) "
                    "(rate(dialoop_conversations_moved_total[5m]))",
                    "kept by {{replica}}": "sum by (replica) "
                    "(rate(dialoop_continued_tokens_total[5m]))",
                },
            ),
            Panel(
                title="Forks and overflow",
                text="Prompts that could not continue their tokens, and groups dropped by a full "
                "queue, a second.",
                curves={
                    "fork, {{cause}}": "rate(dialoop_forks_total[5m])",
                    "overflow, {{reason}}": "rate(dialoop_overflow_total[5m])",
                },
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        y += 1
        for place, panel in enumerate(row):
            down, across = divmod(place * _WIDTH, _COLUMNS)
            at = {"x": across, "y": y + down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_chart(panel, number=len(panels) + 1, at=at))
        y += -(-len(row) * _WIDTH // _COLUMNS) * _HEIGHT
    return {
        "uid": "dialoop",
        "title": "Dialoop",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": panels,
    }


def _chart(panel: Panel, *, number: int, at: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
        for place, (legend, query) in enumerate(panel.curves.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


def text() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    """Write the file."""
    DASHBOARD.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
