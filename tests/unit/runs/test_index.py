"""The index of a run against a plain pass over trajectories.jsonl; what bad files do to it."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidInput, NotFound, Unavailable
from dialoop_ops.runs import Filters, RunIndex, TrajectorySummary
from dialoop_ops.runs.run_config import compare_configs, flat_config
from dialoop_ops.runs.summaries import summary_of, text_of, versions_by_step
from dialoop_ops.runs.token_numbers import token_page

WORDS = ("Result=12", "<submit>", 'say "hi"', "ÄRGER", "% of it_", "print('x')\nline", "漢字かな")


def trajectory(chance: random.Random, number: int, **fields: Any) -> dict[str, Any]:
    version = chance.randint(1, 6)
    length = chance.randint(1, 9)
    segments = [
        {"start": 0, "length": 2, "source": "PROMPT", "turn": 0, "message_index": 0}
        | {"lineage": None, "policy_version": None},
        {"start": 2, "length": length, "source": "MODEL", "turn": 0, "message_index": 1}
        | {"lineage": "main", "policy_version": version},
        {"start": 2 + length, "length": 1, "source": "MODEL", "turn": 0, "message_index": 1}
        | {"lineage": "main", "policy_version": version + chance.randint(0, 2)},
    ]
    failure = {"owner": chance.choice(("TOOL", "POLICY")), "reason": "R", "message": "m"}
    sequence = {
        "token_ids": [chance.randint(0, 99) for _ in range(length + 3)],
        "segments": segments,
        "inference_logprobs": [-chance.random() for _ in range(length + 1)],
        "advantage": chance.choice((None, -0.5, 1.25)),
        "token_advantages": [],
        "fork_cause": "NONE",
    }
    stops = chance.choice((["STOP"], ["LENGTH"], ["STOP", "LENGTH"]))
    return {
        "outcome": chance.choice(("trained", "evaluation", "uniform_reward")),
        "label": chance.choice(("", "training", "running")),
        "train_step": chance.randint(0, 4),
        "trajectory_id": f"{number % 7:x}a{number:04}",
        "group_id": f"g/{number // 4}",
        "task_key": f"t{number % 5}",
        "environment": chance.choice(("arithmetic", "web")),
        "reward": chance.choice((0.0, 0.5, 1.0, float("nan"))),
        "done_reason": "SUBMITTED",
        "num_tool_calls": number % 4,
        "messages": [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": " ".join(chance.choices(WORDS, k=3))},
        ],
        "turns": [{"message_start": 1, "num_messages": 1, "stop_reason": s} for s in stops],
        "sequences": [sequence],
        "failures": [failure] if chance.random() < 0.3 else [],
    } | fields


def lines_of(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


METRICS = [
    {"time": float(step), "kind": "train", "train_step": step, "lineage": "main"}
    | {"policy_version": step + 1, "reward": step / 4, "by_staleness": {"0": {"ratio": 1.0}}}
    for step in range(1, 4)
]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    chance = random.Random(0)
    return [trajectory(chance, number) for number in range(300)]


@pytest.fixture
def run_dir(rows, tmp_path) -> Path:
    (tmp_path / "trajectories.jsonl").write_text(lines_of(rows), "utf-8")
    (tmp_path / "metrics.jsonl").write_text(lines_of(METRICS))
    return tmp_path


def everything(index: RunIndex, **filters: str) -> list[TrajectorySummary]:
    return list(index.page(Filters.of(filters), sort="number", limit=500).summaries)


FILTERS: list[dict[str, str]] = [
    {},
    {"environment": "web"},
    {"outcome": "trained", "label": "running"},
    {"trajectory_id": "3a"},
    {"group_id": "g/7"},
    {"task_key": "t2", "reward": "0.5:"},
    {"reward": "0"},
    {"reward": ":0.5"},
    {"staleness": "1:"},
    {"staleness": "-9:0"},
    {"version": "3:4"},
    {"version": ":2", "length": "6:"},
    {"length": "10"},
    {"tools": "1:2"},
    {"step": "2:3"},
    {"stop_reason": "LENGTH"},
    {"owner": "TOOL"},
    {"owner": "ANY", "stop_reason": "STOP"},
    {"text": "result=12"},
    {"text": 'say "HI"'},
    {"text": "ärger"},
    {"text": "% of it_"},
    {"text": "漢字か"},
    {"text": "x')\nline", "outcome": "trained"},
    {"text": "nowhere OR Result"},
]


@pytest.fixture(scope="module")
def whole_index(rows, tmp_path_factory) -> RunIndex:
    folder = tmp_path_factory.mktemp("run")
    (folder / "trajectories.jsonl").write_text(lines_of(rows), "utf-8")
    (folder / "metrics.jsonl").write_text(lines_of(METRICS))
    index = RunIndex(folder)
    index.catch_up()
    return index


@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_a_filter_finds_what_a_plain_pass_finds(values, rows, whole_index):
    filters, versions = Filters.of(values), versions_by_step(METRICS)
    summaries = (
        (summary_of(row, number=n, versions=versions), row) for n, row in enumerate(rows, start=1)
    )
    expected = [s for s, row in summaries if filters.accepts(s, text_of(row))]
    assert everything(whole_index, **values) == expected
    assert expected or values["text"].startswith("nowhere")


@pytest.mark.parametrize("sort", ["reward", "-reward", "-staleness", "num_sampled", "-number"])
def test_pages_tile_the_sorted_list(sort, whole_index):
    whole = whole_index.page(Filters(), sort=sort, limit=500)
    pages = [whole_index.page(Filters(), sort=sort, offset=n, limit=70) for n in range(0, 300, 70)]
    assert [s for page in pages for s in page.summaries] == list(whole.summaries)
    name = sort.removeprefix("-")
    values = [v for s in whole.summaries if (v := getattr(s, name)) is not None]
    assert values == sorted(values, reverse=sort.startswith("-"))
    assert whole.total == len(whole.summaries) == 300


def test_staleness_is_counted_from_the_version_that_read_the_batch():
    row = trajectory(random.Random(0), 1, outcome="trained", train_step=3)
    summary = summary_of(row, number=1, versions={("main", 3): 9})
    assert summary.oldest is not None
    assert summary.staleness == 8 - summary.oldest
    dropped = summary_of(row | {"outcome": "stale"}, number=1, versions={("main", 3): 9})
    assert dropped.staleness == 9 - summary.oldest


def test_a_growing_run_is_read_on_and_a_torn_line_waits(run_dir, rows):
    path = run_dir / "trajectories.jsonl"
    whole = path.read_text("utf-8")
    path.write_text(lines_of(rows[:100]) + lines_of(rows[100:101])[:50], "utf-8")
    index = RunIndex(run_dir)
    assert index.catch_up().num_trajectories == 100
    path.write_text(whole, "utf-8")
    progress = index.catch_up()
    assert (progress.num_trajectories, progress.num_bad_lines) == (300, 0)
    assert progress.num_bytes == progress.num_bytes_of_run
    assert [s.trajectory_id for s in everything(index)] == [row["trajectory_id"] for row in rows]


def test_staleness_is_added_when_its_step_is_written(run_dir):
    (run_dir / "metrics.jsonl").write_text(lines_of(METRICS[:1]))
    index = RunIndex(run_dir)
    index.catch_up()
    before = everything(index, step="3", staleness="-9:9")
    (run_dir / "metrics.jsonl").write_text(lines_of(METRICS))
    index.catch_up()
    after = everything(index, step="3", staleness="-9:9")
    assert (before, bool(after)) == ([], True)


def test_a_part_that_is_full_keeps_its_numbers_and_one_that_is_deleted_goes(run_dir, rows):
    index = RunIndex(run_dir)
    index.catch_up()
    (run_dir / "trajectories.jsonl").rename(run_dir / "trajectories.000001.jsonl")
    more = [trajectory(random.Random(1), 900, trajectory_id="new")]
    (run_dir / "trajectories.jsonl").write_text(lines_of(more), "utf-8")
    assert index.catch_up().num_trajectories == 301
    assert [s.number for s in everything(index)] == list(range(1, 302))
    assert index.row(1)["messages"] == rows[0]["messages"]
    (run_dir / "trajectories.000001.jsonl").unlink()
    index.catch_up()
    assert [(s.number, s.trajectory_id) for s in everything(index)] == [(301, "new")]
    assert everything(index, text="Result=12") == everything(index, text="Result=12", step="0:9")
    with pytest.raises(NotFound):
        index.row(1)


def test_a_file_that_was_written_anew_is_read_anew(run_dir, rows):
    index = RunIndex(run_dir)
    index.catch_up()
    (run_dir / "trajectories.jsonl").write_text(lines_of(rows[200:]), "utf-8")
    with pytest.raises(Unavailable):
        index.row(290)
    index.catch_up()
    assert [s.trajectory_id for s in everything(index)] == [r["trajectory_id"] for r in rows[200:]]


def _tear(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _age(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()


@pytest.mark.parametrize("damage", [_tear, _cut, _age])
def test_an_index_that_is_torn_or_of_another_version_is_made_anew(damage, run_dir, rows):
    RunIndex(run_dir).catch_up()
    for suffix in ("-wal", "-shm"):
        (run_dir / f"index.sqlite{suffix}").unlink(missing_ok=True)
    damage(run_dir / "index.sqlite")
    index = RunIndex(run_dir)
    assert index.catch_up().num_trajectories == 300
    assert [s.trajectory_id for s in everything(index)] == [row["trajectory_id"] for row in rows]


def test_lines_that_are_no_trajectory_are_counted_and_left_out(run_dir):
    with (run_dir / "trajectories.jsonl").open("a") as file:
        file.write('{"half": \n[]\n{}\n\n')
        file.write('{"outcome": "trained", "trajectory_id": "old", "sequences": []}\n')
    index = RunIndex(run_dir)
    progress = index.catch_up()
    assert (progress.num_trajectories, progress.num_bad_lines) == (301, 4)
    (old,) = everything(index, trajectory_id="old")
    assert (old.group_id, old.oldest, old.reward) == ("", None, None)


def test_a_row_that_no_table_can_hold_stops_nothing(run_dir):
    half = trajectory(random.Random(2), 1, trajectory_id="half", task_key="\ud800 task")
    huge = trajectory(random.Random(2), 2, trajectory_id="huge", train_step=10**30)
    with (run_dir / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(half) + "\n" + json.dumps(huge) + "\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('[]\n{"kind": "train", "train_step": 1%s}\n' % ("0" * 30))
    index = RunIndex(run_dir)
    progress = index.catch_up()
    assert (progress.num_trajectories, progress.num_bad_lines) == (301, 3)
    assert everything(index, trajectory_id="half")[0].task_key == "? task"


def test_an_empty_or_missing_run_has_an_empty_index(tmp_path):
    index = RunIndex(tmp_path)
    assert index.catch_up().num_trajectories == 0
    assert index.page(Filters()).summaries == ()
    assert index.metric_names() == []


def test_a_search_text_with_fields_of_a_row_in_it_is_not_cut(run_dir):
    text = 'it said "token_ids": [1, 2], "advantage": 3'
    row = trajectory(random.Random(3), 1, messages=[{"role": "assistant", "content": text}])
    (run_dir / "trajectories.jsonl").write_text(lines_of([row]), "utf-8")
    index = RunIndex(run_dir)
    index.catch_up()
    assert index.page(Filters.of({"text": text})).total == 1


@pytest.mark.parametrize(
    "values",
    [
        {"reward": "high"},
        {"reward": "nan"},
        {"length": "1:2:3"},
        {"owner": "NOBODY"},
        {"stop_reason": "stop"},
        {"text": "ab"},
        {"text": "abc\0"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_filter_that_means_nothing_is_refused(values):
    with pytest.raises(InvalidInput) as refusal:
        Filters.of(values)
    assert next(iter(values)) in str(refusal.value)


def test_numbers_of_metrics_are_series_without_discarded_steps(run_dir):
    again = {"time": 9.0, "kind": "train", "train_step": 2, "lineage": "r1", "policy_version": 3}
    restore = {"time": 8.0, "kind": "restore", "train_step": 1, "num_warm_start_steps": 0}
    restore |= {"evaluations": [], "policy_version": None, "lineage": None}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(lines_of([restore, again | {"reward": float("nan")}]))
    index = RunIndex(run_dir)
    index.catch_up()
    points = index.points("train/reward")
    assert [(p.train_step, p.policy_version) for p in points] == [(1, 2), (2, 3)]
    assert points[0].value == 0.25
    assert points[1].value != points[1].value
    assert "train/by_staleness/0/ratio" in index.metric_names()


def test_token_numbers_come_from_the_line_and_the_debug_table(run_dir, rows):
    row = next(r for r in rows if r["outcome"] == "trained" and r["sequences"][0]["advantage"])
    sequence = row["sequences"][0]
    ids, sampled = sequence["token_ids"], range(2, len(sequence["token_ids"]))
    debug = {
        "train_step": 1,
        "trajectory_id": row["trajectory_id"],
        "num_tokens": len(ids),
        "response_positions": list(sampled),
        "response_tokens": ids[2:],
        "policy_logprobs": [-0.5] * len(sampled),
    }
    (run_dir / "debug_table.jsonl").write_text(lines_of([debug]))
    index = RunIndex(run_dir)
    index.catch_up()
    (summary,) = everything(index, trajectory_id=row["trajectory_id"])
    stored = index.row(summary.number)
    page = token_page(stored, debug_rows=index.debug_rows(row["trajectory_id"]))
    assert page.ids == ids
    assert page.logprobs == [None, None, *sequence["inference_logprobs"]]
    assert page.trainer_logprobs == [None, None, *[-0.5] * len(sampled)]
    assert page.advantages == [None, None, *[sequence["advantage"]] * len(sampled)]
    assert page.trained == [False, False, *[True] * len(sampled)]
    assert page.versions[2] == f"main-{summary.oldest}"
    part = token_page(stored, start=3, limit=2)
    assert (part.ids, part.logprobs) == (ids[3:5], page.logprobs[3:5])
    for wrong in ({"sequence": 1}, {"start": 99}, {"start": -1}):
        with pytest.raises(NotFound):
            token_page(stored, **wrong)


def test_configs_are_compared_key_by_key(tmp_path):
    for name, config in (("a", {"train": {"loss": "grpo"}, "seed": 1}), ("b", {"seed": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"config": config}))
    lines = compare_configs([flat_config(tmp_path / name) for name in ("a", "b", "c")])
    assert [(line.key, line.values, line.differs) for line in lines] == [
        ("train.loss", ('"grpo"', "-", "-"), True),
        ("seed", ("1", "1", "-"), True),
    ]


def test_a_config_says_where_values_are_from_and_which_code_ran(tmp_path):
    started = {"command": ["train", "--set", "judge.api_key=hush"], "branch_of": None}
    started |= {"origins": {"seed": "--set"}, "code": {"commit": "abc"}, "packages": {"number": 3}}
    run = {"config": {"seed": 1}, "started_with": started}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert flat_config(tmp_path) == {
        "seed": "1",
        "started_with.origins.seed": '"--set"',
        "started_with.code.commit": '"abc"',
        "started_with.packages.number": "3",
    }
    (tmp_path / "run.json").write_text(json.dumps({"config": {"seed": 1}, "started_with": [3]}))
    assert flat_config(tmp_path) == {"seed": "1"}, "of another version"


def test_a_run_that_cannot_be_written_to_is_indexed_elsewhere(run_dir, monkeypatch):
    monkeypatch.setattr("dialoop_ops.runs.index._is_writable", lambda folder: False)
    index = RunIndex(run_dir)
    assert index.catch_up().num_trajectories == 300
    assert not (run_dir / "index.sqlite").exists()
    index.close()


def test_choices_are_those_of_the_files_that_are_left(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    row = {"trajectory_id": "a", "outcome": "trained", "environment": "web", "sequences": []}
    more = row | {
        "turns": [{"stop_reason": "LENGTH"}, {"stop_reason": "STOP"}, {"stop_reason": "X"}]
    }
    more |= {"failures": [{"owner": "TOOL"}], "environment": "code", "label": "training"}
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, more)))
    index = RunIndex(tmp_path)
    index.catch_up()
    assert index.choices() == {
        "environment": ["code", "web"],
        "outcome": ["trained"],
        "label": ["training"],
        "stop_reason": ["LENGTH", "STOP"],
        "owner": ["TOOL"],
    }
    path.unlink()
    path.write_text(json.dumps(row | {"outcome": "refused"}) + "\n")  # written anew
    index.catch_up()
    assert index.choices()["environment"] == ["web"]
    assert index.choices()["outcome"] == ["refused"]
    assert index.choices()["owner"] == []
