from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_ops.stack.report.summary import gates_of
from dialoop_services.config.advice import warnings_for_advantages
from dialoop_services.config.file import load_config
from dialoop_services.config.job import JobConfig
from dialoop_services.trainer.settings import TrainerSettings
from rich.console import Console

from benchmarks.learn.__main__ import Suite, cases_of
from benchmarks.learn.report import AlgorithmResult, failures_of, table_of

CONFIGS = Path(__file__).parents[3] / "infra" / "configs"
ALGORITHMS = (*("cispo", "dapo", "distill", "dppo_mask", "dr_grpo", "grpo", "lora", "rloo", "sft"),)


def shipped_config(name: str) -> JobConfig:
    return load_config(CONFIGS / "learn" / f"{name}.toml", environment={})


def test_every_algorithm_ships_a_config() -> None:
    cases = cases_of(CONFIGS / "learn")
    assert tuple(case.name for case in cases) == ALGORITHMS
    assert len({case.config.run for case in cases}) == len(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_shipped_config_starts_from_the_warm_start_and_asks_for_its_gain(name: str) -> None:
    config = shipped_config(name)
    started = Path(config.model.directory).resolve() if config.model.directory else None
    warm = CONFIGS.parents[1] / "runs" / "learn" / "warm_start"
    assert started == (None if name == "sft" else warm)
    assert config.warm_start.num_steps == 0
    assert config.train.num_steps <= 50
    assert config.evaluation.num_tasks == 256
    assert config.gates.heldout_sampled_gain_at_least == 0.15
    assert (config.engine, config.store) == ("vllm", "redis")
    assert warnings_for_advantages(config) == ()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_shipped_configs_loss_takes_its_options(name: str) -> None:
    train = shipped_config(name).train
    load_objective(train.loss, train.loss_options)
    TrainerSettings(objective=train.objective)


def test_what_makes_the_algorithms_differ_is_in_their_configs() -> None:
    assert shipped_config("grpo").train.objective.kl_coeff > 0
    assert shipped_config("dr_grpo").scorer.divide_by_std is False
    assert shipped_config("dapo").scorer.drop_uniform
    assert shipped_config("rloo").scorer.leave_one_out
    assert shipped_config("lora").model.lora_rank > 0
    assert Path(shipped_config("distill").scorer.reference_model).name == "teacher"
    assert shipped_config("sft").train.mode == "sft"


def config_of(loss: str, **scorer: Any) -> JobConfig:
    return JobConfig.model_validate({"train": {"loss": loss}, "scorer": scorer})


@pytest.mark.parametrize(
    ("loss", "scorer", "divide_by_std", "leave_one_out"),
    [
        ("grpo", {}, True, False),
        ("rloo", {}, False, True),
        ("dppo_mask", {}, False, False),
        ("dppo_mask", {"divide_by_std": True}, True, False),
        ("mine:loss", {}, True, False),
    ],
)
def test_advantages_are_those_the_loss_is_meant_for_unless_the_config_says(
    loss: str, scorer: dict[str, bool], divide_by_std: bool, leave_one_out: bool
) -> None:
    baseline = config_of(loss, **scorer).scorer.baseline_for(loss)
    assert baseline == {"divide_by_std": divide_by_std, "leave_one_out": leave_one_out}


def test_a_loss_with_others_advantages_is_warned_of() -> None:
    (warning,) = warnings_for_advantages(config_of("rloo", leave_one_out=False))
    assert "rloo is meant for leave_one_out = true in [scorer]" in warning
    (warning,) = warnings_for_advantages(config_of("dapo"))
    assert "drop_uniform = true" in warning
    assert not warnings_for_advantages(JobConfig())
    assert not warnings_for_advantages(config_of("grpo", divide_by_std=False))
    assert not warnings_for_advantages(config_of("rloo", advantage_estimator="mine:rloo"))


def summary(gain: float | None = 0.5, **changes: Any) -> dict[str, Any]:
    return {
        "accounting": {"ledger_adds_up": True, "collectors_agree": True, "trainer_agrees": True},
        "staleness_histogram": {"0": 8},
        "max_logprob_difference": 1e-6,
        "rescoring": {"max_difference": 2e-6},
        "heldout_sampled_before": 0.4,
        "heldout_sampled_after": 0.4 + (gain or 0),
        "heldout_sampled_gain": gain,
        "heldout_greedy_before": 0.1,
        "heldout_greedy_after": None,
        "tool_call_rate_before": 0.4,
        "tool_call_rate_after": 1.0,
        "num_train_steps": 20,
        "num_steps": 20,
        "num_refused_updates": 0,
        "stopped_early": "",
        "gave_up": "",
        "undecided_evaluations": [],
        "alarms": [],
        "wall_s": 100.0,
        "cpu_s": 150.0,
        **changes,
    }


@pytest.mark.parametrize(("gain", "holds"), [(0.15, True), (0.149, False), (None, False)])
def test_the_gain_is_a_gate(gain: float | None, holds: bool) -> None:
    gates = gates_of(summary(gain), shipped_config("grpo"))
    assert gates["heldout_sampled_gain at least 0.15"] is holds


class Runs:
    """Trains nothing: leaves the summaries that were given, and remembers what was asked."""

    def __init__(self, root: Path, gains: dict[str, float | None]) -> None:
        self.root, self.gains = root, gains
        self.trained: list[str] = []
        self.exported: list[tuple[str, str]] = []

    def train(self, path: Path) -> int:
        self.trained.append(path.stem)
        config = load_config(path, environment={})
        if path.stem not in self.gains:
            return 1
        run = self.root / config.run
        run.mkdir(parents=True, exist_ok=True)
        result = summary(self.gains[path.stem])
        result["gates"] = {"gain": (self.gains[path.stem] or 0) >= 0.15}
        (run / "summary.json").write_text(json.dumps(result))
        (run / "run.json").write_text(json.dumps({"run_id": f"{config.run}-1"}))
        return 0 if result["gates"]["gain"] else 1

    def export(self, run_dir: Path, version: str, target: Path) -> None:
        self.exported.append((version, target.name))


TEXT = 'run = "{name}"\n[model]\ndirectory = "runs/learn/warm_start"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("demo", "good", "other"):
        (tmp_path / f"{name}.toml").write_text(TEXT.format(name=name))
    (tmp_path / "alone.toml").write_text('run = "alone"\n')
    return tmp_path


RunSuite = Callable[[str, Runs], int]


@pytest.fixture
def run_suite(folder: Path) -> RunSuite:
    def run(only: str, runs: Runs) -> int:
        suite = Suite(
            demo=folder / "demo.toml",
            root=folder / "runs",
            train=runs.train,
            export=runs.export,
            console=Console(quiet=True),
        )
        return suite.run(cases_of(folder, only))

    return run


def rows_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "runs" / "learn" / "summary.json").read_text())
    return {row["name"]: row for row in content["runs"]}


def test_the_demo_runs_first_and_gives_both_models(folder: Path, run_suite: RunSuite) -> None:
    runs = Runs(folder / "runs", {"demo": 0.5, "good": 0.3, "other": 0.2})
    assert run_suite("good,other", runs) == 0
    assert runs.trained == ["demo", "good", "other"]
    assert runs.exported == [("main-1", "warm_start"), ("latest", "teacher")]
    assert run_suite("good", runs) == 0
    assert runs.trained[3:] == ["good"]  # a finished demo is not run again
    rows = rows_of(folder)
    assert set(rows) == {"good", "other"}  # the other's row of the first call stays
    assert rows["good"]["start"] == "demo-1"


def test_one_failing_gate_is_exit_code_1_and_the_rest_still_runs(
    folder: Path, run_suite: RunSuite
) -> None:
    runs = Runs(folder / "runs", {"demo": 0.5, "good": 0.1, "other": 0.2})
    assert run_suite("good,other", runs) == 1
    assert runs.trained == ["demo", "good", "other"]
    assert rows_of(folder)["good"]["gates"] == {"gain": False}


def test_a_run_that_ends_without_a_summary_fails(folder: Path, run_suite: RunSuite) -> None:
    assert run_suite("good", Runs(folder / "runs", {"demo": 0.5, "good": 0.5})) == 0
    assert run_suite("good", Runs(folder / "runs", {})) == 1  # an earlier summary does not help it
    assert rows_of(folder)["good"]["figures"] == {}


def test_a_demo_that_did_not_learn_ends_it(folder: Path, run_suite: RunSuite) -> None:
    runs = Runs(folder / "runs", {"demo": 0.1})
    assert run_suite("good", runs) == 1
    assert runs.trained == ["demo"]


def test_what_needs_no_demo_runs_without_one(folder: Path, run_suite: RunSuite) -> None:
    runs = Runs(folder / "runs", {"alone": 0.5})
    assert run_suite("alone", runs) == 0
    assert runs.trained == ["alone"]


def test_a_run_that_was_told_to_stop_stops_the_rest(folder: Path, run_suite: RunSuite) -> None:
    runs = Runs(folder / "runs", {})
    runs.train = lambda path: 130  # type: ignore[method-assign]
    assert run_suite("alone,good", runs) == 130


def test_a_name_without_a_config_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no config ppo") as caught:
        cases_of(CONFIGS / "learn", "grpo,ppo")
    assert "cispo" in caught.value.remedy


def test_the_table_shows_gain_and_what_failed() -> None:
    good = AlgorithmResult.of("grpo", summary() | {"gates": {"gain": True}}, start="d", seed=0)
    bad = AlgorithmResult.of("rloo", summary(0.1) | {"gates": {"gain": False}}, start="d", seed=0)
    gone = AlgorithmResult.of("dapo", None, start="d", seed=0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of([good, bad, gone]))
    text = console.export_text()
    assert "0.40 -> 0.90" in text
    assert failures_of([good, bad, gone]) == ["rloo, seed 0: gain"]
    assert "FAIL" in text
    assert "…" not in text
    assert "no end" in text
