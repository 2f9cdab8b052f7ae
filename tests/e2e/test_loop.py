"""The whole loop over real processes: Redis, vLLM, and every service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.stack_jobs import Job, assert_accounted, lines_of, write_config

NUM_TRAIN_STEPS = 4
FIELDS = (
    "engine",
    "versions",
    "seed",
    "num_parameters",
    "wall_s",
    "cpu_s",
    "seconds_by_phase",
    "heldout_greedy_before",
    "heldout_greedy_after",
    "heldout_sampled_before",
    "heldout_sampled_after",
    "tool_call_rate_before",
    "tool_call_rate_after",
    "num_train_steps",
    "num_policy_versions",
    "groups",
    "trajectories",
    "staleness_histogram",
    "tokens_per_s_generated",
    "tokens_per_s_trained",
    "max_logprob_difference",
    "share_of_train_steps_with_older_data",
    "forks",
)


@pytest.mark.vllm
@pytest.mark.redis
@pytest.mark.timeout(420)
def test_the_whole_loop_runs_exactly_and_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: see `make setup`")
    config = write_config(
        tmp_path,
        engine="vllm",
        num_warm_start_steps=60,
        num_train_steps=NUM_TRAIN_STEPS,
    )
    with Job(tmp_path, "train", str(config)) as job:
        ended = job.end(timeout_s=400)
    assert ended.exit_code == 0, ended.output
    assert job.left_running() == {}

    summary = ended.summary
    assert set(FIELDS) <= set(summary)
    assert all(summary["gates"].values()), summary["gates"]
    assert_accounted(summary)
    assert summary["engine"] == "vllm"
    assert summary["versions"]["vllm"]
    assert summary["num_train_steps"] == NUM_TRAIN_STEPS
    assert summary["num_policy_versions"] >= NUM_TRAIN_STEPS
    assert 0 < summary["max_logprob_difference"] <= 1e-4
    assert summary["rescoring"]["num_tokens"] > 0
    assert summary["rescoring"]["max_difference"] <= 1e-4
    assert_files_hold_what_the_summary_says(ended.run_dir, summary["trajectories"]["trained"])


def assert_files_hold_what_the_summary_says(run_dir: Path, num_trained: int) -> None:
    kinds = [json.loads(line)["kind"] for line in lines_of(run_dir / "metrics.jsonl")]
    assert {"warm_start", "publish", "train", "evaluation"} <= set(kinds)
    rows = [json.loads(line) for line in lines_of(run_dir / "trajectories.jsonl")]
    assert sum(row["outcome"] == "trained" for row in rows) == num_trained
    assert (run_dir / "learning.png").read_bytes().startswith(b"\x89PNG")
