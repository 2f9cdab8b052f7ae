"""The reasoning race: our job is a valid one, and clocks are read as the benchmark says."""

import json
from pathlib import Path

import pytest
from dialoop_services.config.file import parse_config
from safetensors.torch import load_file

from benchmarks.reasoning_race import FIGURES, RaceOptions, ratios
from benchmarks.servers.race import (
    Ready,
    Recipe,
    first_above,
    job_of,
    read_ours,
    read_trl,
    warm_start,
)


def test_all_start_from_a_model_that_our_supervised_steps_made(tmp_path: Path) -> None:
    model = warm_start(tmp_path / "model", Recipe(sft_steps=1))
    assert {"config.json", "tokenizer.json"} < {path.name for path in model.iterdir()}
    assert load_file(model / "model.safetensors")


@pytest.mark.parametrize("name", ["vllm", "transformers", "in_process"])
def test_our_jobs_differ_in_engine_and_store_alone(name: str) -> None:
    job = parse_config(job_of(name, Path("model"), Recipe()), source="the race")
    assert job.engine == ("vllm" if name == "vllm" else "transformers")
    assert job.store == ("memory" if name == "in_process" else "redis")
    shipped = parse_config({"train": {}}, source="defaults").train
    assert job.train.max_staleness == shipped.max_staleness
    assert job.collector.group_size * job.train.groups_per_train_step == 128
    assert job.train.keep_policies == 0, "a policy that is gone cannot be evaluated afterwards"


def test_our_clock_begins_with_the_first_live_policy(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "race"
    run_dir.mkdir(parents=True)
    row = {"kind": "publish", "lineage": "main"}
    rows = [
        {"kind": "restore", "time": 101.0},
        row | {"time": 107.0, "train_step": 0, "policy_version": 1},
        {"kind": "train", "time": 108.0},
        row | {"time": 108.5, "train_step": 1, "policy_version": 2},
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    phases = {"training": {"wall_s": 1.5, "cpu_s": 2.5}}
    (run_dir / "summary.json").write_text(json.dumps({"seconds_by_phase": phases}), "utf-8")
    run = read_ours(tmp_path, started=100.0)
    assert (run.start_up_s, run.rl_cpu_s) == (7.0, 2.5)
    path = run_dir / "policies" / "main-2" / "model.safetensors"
    assert run.policies == (Ready(train_step=1, rl_s=1.5, path=path),)


def test_trls_clock_begins_with_its_training(tmp_path: Path) -> None:
    steps = [{"train_step": 1, "rl_s": 0.5, "cpu_s": 0.9}]
    (tmp_path / "trl.json").write_text(json.dumps({"begun_s": 104.0, "train_steps": steps}))
    run = read_trl(tmp_path, started=100.0)
    assert (run.start_up_s, run.rl_cpu_s) == (4.0, 0.9)
    assert run.policies[0].path == tmp_path / "1.safetensors"


def test_the_first_policy_that_is_good_enough_counts() -> None:
    curve = [
        (Ready(train_step=step, rl_s=step / 2, path=Path()), accuracy)
        for step, accuracy in ((2, 0.5), (4, 0.86), (6, 0.84), (8, 0.9))
    ]
    point = first_above(curve, 0.85)
    assert point is not None
    assert point.train_step == 4
    assert first_above(curve, 0.95) is None


def test_we_are_compared_with_the_better_of_trls_two() -> None:
    options = RaceOptions(
        contenders=["vllm", "trl", "trl_one_thread"],
        trl_python="python",
        model="",
        threshold=0.85,
        every=2,
        samples=2,
    )
    outcome = {
        "vllm": dict.fromkeys(FIGURES, 6.0),
        "trl": dict.fromkeys(FIGURES, 10.0),
        "trl_one_thread": dict.fromkeys(FIGURES, 8.0) | {"rl_s_to_threshold": None},
    }
    result = ratios([{"seed": 0, **outcome}], options)
    assert result["vllm"]["s_per_train_step"] == 0.75
    assert result["vllm"]["rl_s_to_threshold"] == 0.6
