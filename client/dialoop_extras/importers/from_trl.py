"""A TRL GRPOConfig, AsyncGRPOConfig or SFTConfig, and the arguments of its script, as our keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dialoop_extras.importers.foreign_keys import (
    ForeignKeys,
    To,
    choice,
    positive,
    run_name,
    steps_of_epochs,
    tables,
    trackers_in,
    whole,
)

KINDS = ("GRPOConfig", "AsyncGRPOConfig", "SFTConfig")
_MOST_TOKENS, _USUAL_PROMPT = 8192, 512
_NO_MEANING = "Dialoop has no setting of this meaning"
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
_CORRECTIONS = {
    "token_truncate": "tis",
    "token_mask": "token_mask",
    "sequence_mask": "sequence_mask",
}
# How TRL's loss_type averages is its own: as "grpo", the mean of the sequences' means.
_LOSSES = MappingProxyType(
    {
        "grpo": ("grpo", "sequence"),
        "bnpo": ("grpo", "token"),
        "dapo": ("grpo", "token"),
        "dr_grpo": ("dr_grpo", "constant"),
        "cispo": ("cispo", "token"),
    }
)


def _dtype(value: Any) -> str:
    if value not in ("float32", "bfloat16"):
        raise ValueError("the trainer's weights are float32 or bfloat16 here; float32 stands")
    return str(value)


_KEYS: dict[str, To] = {
    "model_name_or_path": "model.directory",
    "dtype": ("dtype", _dtype),
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "lr_scheduler_type": ("train.schedule", choice(_SCHEDULES, "schedule")),
    "optim": (
        "train.optimizer",
        choice({"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}, "optimiser"),
    ),
    "seed": "seed",
    "run_name": ("run", run_name),
    "gradient_checkpointing": ("train.activation_checkpointing", bool),
}
_KEYS_OF_RL: dict[str, To] = {
    "dataset_name": "environment.options.dataset",
    "reward_funcs": "environment.options.reward_funcs",
    "reward_weights": "environment.options.reward_weights",
    "num_generations": ("collector.group_size", whole),
    "max_completion_length": ("collector.max_new_tokens", whole),
    "temperature": "collector.temperature",
    "vllm_max_model_length": "inference.max_model_len",
    "vllm_tensor_parallel_size": "inference.tensor_parallel_size",
    "num_iterations": "train.objective.num_epochs",
    "entropy_coef": "train.objective.entropy_coeff",
    "max_staleness": ("train.max_staleness", whole),
    "scale_rewards": (
        "scorer.divide_by_std",
        choice({"group": True, True: True, "none": False, False: False}, "scale of rewards"),
    ),
}
_WHOLE_DISTRIBUTION = "what is trained is sampled from the whole distribution"
_OWN_SERVER = "the stack starts its engine itself"
_FSDP = "several trainer processes share the model by FSDP2: num_processes in [train]"
_REASONS = {
    "top_p": _WHOLE_DISTRIBUTION,
    "top_k": _WHOLE_DISTRIBUTION,
    "min_p": _WHOLE_DISTRIBUTION,
    "repetition_penalty": _WHOLE_DISTRIBUTION,
    "vllm_mode": "engine and trainer are services; `placement` says whether they share a device",
    "vllm_server_base_url": _OWN_SERVER,
    "vllm_server_host": _OWN_SERVER,
    "vllm_server_port": _OWN_SERVER,
    "logging_steps": "every train step is logged",
    "output_dir": "runs are written to runs/<name>: set `run`",
    "sync_ref_model": "the reference model stays as it is",
    "deepspeed": _FSDP,
    "fsdp": _FSDP,
    "remove_unused_columns": "reward functions get all columns",
    "shuffle_dataset": "tasks are always shuffled, by `seed`",
    "weight_sync_steps": "a policy is published after every train step",
    "packing": "rows are always packed, and no conversation sees another",
    "assistant_only_loss": "what the assistant writes is learnt, and nothing else",
    "completion_only_loss": "what the assistant writes is learnt, and nothing else",
}


def kind_of(values: Mapping[str, Any]) -> str:
    """Return the class whose names a file has; GRPOConfig where they are those of several."""
    return max(KINDS, key=lambda kind: len(values.keys() & tables()[kind].keys()))


def read_trl(values: dict[str, Any], *, kind: str, folder: Path) -> ForeignKeys:
    """Return the keys of a config of this class, and of its script's arguments, as ours.

    What the file does not say is as the class has it.
    """
    table = tables()
    classes = ("TrainingArguments", "_BaseConfig", "ModelConfig", "ScriptArguments", kind)
    defaults: dict[str, Any] = {}
    for name in classes:
        defaults |= table[name]
    defaults |= {f"peft_config.{name}": value for name, value in table["LoraConfig"].items()}
    title = f"{kind} of trl {table['versions']['trl']}"
    keys = ForeignKeys(given=values, defaults=defaults, title=title, folder=folder)
    keys.map(_KEYS)
    trackers_in(keys, "report_to")
    if "project" in values:
        keys.map({"project": "trackers.project"})
    _map_numbers(keys)
    _map_adapter(keys)
    if kind == "SFTConfig":
        _map_demonstrations(keys)
        return keys.finish(_REASONS, _NO_MEANING)
    keys.mapped["environment.use"] = "trl"
    splits = {"dataset_train_split": "split", "dataset_test_split": "heldout_split"}
    named = {name: f"environment.options.{ours}" for name, ours in splits.items() if name in values}
    keys.map(_KEYS_OF_RL | named)
    is_async = kind == "AsyncGRPOConfig"
    keys.mapped["engine"] = "vllm" if is_async or keys.take("use_vllm") else "transformers"
    keys.map_options_of_vllm({"vllm_gpu_memory_utilization": "gpu_memory_utilization"})
    _map_loss(keys, is_async=is_async)
    groups, updates = _map_batch(keys, is_async=is_async)
    rows = keys.num_rows(keys.mapped.get("environment.options.dataset"), _split(keys))
    _map_steps(keys, rows, groups=groups, updates=updates)
    if not is_async:
        _map_correction(keys)
    # TRL divides by the standard deviation + 1e-4, and its asynchronous trainer + 1e-8.
    eps = 1e-8 if is_async else 1e-4
    keys.mapped |= {"scorer.advantage_divisor": "sum", "scorer.advantage_eps": eps}
    _map_longest(keys)
    return keys.finish(_REASONS, _NO_MEANING)


def _map_longest(keys: ForeignKeys) -> None:
    """Map the most tokens of prompt and answer, which in TRL the model's positions bound alone."""
    longest, answer = "inference.max_model_len", keys.mapped["collector.max_new_tokens"]
    prompt = keys.number("max_prompt_length")  # which earlier versions have
    if longest in keys.mapped:
        return
    if prompt is not None:
        keys.mapped[longest] = prompt + answer
        return
    try:
        model = keys.folder / keys.mapped["model.directory"]
        fields = json.loads((model / "config.json").read_text("utf-8"))
        positions = min(int(fields["max_position_embeddings"]), _MOST_TOKENS)
    except (OSError, KeyError, TypeError, ValueError):
        positions = 0
    if positions > answer:
        keys.mapped[longest] = positions
        keys.assumed[longest] = f"{_MOST_TOKENS} or the model's positions; TRL takes all of these"
    else:
        keys.mapped[longest] = _USUAL_PROMPT + answer
        keys.assumed[longest] = f"prompts of up to {_USUAL_PROMPT} tokens; TRL has no bound of them"


def _split(keys: ForeignKeys) -> str:
    return str(keys.take("dataset_train_split", "train"))


def _map_numbers(keys: ForeignKeys) -> None:
    """Map what AdamW, its schedule and number formats are made of."""
    keys.mapped["train.betas"] = [keys.number("adam_beta1"), keys.number("adam_beta2")]
    if keys.mapped.get("train.schedule") != "constant":
        keys.mapped["train.learning_rate_floor"] = 0.0
    is_half = keys.take("bf16")
    if keys.take("fp16"):
        keys.leave("fp16", "layers compute in float32 or bfloat16 here; float32 stands")
    elif is_half or is_half is None:  # as TRL has it: bfloat16 unless fp16 is set
        keys.mapped["train.autocast"] = "bfloat16"
    if keys.number("adam_epsilon") != 1e-8:
        keys.leave("adam_epsilon", "it is 1e-8 here")
    if keys.take("use_cpu"):
        keys.mapped["train.device"] = "cpu"


def _map_adapter(keys: ForeignKeys) -> None:
    """Map peft's LoraConfig, or the script's arguments for one."""
    if any(name.startswith("peft_config.") for name in keys.given):
        start = "peft_config."
    elif keys.take("use_peft"):
        start = "lora_"
    else:
        for name in keys.given:
            if name.startswith(("lora_", "use_dora", "use_rslora")):
                keys.leave(name, "use_peft is not set, so TRL trains the whole model")
        if keys.given.get("peft_config") is not None:
            keys.leave("peft_config", "it is an expression, whose value only its own program knows")
            keys.to_fill_in["model.lora_rank"] = "peft_config is not written out in the file"
        return
    prefix = "peft_config.lora_" if start == "peft_config." else start
    rank, alpha = keys.number(f"{start}r"), keys.number(f"{prefix}alpha")
    rescales = keys.take("use_rslora" if start == "lora_" else f"{start}use_rslora")
    keys.mapped["model.lora_rank"] = rank
    # That scales by alpha / sqrt(rank) in place of alpha / rank.
    keys.mapped["model.lora_alpha"] = alpha * math.sqrt(rank) if rescales else float(alpha)
    if keys.number(f"{prefix}dropout"):
        keys.leave(f"{prefix}dropout", "adapters have no dropout here")
    _map_targets(keys, f"{start}target_modules")


def _map_targets(keys: ForeignKeys, name: str) -> None:
    modules = keys.take(name)
    if isinstance(modules, str) and modules.isidentifier():
        modules = [modules]
    if modules is None:
        keys.mapped["model.lora_targets"] = ["q_proj", "v_proj"]
        keys.assumed["model.lora_targets"] = "those that peft takes for Llama and Qwen"
    elif isinstance(modules, (list, tuple)):
        keys.mapped["model.lora_targets"] = list(modules)
    elif modules != "all-linear":
        keys.leave(name, "it is no list of names; all linear layers get adapters")


def _map_loss(keys: ForeignKeys, *, is_async: bool) -> None:
    name, level = keys.take("loss_type", "dapo"), keys.take("importance_sampling_level", "token")
    if name not in _LOSSES:
        keys.leave("loss_type", "Dialoop has no such loss; grpo stands in its place")
    loss, aggregation = _LOSSES.get(name, ("grpo", "token"))
    if level == "sequence" and loss == "grpo":
        loss, aggregation = "gspo", "sequence"
    elif level != "token":
        keys.leave("importance_sampling_level", "Dialoop has it with loss_type grpo alone")
    low, delta = keys.number("epsilon"), keys.number("delta")
    high = keys.number("epsilon_high", low)
    options = {"clip_low": low, "clip_high": high}
    if loss == "cispo":
        options = {"clip_high": high - 1}
    if delta is not None and loss in ("grpo", "dr_grpo"):
        options["dual_clip"] = delta
    elif delta is not None:
        keys.leave("delta", f"the loss {loss} takes none")
    keys.mapped["train.loss"] = loss
    keys.mapped["train.objective.aggregation"] = aggregation
    keys.mapped["train.loss_options"] = {name: float(value) for name, value in options.items()}
    if is_async:
        keys.mapped["scorer.divide_by_std"] = True
    beta = keys.number("beta", 0.0)
    if beta:
        keys.mapped["train.objective.kl_coeff"] = beta
        keys.mapped["scorer.reference_logprobs"] = True


def _a_step(keys: ForeignKeys) -> tuple[int, int]:
    """Return how many samples an update has, and in how many parts; for one process."""
    keys.assumed["train.num_processes"] = (
        "one process; TRL's batches are for each that accelerate starts, so n of them train n "
        "times as much in a step"
    )
    parts = keys.number("gradient_accumulation_steps")
    return keys.number("per_device_train_batch_size") * parts, parts


def _map_batch(keys: ForeignKeys, *, is_async: bool) -> tuple[int, int]:
    """Map the completions of a generation to groups; return these, and updates of a train step."""
    size = keys.mapped.setdefault("collector.group_size", keys.defaults["num_generations"])
    keys.mapped.setdefault("collector.max_new_tokens", keys.defaults["max_completion_length"])
    an_update, parts = _a_step(keys)
    ahead = keys.number("steps_per_generation", parts)
    completions = keys.number("generation_batch_size", an_update // parts * ahead)
    groups = max(1, completions // size)
    minibatches = 1 if is_async else max(1, completions // an_update)
    keys.mapped["train.groups_per_train_step"] = groups
    keys.mapped["train.num_minibatches"] = minibatches
    tasks, budget = keys.take("max_inflight_tasks", -1), keys.take("token_budget", 0)
    if is_async and tasks > 0:
        keys.mapped["collector.max_groups_in_flight"] = max(1, tasks // size)
    if is_async and budget > 0:
        keys.mapped["train.max_row_tokens"] = budget
    return groups, minibatches * keys.mapped.get("train.objective.num_epochs", 1)


def _map_steps(keys: ForeignKeys, rows: int | None, *, groups: int, updates: int) -> None:
    """Map steps and epochs, which count updates in TRL, and what is counted in them.

    groups: rows of the data of a train step. updates: of the optimiser in one.
    """
    steps = keys.number("max_steps", -1)
    if steps > 0:
        keys.mapped["train.num_steps"] = math.ceil(steps / updates)
        keys.leave("num_train_epochs", "max_steps says how long training is")
        if "num_train_epochs" not in keys.given:
            del keys.left_out["num_train_epochs"]
    else:
        steps_of_epochs(keys, keys.number("num_train_epochs"), rows, groups)
    total = keys.mapped.get("train.num_steps")
    _map_warmup(keys, steps if steps > 0 else total and total * updates)
    for strategy, every, ours in (
        ("save_strategy", "save_steps", "train.checkpoint_every"),
        ("eval_strategy", "eval_steps", "evaluation.every"),
    ):
        when = keys.take(strategy)
        value = keys.number(every, keys.values.get("logging_steps"))
        if when == "epoch" and rows is not None:
            keys.mapped[ours] = max(1, rows // groups)
        elif when == "steps" and value >= 1:
            keys.mapped[ours] = math.ceil(value / updates)
        elif when == "steps" and total:
            keys.mapped[ours] = max(1, math.ceil(value * total))
        elif strategy == "eval_strategy" and when == "no":
            keys.mapped[ours] = 0
        else:
            keys.leave(strategy, f"{ours} keeps its default")


def _map_warmup(keys: ForeignKeys, total: int | None) -> None:
    """Map the warm-up: a number of updates, or below 1 a share of all of them."""
    name = "warmup_ratio" if keys.take("warmup_ratio") else "warmup_steps"  # the older name
    value = keys.number(name, 0)
    keys.take("warmup_steps")
    if keys.take("lr_scheduler_type") == "constant":
        if value:
            keys.leave(name, "transformers' schedule `constant` has no warm-up")
        return
    if 0 < value < 1 and total is None:
        keys.to_fill_in["train.num_warmup_updates"] = f"it is a share of {value:g} of all updates"
        return
    keys.mapped["train.num_warmup_updates"] = math.ceil(
        value * (total or 0) if value < 1 else value
    )


def _map_demonstrations(keys: ForeignKeys) -> None:
    """Map what supervised fine-tuning has: conversations, batches of them, epochs."""
    keys.mapped["train.mode"] = "sft"
    keys.map({"dataset_name": "sft.file", "max_length": ("train.max_row_tokens", positive)})
    if keys.mapped.get("train.max_row_tokens"):
        keys.mapped["train.oversize"] = "truncate"
    if keys.take("loss_type") != "nll":
        keys.leave("loss_type", "Dialoop has no such loss of demonstrations; sft stands here")
    if keys.take("truncation_mode") != "keep_start":
        keys.leave("truncation_mode", "what is cut is the end")
    if not keys.take("assistant_only_loss") and not keys.take("completion_only_loss"):
        keys.leave("assistant_only_loss", "the assistant's messages alone are learnt")
    batch, _ = _a_step(keys)
    keys.mapped |= {"sft.batch_size": batch, "sft.heldout_fraction": 0.0}
    rows = keys.num_rows(keys.mapped.get("sft.file"), _split(keys))
    _map_steps(keys, rows, groups=batch, updates=1)


def _map_correction(keys: ForeignKeys) -> None:
    names = "vllm_importance_sampling_{}"
    if keys.mapped["engine"] != "vllm" or not keys.take(names.format("correction")):
        return
    mode = keys.take(names.format("mode"))
    if mode not in _CORRECTIONS:
        keys.leave(names.format("mode"), "Dialoop has no such correction")
        return
    high = keys.number(names.format("clip_max"))
    keys.mapped["train.objective.correction"] = _CORRECTIONS[mode]
    keys.mapped["train.objective.correction_high"] = keys.number(names.format("cap"), high)
    keys.mapped["train.objective.correction_low"] = keys.number(names.format("clip_min"), 0.0)
