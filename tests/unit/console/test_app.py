"""The console's routes: what they answer, whom they let in, and that they only read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from dialoop.errors import NotFound
from dialoop_ops.console.app import console_app
from dialoop_ops.console.live_runs import LiveRuns
from dialoop_ops.console.watched_runs import WatchedRuns
from dialoop_ops.runs import Filters, RunIndex
from dialoop_ops.runs.policies import proof_bound, publishes_of
from dialoop_services.runtime.access.auth import Token

XSS = '<img src=x onerror="fetch(1)"><script>alert(1)</script>'


def row(number: int, **fields: Any) -> dict[str, Any]:
    segments = [
        {"start": 0, "length": 2, "source": "PROMPT", "lineage": None, "policy_version": None},
        {"start": 2, "length": 2, "source": "MODEL", "lineage": "main", "policy_version": 1},
    ]
    sequence = {"token_ids": [5, 8, 2, 7], "segments": segments, "advantage": 0.5 - number % 2}
    sequence |= {"inference_logprobs": [-0.25, float("-inf")], "fork_cause": "NONE"}
    return {
        "outcome": "trained",
        "label": "training",
        "train_step": 1,
        "trajectory_id": f"t{number}",
        "group_id": f"g/{number // 2}",
        "task_key": "1+2",
        "environment": "arithmetic",
        "reward": float(number % 2),
        "messages": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": XSS}],
        "turns": [{"message_start": 1, "num_messages": 1, "stop_reason": "STOP"}],
        "sequences": [sequence],
        "failures": [],
    } | fields


def write_run(folder: Path, *, num_rows: int = 6) -> Path:
    folder.mkdir()
    rows = [row(number) for number in range(num_rows)]
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (folder / "trajectories.jsonl").write_text(text)
    metric = {"time": 1.0, "kind": "train", "train_step": 1, "lineage": "main"}
    metric |= {"policy_version": 2, "reward": 0.5, "loss": float("nan")}
    (folder / "metrics.jsonl").write_text(json.dumps(metric) + "\n")
    config = {"train": {"loss": "grpo"}, "judge": {"api_key": "hush"}, "name": folder.name}
    (folder / "run.json").write_text(json.dumps({"run_id": "r", "started": 1, "config": config}))
    return folder


@pytest.fixture(scope="module")
def console(tmp_path_factory) -> Any:
    """Two runs behind the app, and a call of it."""
    root = tmp_path_factory.mktemp("runs")
    folders = [write_run(root / "a"), write_run(root / "b", num_rows=2)]
    runs = WatchedRuns(folders)
    for index in runs.indexes.values():
        index.catch_up()

    def call(path: str, method: str = "GET", token: str = "", **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            app: Any = console_app(runs, LiveRuns(), token=Token(token))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await http.request(method, path, headers=headers)

        return asyncio.run(send())

    return SimpleNamespace(call=call, runs=runs, folders=folders)


def test_the_list_is_the_indexs_page(console):
    answer = console.call("/api/runs/a/trajectories?reward=1&sort=number&limit=2&offset=1")
    page = console.runs.index_of("a").page(
        Filters.of({"reward": "1"}), sort="number", limit=2, offset=1
    )
    assert answer.json()["total"] == page.total == 3
    numbers = [summary["number"] for summary in answer.json()["summaries"]]
    assert numbers == [summary.number for summary in page.summaries] == [4, 6]


def test_a_trajectory_its_group_and_its_tokens(console):
    whole = console.call("/api/runs/a/trajectories/3").json()
    assert whole["messages"][1]["content"] == XSS
    assert whole["sequences"] == [{"num_tokens": 4, "fork_cause": "NONE", "advantage": 0.5}]
    group = console.call("/api/runs/a/trajectories/3/group").json()
    assert [m["summary"]["number"] for m in group["members"]] == [3, 4]
    assert [m["summary"]["advantage"] for m in group["members"]] == [0.5, -0.5]
    tokens = console.call("/api/runs/a/trajectories/3/tokens?start=1&limit=9").json()
    assert tokens["ids"] == [8, 2, 7]
    assert tokens["logprobs"] == [None, -0.25, "-Infinity"]
    assert tokens["texts"] is None


def test_curves_and_configs_of_several_runs(console):
    names = console.call("/api/runs/a/metrics").json()["names"]
    assert {"train/loss", "train/reward"} <= set(names)
    answer = console.call("/api/curves?run=a&run=b&name=train/reward&name=train/loss").json()
    assert [(s["run"], s["name"]) for s in answer["series"]] == [
        (run, name) for run in "ab" for name in ("train/reward", "train/loss")
    ]
    assert answer["series"][0]["value"] == [0.5]
    assert (answer["series"][0]["low"], "samples" in answer["series"][0]) == (None, False)
    by_samples = console.call("/api/curves?run=a&name=train/reward&x=samples").json()["series"]
    assert [len(each["samples"]) for each in by_samples] == [1]
    assert answer["series"][1]["value"] == ["NaN"]
    config = console.call("/api/config?run=a&run=b").json()
    differing = {line["key"]: line["values"] for line in config["lines"] if line["differs"]}
    assert differing == {"name": ['"a"', '"b"']}
    assert "hush" not in json.dumps(config)


PUBLISHED = {"kind": "publish", "lineage": "main", "publish_s": 0.5, "num_replicas": 2}


def test_publishes_have_sizes_times_and_proofs_without_those_that_a_restore_discarded(tmp_path):
    folder = write_run(tmp_path / "published")
    publishes = [
        PUBLISHED
        | {"time": float(version), "train_step": version - 1, "policy_version": version}
        | {"num_bytes": 1000 * version, "max_logprob_difference": difference}
        for version, difference in ((1, 1e-6), (2, float("nan")), (3, 1e-5))
    ]
    restore = {"time": 4.0, "kind": "restore", "train_step": 1, "num_warm_start_steps": 0}
    lines = [*publishes, restore | {"evaluations": []}, publishes[2] | {"time": 5.0, "more": {}}]
    lines[2] = publishes[2] | {"train_step": 2, "num_bytes": 7}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "policies" / "main-3").mkdir(parents=True)
    (folder / "policies" / "main-3" / "adapter_model.safetensors").touch()
    index = RunIndex(folder)
    index.catch_up()
    shown = publishes_of(index)
    assert [(p.policy_version, p.num_bytes, p.time) for p in shown] == [
        (1, 1000.0, 1.0),
        (2, 2000.0, 2.0),
        (3, 3000.0, 5.0),
    ]
    assert [(p.lineage, p.train_step, p.publish_s, p.num_replicas) for p in shown] == [
        ("main", step, 0.5, 2.0) for step in (0, 1, 2)
    ]
    assert shown[0].max_logprob_difference == 1e-6
    assert shown[1].max_logprob_difference != shown[1].max_logprob_difference  # NaN
    assert [p.is_on_disk for p in shown] == [False, False, True]
    assert proof_bound(index) is None
    for bound in (1e-4, None):
        mark = {"config": {"gates": {"logprob_difference_at_most": bound}}}
        (folder / "run.json").write_text(json.dumps(mark))
        assert proof_bound(index) == bound


def test_the_choices_and_the_runs(console):
    assert console.call("/api/runs/a/choices").json()["outcome"] == ["trained"]
    listed = console.call("/api/runs").json()["runs"]
    assert [(run["name"], run["progress"]["num_trajectories"]) for run in listed] == [
        ("a", 6),
        ("b", 2),
    ]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/api/runs/zz/choices", 404, "no run 'zz'"),
        ("/api/runs/..%2Fb/choices", 404, "no such route"),
        ("/api/runs/a/trajectories/99", 404, "no trajectory number 99"),
        ("/api/runs/a/trajectories/-1", 400, "number is '-1'"),
        (f"/api/runs/a/trajectories/{'9' * 30}", 400, "number is"),
        ("/api/runs/a/trajectories?reward=high", 400, "reward is 'high'"),
        ("/api/runs/a/trajectories?colour=red", 400, "no filter 'colour'"),
        ("/api/runs/a/trajectories?sort=number;drop", 404, "no column"),
        ("/api/runs/a/trajectories/1/tokens?sequence=7", 404, "no number 7"),
        ("/api/runs/zz/publishes", 404, "no run 'zz'"),
        ("/api/curves?name=x", 400, "No run is named"),
        ("/assets/../../watched_runs.py", 404, "no such route"),
        ("/api", 404, "no such route"),
    ],
)
def test_what_is_not_there_is_a_problem_document(path, status, sentence, console):
    answer = console.call(path)
    assert (answer.status_code, answer.headers["content-type"]) == (
        status,
        "application/problem+json",
    )
    assert sentence in answer.json()["detail"]


OLDER = {
    "nothing but what was played": lambda row: {
        name: row[name]
        for name in ("trajectory_id", "outcome", "reward", "messages", "turns", "sequences")
    },
    "sequences without numbers": lambda row: {
        **row,
        "sequences": [
            {name: sequence[name] for name in ("token_ids", "segments")}
            for sequence in row["sequences"]
        ],
    },
}


@pytest.mark.parametrize("shape", OLDER)
def test_a_run_of_an_older_version_is_shown_as_far_as_it_goes(shape, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    lines = [json.dumps(OLDER[shape](row(number))) for number in range(3)]
    (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "metrics.jsonl").write_text('{"kind": "train", "train_step": 1, "reward": 0.5}\n')
    runs = WatchedRuns([folder])  # it has no run.json
    runs.indexes["old"].catch_up()
    app: Any = console_app(runs, LiveRuns(), token=Token(""))

    async def ask(paths: list[str]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return [await http.get(f"/api/{path}") for path in paths]

    trajectory = "runs/old/trajectories/1"
    paths = ["runs", "runs/old/trajectories", "runs/old/choices", "runs/old/metrics"]
    paths += [trajectory, f"{trajectory}/group", f"{trajectory}/forks", f"{trajectory}/tokens"]
    paths += ["curves?run=old&name=lengths/generated&name=train/reward", "config?run=old"]
    paths += ["runs/old/publishes"]
    answers = dict(zip(paths, asyncio.run(ask(paths)), strict=True))
    assert {path: each.status_code for path, each in answers.items()} == dict.fromkeys(paths, 200)
    assert answers["runs/old/trajectories"].json()["total"] == 3
    assert answers[f"{trajectory}/tokens"].json()["num_tokens"] == 4


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(method, console):
    assert console.call("/api/runs", method).status_code == 405


def test_the_page_loads_nothing_from_elsewhere_and_says_so(console):
    page = console.call("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "://" not in page.text
    for asset in ("console.js", "console.css", "licences.txt", "icon.svg"):
        assert console.call(f"/assets/{asset}").status_code == 200


def test_no_source_of_the_page_makes_html_of_a_text():
    sources = list((Path(__file__).parents[3] / "console" / "src").iterdir())
    assert sources
    for path in sources:
        text = path.read_text("utf-8").lower()
        assert not any(word in text for word in ("innerhtml", "outerhtml", "insertadjacent"))


def test_with_a_token_only_the_page_is_open(console):
    assert console.call("/", token="secret").status_code == 200
    assert console.call("/assets/console.js", token="secret").status_code == 200
    assert console.call("/api/runs", token="secret").status_code == 401
    answer = console.call("/api/runs", token="secret", authorization="Bearer secret")
    assert answer.status_code == 200


def test_without_a_token_names_beyond_loopback_are_refused(console):
    assert console.call("/api/runs", host="evil.example").status_code == 403
    assert console.call("/api/runs", host="localhost:8000").status_code == 200


def test_a_growing_run_is_followed(tmp_path):
    folder = write_run(tmp_path / "live", num_rows=1)
    with WatchedRuns([folder]) as runs:
        index = runs.index_of("live")
        _wait_for(index, 1)
        with (folder / "trajectories.jsonl").open("a") as file:
            file.write(json.dumps(row(7)) + "\n")
        _wait_for(index, 2)


def _wait_for(index: RunIndex, count: int) -> None:
    async def wait() -> None:
        while index.progress().num_trajectories != count:
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(wait(), timeout=30))


def test_a_folder_without_a_run_is_refused_and_names_are_told_apart(tmp_path):
    with pytest.raises(NotFound, match="not the directory of a run"):
        WatchedRuns([tmp_path])
    (tmp_path / "x").mkdir()
    folders = [write_run(tmp_path / "demo"), write_run(tmp_path / "x" / "demo")]
    assert list(WatchedRuns(folders).indexes) == ["demo", "demo-2"]
