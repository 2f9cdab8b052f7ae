"""Configs of verl and TRL as job files: what is mapped, and every other key by name."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop_extras.importers.imported import import_config
from dialoop_ops.cli.main import main
from dialoop_ops.stack.user_code import load_environments, working_in
from dialoop_services.config.file import parse_config

VERL = """
data:
  train_files: train.jsonl
  val_files: test.jsonl
  train_batch_size: 64
  max_prompt_length: 256
  max_response_length: 128
  shuffle: true
actor_rollout_ref:
  model: {path: models/m, lora_rank: 8, lora_alpha: 32, target_modules: all-linear}
  actor:
    optim: {lr: 1e-6, weight_decay: 0.01, lr_warmup_steps: -1}
    ppo_mini_batch_size: 16
    clip_ratio_high: 0.28
    use_kl_loss: true
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    loss_agg_mode: seq-mean-token-mean
    fsdp_config: {param_offload: false}
  rollout: {name: vllm, n: 5, temperature: 0.7, response_length: "${data.max_response_length}"}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, gamma: 1.0}
critic: {optim: {lr: 1e-5}}
trainer: {total_training_steps: 30, experiment_name: gsm8k/first, logger: [console, wandb, swanlab]}
custom_reward_function: {path: rewards.py, name: compute_score, reward_kwargs: {factor: 2.0}}
"""
TRL = {
    "learning_rate": 2e-6,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 64,
    "max_prompt_length": 128,
    "loss_type": "dr_grpo",
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "beta": 0.04,
    "scale_rewards": "none",
    "max_steps": 20,
    "bf16": True,
    "use_vllm": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
    "top_p": 0.9,
    "mask_truncated_completions": True,
    "report_to": ["tensorboard"],
    "model_name_or_path": "models/m",
    "dataset_name": "train.jsonl",
    "reward_funcs": ["rewards.py:is_right"],
    "reward_weights": [0.5],
}
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    return factor * (solution_str == ground_truth)

def is_right(prompts, completions, **kwargs):
    return [0.0 for _ in completions]
"""


def import_text(folder: Path, name: str, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables that are printed, and the keys left out with their reasons."""
    (folder / name).write_text(text, "utf-8")
    printed = import_config(folder / name)
    left_out = dict(re.findall(r"^# (\S+) = (.*)$", printed, re.M))
    return tomllib.loads(printed), left_out


def test_a_verl_config_becomes_a_job_that_passes_the_check(tmp_path: Path) -> None:
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2"},
    }
    for file in ("train.jsonl", "test.jsonl"):
        (tmp_path / file).write_text(json.dumps(row), "utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, "utf-8")
    job, _ = import_text(tmp_path, "ppo.yaml", VERL)
    with working_in(tmp_path):
        config = parse_config(job, source="ppo.yaml")
        (environment,) = load_environments(config)
    assert environment.tasks.splits == ("train", "heldout")
    assert job["environment"]["options"] == {
        "train_files": "train.jsonl",
        "val_files": "test.jsonl",
        "compute_score": "rewards.py:compute_score",
        "reward_kwargs": {"factor": 2.0},
    }
    assert (config.run, config.engine, config.model.directory) == ("first", "vllm", "models/m")
    assert (config.model.lora_rank, config.model.lora_alpha) == (8, 32.0)
    train, objective = config.train, config.train.objective
    assert (train.num_steps, train.groups_per_train_step, train.num_minibatches) == (30, 64, 4)
    assert (train.learning_rate, train.weight_decay, train.loss) == (1e-6, 0.01, "grpo")
    assert train.loss_options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert (objective.aggregation, objective.kl_coeff, objective.kl_estimator) == (
        "sequence",
        0.002,
        "k3",
    )
    assert (config.collector.group_size, config.collector.temperature) == (5, 0.7)
    assert (config.collector.max_new_tokens, config.inference.max_model_len) == (128, 384)
    assert config.scorer.reference_logprobs
    assert config.scorer.divide_by_std is False
    assert config.trackers.wandb


def test_every_key_of_verl_is_mapped_or_named_with_a_reason(tmp_path: Path) -> None:
    _, left_out = import_text(tmp_path, "ppo.yaml", VERL)
    assert set(left_out) == {
        "data.shuffle",
        "actor_rollout_ref.actor.optim.lr_warmup_steps",
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.rollout.response_length",
        "algorithm.gamma",
        "critic.optim.lr",
        "trainer.logger",
    }
    assert "no critic" in left_out["critic.optim.lr"]
    assert "swanlab" in left_out["trainer.logger"]
    assert all(re.search(r": \w+", text) for text in left_out.values())


ARGUMENTS = ", ".join(f"{name}={value!r}" for name, value in TRL.items())
PYTHON = f"args = GRPOConfig(output_dir=HERE / 'out', {ARGUMENTS})"


@pytest.mark.parametrize(
    ("name", "text"),
    [("grpo.json", json.dumps(TRL)), ("grpo.yaml", json.dumps(TRL)), ("g.py", PYTHON)],
)
def test_a_grpo_config_becomes_a_job_that_passes_the_check(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1"}', "utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, "utf-8")
    job, left_out = import_text(tmp_path, name, text)
    with working_in(tmp_path):
        config = parse_config(job, source=name)
        load_environments(config)
    train, objective = config.train, config.train.objective
    assert (train.num_steps, train.groups_per_train_step, train.num_minibatches) == (20, 4, 1)
    assert (train.loss, objective.aggregation, objective.kl_coeff) == ("dr_grpo", "constant", 0.04)
    assert train.loss_options == {"clip_low": 0.1, "clip_high": 0.3}
    assert (objective.correction, objective.correction_high) == ("tis", 2.0)
    assert (train.autocast, config.engine, config.evaluation.num_tasks) == ("bfloat16", "vllm", 0)
    assert (config.scorer.advantage_divisor, config.scorer.advantage_eps) == ("sum", 1e-4)
    assert config.scorer.divide_by_std is False
    assert job["environment"]["options"] == {
        "dataset": "train.jsonl",
        "reward_funcs": ["rewards.py:is_right"],
        "reward_weights": [0.5],
    }
    assert set(left_out) - {"output_dir"} == {"top_p", "mask_truncated_completions"}


def test_a_number_that_is_an_expression_is_left_out_by_name(tmp_path: Path) -> None:
    text = "GRPOConfig(num_generations=NUM, epsilon=EPS, per_device_train_batch_size=BATCH)"
    job, left_out = import_text(tmp_path, "grpo.py", text)
    assert set(left_out) == {"num_generations", "epsilon", "per_device_train_batch_size"}
    assert job["collector"]["group_size"] == 8
    assert job["train"]["loss_options"]["clip_low"] == 0.2


def test_what_the_script_says_is_to_be_filled_in(tmp_path: Path) -> None:
    (tmp_path / "grpo.json").write_text('{"learning_rate": 1e-6}', "utf-8")
    printed = import_config(tmp_path / "grpo.json")
    names = re.findall(r"^# Fill in (\S+):", printed, re.M)
    assert names == [
        "environment.options.dataset",
        "environment.options.reward_funcs",
        "model.directory",
    ]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("no.yaml", None, "No such file"),
        ("list.yaml", "[1, 2]", "holds no mapping"),
        ("bad.yaml", "a: [", "cannot be read"),
        ("bad.py", "x = (", "cannot be read"),
        ("none.py", "x = 1", "no GRPOConfig"),
        ("odd.json", '{"learning_rate": "fast"}', "learning_rate is 'fast'"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_in_words(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(InvalidConfig, match=words):
        import_config(tmp_path / name)


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grpo.json").write_text(json.dumps(TRL), "utf-8")
    assert main(["import", str(tmp_path / "grpo.json")]) == 0
    assert tomllib.loads(capsys.readouterr().out)["train"]["num_steps"] == 20
    assert main(["import", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
