"""What a run leaves to read: whole lines, whatever a kill or a policy wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from dialoop import testing
from dialoop.chat import History, Message
from dialoop.sequences import Along, Column, PolicyVersion, Source, sequence_of
from dialoop.trajectory import Reward, Trajectory, Turn
from dialoop_ops.policies.rescore import (
    RowSample,
    SampledTokens,
    batches_of,
    sampled_by_version,
)
from dialoop_ops.stack.report.summary import count_outcomes
from dialoop_services.trainer.data.demonstrations import read_demonstrations
from dialoop_services.trainer.records import records
from dialoop_services.trainer.records.records import RunRecords
from dialoop_services.trainer.records.rows import trajectory_files

VERSION = PolicyVersion(lineage="main", number=3)
SEPARATORS = "a\u2028b\x85c\x0bd"


def trajectory(text: str, **labels: str) -> Trajectory:
    sampled = {"source": Source.MODEL, "policy_version": VERSION}
    row = sequence_of([([1, 2], {"source": Source.PROMPT}), ([3], sampled)], logprobs=[-0.5])
    history = History((Message(role="user", content=text),))
    return testing.trajectory(history=history, turns=(), sequences=(row,), labels=labels)


def write(run_dir: Path, text: str, **labels: str) -> None:
    records = RunRecords(run_dir)
    records.trajectories(
        [trajectory(text, **labels)], outcome="trained", label="training", train_step=1
    )
    records.metric("train", train_step=1, policy_version=VERSION, reward=1.0)
    records.close()


def test_a_log_tells_how_far_the_job_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dialoop_services")
    records = RunRecords(tmp_path)
    records.metric("train", train_step=3, policy_version=VERSION, reward=2 / 3, grad_norm=1.0)
    records.metric("publish", train_step=3, policy_version=VERSION, num_bytes=7)
    records.close()
    [line] = caplog.records
    assert line.message == "A train step is done."
    assert (vars(line)["train_step"], vars(line)["reward"]) == (3, 0.6667)


def test_further_columns_are_recorded(tmp_path: Path) -> None:
    made = trajectory("x")
    experts = Column(values=np.array([[1, 2], [3, 4], [5, 6]], np.uint8), along=Along.TOKENS)
    row = replace(made.sequences[0], columns={"routed_experts": experts})
    records = RunRecords(tmp_path)
    records.trajectories(
        [replace(made, sequences=(row,))], outcome="trained", label="training", train_step=1
    )
    records.close()
    (line,) = (tmp_path / "trajectories.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["sequences"][0]["columns"] == {
        "routed_experts": {
            "data_type": "uint8",
            "along": "TOKENS",
            "data": [[1, 2], [3, 4], [5, 6]],
        }
    }


def test_a_line_has_what_the_trajectory_has_beside_its_tokens(tmp_path: Path) -> None:
    rewards = (
        Reward(name="right", value=0.0, success=False, feedback="2 is not 3"),
        Reward(name="brief", value=1.0, weight=0.5),
        Reward(name="brief", value=1.0),
    )
    made = replace(
        trajectory("x", trial_rewards="1 0"),
        turns=(Turn(message_start=0, num_messages=1, rewards=rewards),),
        seed=1 << 40,
        environment_version="v2",
        terminated=False,
        truncated=True,
    )
    records = RunRecords(tmp_path)
    records.trajectories([made], outcome="trained", label="training", train_step=1)
    records.close()
    line = json.loads((tmp_path / "trajectories.jsonl").read_text("utf-8"))
    assert (line["seed"], line["environment_version"]) == (1 << 40, "v2")
    assert (line["terminated"], line["truncated"]) == (False, True)
    assert line["labels"] == {"trial_rewards": "1 0"}
    (turn,) = line["turns"]
    assert turn["rewards"] == {"right": 0.0, "brief": 1.5}
    assert turn["success"] == {"right": False}
    assert turn["feedback"] == {"right": "2 is not 3"}


def test_the_line_that_a_kill_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    write(tmp_path, "first")
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write('{"half": "' + "x" * 100_000)
    write(tmp_path, "second")
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        lines = (tmp_path / name).read_text("utf-8").splitlines()
        assert len([json.loads(line) for line in lines]) == 2


def test_the_oldest_part_of_the_trajectories_goes_when_they_come_to_too_much(
    tmp_path: Path,
) -> None:
    records = RunRecords(tmp_path, max_trajectory_bytes=40_000)
    for number in range(100):
        long = replace(trajectory("x" * 900), trajectory_id=str(number))
        records.trajectories([long], outcome="trained", label="training", train_step=1)
    records.close()
    files = trajectory_files(tmp_path)
    assert len(files) == 4
    assert files[-1].name == "trajectories.jsonl"
    assert 20_000 < sum(file.stat().st_size for file in files) < 44_000
    kept = [
        json.loads(line)["trajectory_id"]
        for file in files
        for line in file.read_text().splitlines()
    ]
    assert kept == [str(number) for number in range(100 - len(kept), 100)]
    assert sampled_by_version(*files).num_trajectories == len(kept)
    assert count_outcomes(tmp_path) == {"trained": len(kept)}
    again = RunRecords(tmp_path, max_trajectory_bytes=40_000)
    again.trajectories([trajectory("x" * 9000)], outcome="t", label="training", train_step=2)
    again.close()
    assert len(trajectory_files(tmp_path)) == 4


def test_without_a_bound_new_parts_are_started_and_none_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_PART_BYTES", 10_000)
    for _ in range(12):
        write(tmp_path, "x" * 9000)
    files = trajectory_files(tmp_path)
    assert len(files) > 4
    assert sum(len(file.read_text().splitlines()) for file in files) == 12


def test_a_first_line_cut_short_leaves_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"half', "utf-8")
    RunRecords(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_sampled_line_separator_does_not_end_a_row(tmp_path: Path) -> None:
    write(tmp_path, SEPARATORS)
    stored = sampled_by_version(tmp_path / "trajectories.jsonl")
    assert stored.num_trajectories == 1
    ((key, sample),) = stored.sampled.items()
    assert key == ("main-3", 1.0)
    (sampled,) = sample.rows
    assert np.array_equal(sampled.logprobs, np.array([-0.5], dtype=np.float32))


def test_what_kept_its_keys_through_a_load_is_not_rescored_and_counted(tmp_path: Path) -> None:
    for labels in ({}, {"update_mode": "KEEP_KV"}, {"update_mode": "WAIT"}):
        write(tmp_path, "7", **labels)
    stored = sampled_by_version(tmp_path / "trajectories.jsonl")
    assert (stored.num_trajectories, stored.num_inexact_trajectories) == (2, 1)
    assert len(stored.sampled["main-3", 1.0].rows) == 2


def test_a_version_with_much_data_is_sampled_evenly() -> None:
    sample, random = RowSample(), Random(0)
    row = SampledTokens(token_ids=(), positions=np.zeros(0, int), logprobs=np.zeros(0, np.float32))
    for number in range(2560):
        sample.add(replace(row, token_ids=(number,)), random)
    assert (sample.num_seen, len(sample.rows)) == (2560, 256)
    # Were the sample the first or the last rows, this mean would be 128 or 2432.
    assert 1150 < np.mean([row.token_ids[0] for row in sample.rows]) < 1410


def test_rows_are_scored_in_batches_of_tokens_not_of_rows() -> None:
    row = SampledTokens(
        token_ids=(1,) * 30, positions=np.zeros(0, int), logprobs=np.zeros(0, np.float32)
    )
    longer = replace(row, token_ids=(1,) * 200)
    batches = list(batches_of([row, row, row, row, longer, row], 100))
    assert [len(batch) for batch in batches] == [3, 1, 1, 1]


def test_a_demonstration_may_hold_any_line_separator(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": SEPARATORS}, {"role": "assistant", "content": "4"}]
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n", "utf-8")
    (shown,) = read_demonstrations(path)
    assert shown.history[0].content == SEPARATORS
