"""Jobs from Python, in this process: rows of metrics, a summary, and a quick end."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import dialoop_ops
import pytest
from dialoop.agents import AgentConnection, AgentTask
from dialoop.errors import InvalidConfig, PreconditionFailed
from openai import AsyncOpenAI

ROOT = Path(__file__).parents[3]
TINY: dict[str, Any] = {
    "run": "tiny",
    "train": {"mode": "sft", "num_steps": 2},
    "sft": {"batch_size": 4},
    "evaluation": {"num_tasks": 0},
}


def test_the_documented_job_trains_in_this_process_and_gives_rows_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    match = re.search(r"<!-- test: train_in_python -->\n```python\n(.*?)```", page, re.S)
    assert match is not None
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(match[1], names)
    result, shown = names["result"], capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("train ")] == [
        "train 1",
        "train 2",
    ]
    assert result.run_dir == Path("runs", "tiny")
    assert result.summary == json.loads((result.run_dir / "summary.json").read_text("utf-8"))
    assert result.summary["num_train_steps"] == 2
    assert result.succeeded, result.summary["gates"]


def test_leaving_a_job_before_its_end_stops_it_at_once(tmp_path: Path) -> None:
    endless = {**TINY, "train": {"mode": "sft", "num_steps": 10_000}}
    with dialoop_ops.BlockingJob(endless, in_process=True, folder=tmp_path) as job:
        next(row for row in job.metrics() if row["kind"] == "train")
        started = time.process_time()
    assert time.process_time() - started < 2.0


_GIVEN = itertools.count()


async def ask_once(task: AgentTask, connection: AgentConnection) -> float:
    """Ask the policy over its OpenAI door, as an agent of a user's own does."""
    async with AsyncOpenAI(base_url=connection.base_url, api_key=connection.api_key) as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "1+1"}], max_tokens=4
        )
    assert answer.choices
    return float(next(_GIVEN) % 2)


async def test_agents_play_in_this_process_too(tmp_path: Path) -> None:
    async def count(row: dict[str, Any]) -> None:
        kinds.append(row["kind"])

    kinds: list[str] = []
    config = {
        "run": "agents",
        "collector": {"group_size": 4},
        "environment": {"agent": f"{__name__}:ask_once"},
        "train": {"num_steps": 1, "groups_per_train_step": 2, "pipeline_depth": 0},
        "evaluation": {"num_tasks": 0},
    }
    result = await dialoop_ops.train_async(
        config, on_metrics=count, in_process=True, folder=tmp_path
    )
    assert "train" in kinds
    played = result.summary["accounting"]["played_by_collectors"]
    assert played["training"] >= 4, result.summary
    assert result.summary["trajectories"]["trained"] >= 2


async def test_a_finished_job_that_is_resumed_accounts_for_what_was_played_before(
    tmp_path: Path,
) -> None:
    """Its queue was lost with the process, and the run failed its own gate."""
    config = {
        "run": "resumed",
        "collector": {"group_size": 4},
        "environment": {"agent": f"{__name__}:ask_once"},
        "train": {"num_steps": 1, "groups_per_train_step": 2, "pipeline_depth": 0},
        "evaluation": {"num_tasks": 0},
    }
    for _ in range(2):
        result = await dialoop_ops.train_async(config, in_process=True, folder=tmp_path, quiet=True)
        assert result.summary["num_train_steps"] == 1
        assert result.summary["gates"]["every trajectory is accounted for"], result.summary
    assert (result.run_dir / "queue.rdb").is_file()


async def test_a_blocking_call_inside_an_event_loop_is_refused() -> None:
    with pytest.raises(PreconditionFailed, match="train_async"):
        dialoop_ops.train(TINY, in_process=True)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_mistake_in_the_config_is_raised_before_anything_starts(
    in_process: bool, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'grpo'"):
        dialoop_ops.Job({"train": {"loss": "grop"}}, in_process=in_process, folder=tmp_path)
    (tmp_path / "job.toml").write_text("[trian]\n")
    with pytest.raises(InvalidConfig, match=r"job\.toml has an unknown key 'trian'"):
        dialoop_ops.Job(tmp_path / "job.toml", in_process=in_process, folder=tmp_path)


def test_a_mistake_that_only_the_stack_finds_is_raised_too(tmp_path: Path) -> None:
    config = {"engine": "transformers", "store": "memory", "environment": {"use": "arithmetics"}}
    with pytest.raises(InvalidConfig, match="Did you mean 'arithmetic'"):
        dialoop_ops.train(config, folder=tmp_path, quiet=True)
    assert not (tmp_path / "default").exists()
