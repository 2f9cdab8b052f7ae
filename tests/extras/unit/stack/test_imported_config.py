"""Configs of verl and TRL as job files: what is mapped, and every other key by name.

What a file leaves out is as the other package has it, by the committed table of its defaults.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from dialoop.errors import InvalidConfig
from dialoop_extras.importers.foreign_keys import tables
from dialoop_extras.importers.imported import import_config
from dialoop_ops.cli.main import main
from dialoop_ops.stack.devices import nodes_of, plan_devices
from dialoop_ops.stack.user_code import load_environments, working_in
from dialoop_services.config.file import parse_config

from infra import foreign_defaults

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
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
    }
    assert (config.run, config.engine, config.model.directory) == ("first", "vllm", "models/m")
    assert (config.model.lora_rank, config.model.lora_alpha) == (8, 32.0)
    train, objective = config.train, config.train.objective
    assert (train.num_steps, train.groups_per_train_step, train.num_minibatches) == (30, 64, 4)
    assert (train.learning_rate, train.weight_decay, train.loss) == (1e-6, 0.01, "grpo")
    assert train.weight_decay_all
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
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.rollout.response_length",
        "algorithm.gamma",
        "critic.optim.lr",
        "trainer.logger",
        "trainer.save_freq",  # verl's default, which Dialoop does not have
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
    assert (train.schedule, train.learning_rate_floor, train.betas) == ("linear", 0, (0.9, 0.999))


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
    assert set(names) == {
        "environment.options.dataset",
        "environment.options.reward_funcs",
        "model.directory",
        "train.num_steps",
    }


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("no.yaml", None, "No such file"),
        ("list.yaml", "[1, 2]", "holds no mapping"),
        ("bad.yaml", "a: [", "cannot be read"),
        ("bad.py", "x = (", "cannot be read"),
        ("none.py", "x = 1", "calls none of GRPOConfig"),
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


def rows_of(folder: Path, name: str, count: int) -> None:
    (folder / name).write_text('{"prompt": "1+1"}\n' * count, "utf-8")


def values_of(job: dict[str, Any], *paths: str) -> list[Any]:
    values = []
    for path in paths:
        value: Any = job
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        values.append(value)
    return values


# For our keys, the fields of TRL's classes.
SAME_IN_TRL = {
    "GRPOConfig": {
        "collector.group_size": "num_generations",
        "collector.max_new_tokens": "max_completion_length",
        "collector.temperature": "temperature",
        "train.objective.num_epochs": "num_iterations",
        "train.loss_options.clip_low": "epsilon",
        "train.checkpoint_every": "save_steps",
    },
    "AsyncGRPOConfig": {
        "collector.group_size": "num_generations",
        "collector.max_new_tokens": "max_completion_length",
        "train.max_staleness": "max_staleness",
        "train.loss_options.clip_low": "epsilon",
    },
    "SFTConfig": {
        "train.max_row_tokens": "max_length",
        "sft.batch_size": "per_device_train_batch_size",
    },
}
SAME_IN_ALL = {
    "train.learning_rate": "learning_rate",
    "train.schedule": "lr_scheduler_type",
    "train.weight_decay": "weight_decay",
    "train.max_grad_norm": "max_grad_norm",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.num_warmup_updates": "warmup_steps",
    "seed": "seed",
}


@pytest.mark.parametrize("kind", SAME_IN_TRL)
def test_what_a_config_of_trl_leaves_out_is_as_its_class_has_it(tmp_path: Path, kind: str) -> None:
    job, _ = import_text(tmp_path, "train.py", f"args = {kind}(output_dir='out', max_steps=9)")
    table = tables()
    defaults = table["TrainingArguments"] | table["_BaseConfig"] | table[kind]
    same = SAME_IN_ALL | SAME_IN_TRL[kind]
    if defaults["lr_scheduler_type"] == "constant":
        same = {ours: name for ours, name in same.items() if name != "warmup_steps"}
    assert values_of(job, *same) == [defaults[name] for name in same.values()]
    betas = [defaults["adam_beta1"], defaults["adam_beta2"]]
    assert values_of(job, "train.betas", "train.autocast", "train.num_steps") == [
        betas,
        "bfloat16",  # TRL sets bf16 unless fp16 is set
        9,
    ]


def test_what_a_config_of_verl_leaves_out_is_as_its_yaml_has_it(tmp_path: Path) -> None:
    job, left_out = import_text(tmp_path, "ppo.yaml", "data: {}\nalgorithm: {}\n")
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    same = {
        "train.learning_rate": f"{actor}.optim.lr",
        "train.betas": f"{actor}.optim.betas",
        "train.schedule": f"{actor}.optim.lr_scheduler_type",
        "train.weight_decay": f"{actor}.optim.weight_decay",
        "train.max_grad_norm": f"{actor}.optim.clip_grad",
        "train.loss_options.clip_low": f"{actor}.clip_ratio_low",
        "train.loss_options.clip_high": f"{actor}.clip_ratio_high",
        "train.loss_options.dual_clip": f"{actor}.clip_ratio_c",
        "train.groups_per_train_step": "data.train_batch_size",
        "collector.max_new_tokens": "data.max_response_length",
        "collector.temperature": f"{rollout}.temperature",
        "inference.max_num_seqs": f"{rollout}.max_num_seqs",
        "inference.tensor_parallel_size": f"{rollout}.tensor_model_parallel_size",
        "inference.dtype": f"{rollout}.dtype",
        "resources.num_nodes": "trainer.nnodes",
        "resources.gpus_per_node": "trainer.n_gpus_per_node",
    }
    defaults = tables()["verl"]
    assert values_of(job, *same) == [defaults[name] for name in same.values()]
    assert job["train"]["num_minibatches"] == 1024 // 256
    # A group of one and advantages of a critic are verl's defaults, and Dialoop has neither.
    assert {"algorithm.adv_estimator", f"{rollout}.n"} <= left_out.keys()
    printed = import_config(tmp_path / "ppo.yaml")
    assert "# Fill in model.directory" in printed
    assert "# Fill in train.num_steps: it is 30 epochs" in printed


@pytest.mark.parametrize(("kind", "floor"), [("cosine", 0.2), ("constant", None)])
def test_a_floor_is_carried_over_where_the_rate_falls(
    tmp_path: Path, kind: str, floor: float | None
) -> None:
    optim = f"{{lr_scheduler_type: {kind}, min_lr_ratio: 0.2}}"
    text = f"actor_rollout_ref: {{actor: {{optim: {optim}}}}}\ndata: {{}}\nalgorithm: {{}}\n"
    job, left_out = import_text(tmp_path, "ppo.yaml", text)
    assert job["train"].get("learning_rate_floor") == floor
    assert not any("min_lr_ratio" in key for key in left_out)


def test_a_share_of_steps_and_epochs_become_numbers_of_steps(tmp_path: Path) -> None:
    """transformers rounds a share of the updates up; an epoch of TRL drops what fills no batch."""
    rows_of(tmp_path, "rows.jsonl", 50)
    text = "dataset_name: rows.jsonl\nnum_train_epochs: 2\nwarmup_steps: 0.1\n"
    text += "gradient_accumulation_steps: 4\nnum_generations: 8\n"
    job, _ = import_text(tmp_path, "grpo.yaml", text)
    assert job["train"]["groups_per_train_step"] == 4
    assert (job["train"]["num_steps"], job["train"]["num_warmup_updates"]) == (24, 3)
    text = "GRPOConfig(max_steps=200, warmup_ratio=0.1, steps_per_generation=2, num_iterations=2)"
    job, _ = import_text(tmp_path, "grpo.py", text)
    # Four updates a train step, so 50 of these; TRL's steps and warm-up count updates.
    assert (job["train"]["num_steps"], job["train"]["num_warmup_updates"]) == (50, 20)
    job, left_out = import_text(tmp_path, "c.yaml", "beta: 0.0\nmax_steps: 200\nwarmup_steps: 0.1")
    assert (job["train"]["num_warmup_updates"], job["train"]["schedule"]) == (20, "linear")
    assert not left_out
    rows_of(tmp_path, "train.jsonl", 130)
    text = VERL.replace("total_training_steps: 30", "total_epochs: 3").replace(
        "lr_warmup_steps: -1", "lr_warmup_steps_ratio: 0.5"
    )
    job, _ = import_text(tmp_path, "ppo.yaml", text)
    # 2 batches of 64 an epoch; half of 6 steps of 4 updates.
    assert (job["train"]["num_steps"], job["train"]["num_warmup_updates"]) == (6, 12)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("nnodes: 1, n_gpus_per_node: 1", ["cuda", 1, 1, "shared", "local"]),
        ("nnodes: 1, n_gpus_per_node: 8", ["cuda", 4, 2, "split", "local"]),
        ("nnodes: 2, n_gpus_per_node: 8", ["cuda", 8, 4, "split", "ray"]),
        ("device: cpu", ["cpu", 1, 1, "split", "local"]),
    ],
)
def test_devices_and_nodes_are_carried(tmp_path: Path, devices: str, expected: list[Any]) -> None:
    text = VERL.replace("trainer: {", f"trainer: {{{devices}, ")
    job, left_out = import_text(tmp_path, "ppo.yaml", text)
    config = parse_config(job, source="ppo.yaml")
    train, inference = config.train, config.inference
    placed = [train.device, train.num_processes, inference.num_replicas]
    assert [*placed, config.placement, config.launch.on] == expected
    if expected[0] == "cuda":
        plan_devices(config, nodes_of(config, {}))  # it has room for all processes
    else:
        assert "trainer.device" in left_out


@pytest.mark.parametrize(
    ("name", "text", "rank", "alpha", "targets"),
    [
        ("g.yaml", "peft_config: {r: 4, lora_alpha: 16, target_modules: [q_proj]}", 4, 16, 1),
        ("g.yaml", "peft_config: {use_rslora: true, target_modules: all-linear}", 8, 8 * 8**0.5, 0),
        ("g.yaml", "use_peft: true\nnum_generations: 8\n", 16, 32, 2),
        ("g.py", "GRPOConfig(beta=0.1); peft_config = LoraConfig(r=2, lora_alpha=4)", 2, 4, 2),
        ("g.py", "lora = peft.LoraConfig(r=2)\nargs = trl.GRPOConfig(beta=0.1)", 2, 8, 2),
    ],
)
def test_an_adapter_is_carried(
    tmp_path: Path, name: str, text: str, rank: int, alpha: float, targets: int
) -> None:
    job, _ = import_text(tmp_path, name, text)
    model = job["model"]
    assert (model["lora_rank"], len(model.get("lora_targets", ()))) == (rank, targets)
    assert model["lora_alpha"] == pytest.approx(alpha)


def test_an_adapter_that_trl_would_not_train_is_left_out_by_name(tmp_path: Path) -> None:
    job, left_out = import_text(tmp_path, "g.yaml", "lora_r: 8\nnum_generations: 8\n")
    assert "lora_rank" not in job["model"]
    assert "use_peft is not set" in left_out["lora_r"]
    (tmp_path / "g.py").write_text("GRPOConfig(peft_config=mine())", "utf-8")
    printed = import_config(tmp_path / "g.py")
    assert "# Fill in model.lora_rank: peft_config is not written out" in printed


def test_prompts_have_the_models_positions_as_in_trl(tmp_path: Path) -> None:
    model = tmp_path / "models" / "m"
    model.mkdir(parents=True)
    text = json.dumps({"model_name_or_path": "models/m", "max_completion_length": 64})
    for positions, expected in ((1000, 1000), (100_000, 8192), (64, 576)):
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
        job, _ = import_text(tmp_path, "grpo.json", text)
        assert job["inference"]["max_model_len"] == expected


ODD_VALUES = ("surely not", 77, -5, [1, "a"], {"x": 1}, 0.37, True)


@pytest.mark.parametrize("seed", range(40))
def test_a_key_that_nobody_knows_is_named(tmp_path: Path, seed: int) -> None:
    """One key more, in any table, of any name and value: it is mapped or stands there by name."""
    draw = random.Random(seed)
    odd = "".join(draw.choice("abcdefgh_") for _ in range(9))
    value = draw.choice(ODD_VALUES)
    if seed % 2:
        job = yaml.safe_load(VERL)
        table = job
        while draw.random() < 0.7:
            inner = [v for v in table.values() if isinstance(v, dict)]
            table = draw.choice(inner) if inner else table
        table[odd] = value
        (tmp_path / "odd.yaml").write_text(yaml.safe_dump(job), "utf-8")
        printed = import_config(tmp_path / "odd.yaml")
    else:
        (tmp_path / "odd.json").write_text(json.dumps({**TRL, odd: value}), "utf-8")
        printed = import_config(tmp_path / "odd.json")
    is_argument = f'"{odd}"' in printed  # of the user's own reward function
    assert is_argument or re.search(rf"^# (\S+\.)?{odd}(\.x)? = .*: \w+", printed, re.M)


@pytest.mark.heavy(reason="downloads the wheels of four packages, and imports TRL")
def test_the_table_of_defaults_is_what_the_packages_have(tmp_path: Path) -> None:
    """Made again from the wheels, and compared with what TRL's own classes say in a process."""
    assert foreign_defaults.table(tmp_path) == tables()
    site = tmp_path / "site"
    for package in ("trl", "transformers"):
        (wheel,) = tmp_path.glob(f"{package}-*.whl")
        zipfile.ZipFile(wheel).extractall(site)
    code = """
import dataclasses, json
from trl import GRPOConfig, SFTConfig
from trl.experimental.async_grpo import AsyncGRPOConfig
def plain(field):
    missing = dataclasses.MISSING
    return field.default_factory() if field.default_factory is not missing else (
        None if field.default is missing else field.default)
for kind in (GRPOConfig, SFTConfig, AsyncGRPOConfig):
    fields = {f.name: plain(f) for f in dataclasses.fields(kind)}
    print(json.dumps([kind.__name__, fields], default=str))
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in filter(lambda text: text.startswith('["'), ended.stdout.splitlines()):
        kind, fields = json.loads(line)
        committed = tables()["TrainingArguments"] | tables()["_BaseConfig"] | tables()[kind]
        assert {name: committed.get(name, "missing") for name in fields} == fields
