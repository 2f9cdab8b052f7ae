"""A TRL GRPOConfig, and the arguments of its script, as our keys."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from dialoop_extras.importers.foreign_keys import (
    ForeignKeys,
    To,
    choice,
    positive,
    run_name,
    trackers_in,
    whole,
)

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
_KEYS: dict[str, To] = {
    "model_name_or_path": "model.directory",
    "dataset_name": "environment.options.dataset",
    "reward_funcs": "environment.options.reward_funcs",
    "reward_weights": "environment.options.reward_weights",
    "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "max_steps": ("train.num_steps", positive),
    "warmup_steps": ("train.num_warmup_updates", int),
    "lr_scheduler_type": ("train.schedule", choice(_SCHEDULES, "schedule")),
    "optim": (
        "train.optimizer",
        choice({"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}, "optimiser"),
    ),
    "seed": "seed",
    "run_name": ("run", run_name),
    "bf16": ("train.autocast", lambda value: "bfloat16" if value else ""),
    "gradient_checkpointing": ("train.activation_checkpointing", bool),
    "save_steps": ("train.checkpoint_every", positive),
    "eval_steps": ("evaluation.every", positive),
    "num_generations": ("collector.group_size", whole),
    "max_completion_length": ("collector.max_new_tokens", whole),
    "temperature": "collector.temperature",
    "vllm_max_model_length": "inference.max_model_len",
    "vllm_tensor_parallel_size": "inference.tensor_parallel_size",
    "use_vllm": ("engine", lambda value: "vllm" if value else "transformers"),
    "num_iterations": "train.objective.num_epochs",
    "entropy_coef": "train.objective.entropy_coeff",
    "scale_rewards": (
        "scorer.divide_by_std",
        choice({"group": True, True: True, "none": False, False: False}, "scale of rewards"),
    ),
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_target_modules": "model.lora_targets",
}
_REASONS = {
    "num_train_epochs": "training is counted in train steps: set num_steps in [train]",
    "top_p": "what is trained is sampled from the whole distribution",
    "top_k": "what is trained is sampled from the whole distribution",
    "min_p": "what is trained is sampled from the whole distribution",
    "repetition_penalty": "what is trained is sampled from the whole distribution",
    "vllm_mode": "engine and trainer are services; `placement` says whether they share a device",
    "vllm_server_base_url": "the stack starts its engine itself",
    "vllm_server_host": "the stack starts its engine itself",
    "vllm_server_port": "the stack starts its engine itself",
    "logging_steps": "every train step is logged",
    "output_dir": "runs are written to runs/<name>: set `run`",
    "sync_ref_model": "the reference model stays as it is",
    "deepspeed": "several trainer processes share the model by FSDP2: num_processes in [train]",
    "fsdp": "several trainer processes share the model by FSDP2: num_processes in [train]",
    "remove_unused_columns": "reward functions get all columns",
    "shuffle_dataset": "tasks are always shuffled, by `seed`",
}


def read_trl(values: dict[str, Any]) -> ForeignKeys:
    """Return the keys of a GRPOConfig, and of its script's arguments, as ours."""
    keys = ForeignKeys(values)
    keys.mapped["environment.use"] = "trl"
    keys.map(_KEYS)
    keys.map_options_of_vllm({"vllm_gpu_memory_utilization": "gpu_memory_utilization"})
    trackers_in(keys, "report_to")
    _map_loss(keys)
    _map_batch(keys)
    _map_correction(keys)
    # TRL divides by the standard deviation + 1e-4.
    keys.mapped |= {"scorer.advantage_divisor": "sum", "scorer.advantage_eps": 1e-4}
    longest = keys.mapped.get("collector.max_new_tokens", 512)
    keys.mapped.setdefault("collector.max_new_tokens", longest)
    prompt = keys.number("max_prompt_length", 512)
    keys.mapped.setdefault("inference.max_model_len", prompt + longest)
    keys.mapped.setdefault("collector.group_size", 8)
    keys.mapped.setdefault("engine", "transformers")
    keys.mapped.setdefault("train.learning_rate", 1e-6)
    return keys.finish(_REASONS, _NO_MEANING)


def _map_loss(keys: ForeignKeys) -> None:
    name, level = keys.take("loss_type", "dapo"), keys.take("importance_sampling_level", "token")
    if name not in _LOSSES:
        keys.leave("loss_type", "Dialoop has no such loss; grpo stands in its place")
    loss, aggregation = _LOSSES.get(name, ("grpo", "token"))
    if level == "sequence" and loss == "grpo":
        loss, aggregation = "gspo", "sequence"
    elif level != "token":
        keys.leave("importance_sampling_level", "Dialoop has it with loss_type grpo alone")
    low, delta = keys.number("epsilon", 0.2), keys.number("delta", None)
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
    beta = keys.number("beta", 0.0)
    if beta:
        keys.mapped["train.objective.kl_coeff"] = beta
        keys.mapped["scorer.reference_logprobs"] = True


def _map_batch(keys: ForeignKeys) -> None:
    """Map the number of completions of a generation to a number of groups."""
    size = keys.mapped.get("collector.group_size", 8)
    a_step = keys.number("per_device_train_batch_size", 8)
    steps = keys.number("gradient_accumulation_steps", 1)
    ahead = keys.number("steps_per_generation", steps)
    completions = keys.number("generation_batch_size", a_step * ahead)
    keys.mapped["train.groups_per_train_step"] = max(1, completions // size)
    keys.mapped["train.num_minibatches"] = max(1, completions // (a_step * steps))


def _map_correction(keys: ForeignKeys) -> None:
    if not keys.take("vllm_importance_sampling_correction", True):
        return
    mode = keys.take("vllm_importance_sampling_mode", "sequence_mask")
    if mode not in _CORRECTIONS:
        keys.leave("vllm_importance_sampling_mode", "Dialoop has no such correction")
        return
    keys.mapped["train.objective.correction"] = _CORRECTIONS[mode]
    keys.mapped["train.objective.correction_high"] = keys.number(
        "vllm_importance_sampling_clip_max", 3.0
    )
    keys.mapped["train.objective.correction_low"] = keys.number(
        "vllm_importance_sampling_clip_min", 0.0
    )
