"""A verl trainer's config (hydra's YAML, as it is written or composed) as our keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dialoop_services.config.file import Override, override_in

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

_NO_MEANING = "Dialoop has no setting of this meaning"
_MODEL, _ACTOR, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
_AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}


def _home(value: Any) -> Any:
    """Return paths with ~ written out."""
    if isinstance(value, list):
        return [_home(item) for item in value]
    return str(Path(value).expanduser())


def _targets(value: Any) -> list[str]:
    return [] if value == "all-linear" else [value] if isinstance(value, str) else list(value)


def _evaluations(value: Any) -> int:
    return max(0, whole(value))


_KEYS: dict[str, To] = {
    "data.train_files": ("environment.options.train_files", _home),
    "data.val_files": ("environment.options.val_files", _home),
    "data.prompt_key": "environment.options.prompt_key",
    "data.reward_fn_key": "environment.options.reward_fn_key",
    "data.train_batch_size": ("train.groups_per_train_step", whole),
    "data.max_response_length": ("collector.max_new_tokens", whole),
    "data.seed": "seed",
    f"{_MODEL}.path": ("model.directory", _home),
    f"{_MODEL}.lora_rank": "model.lora_rank",
    f"{_MODEL}.target_modules": ("model.lora_targets", _targets),
    f"{_MODEL}.enable_gradient_checkpointing": "train.activation_checkpointing",
    f"{_ACTOR}.optim.lr": "train.learning_rate",
    f"{_ACTOR}.optim.weight_decay": "train.weight_decay",
    f"{_ACTOR}.optim.lr_scheduler_type": (
        "train.schedule",
        choice({"constant": "constant", "cosine": "cosine"}, "schedule"),
    ),
    f"{_ACTOR}.optim.betas": ("train.betas", list),
    f"{_ACTOR}.optim.optimizer": (
        "train.optimizer",
        choice({"AdamW": "adamw", "Muon": "muon"}, "optimiser"),
    ),
    f"{_ACTOR}.optim.clip_grad": "train.max_grad_norm",
    f"{_ACTOR}.ppo_epochs": "train.objective.num_epochs",
    f"{_ACTOR}.entropy_coeff": "train.objective.entropy_coeff",
    f"{_ACTOR}.loss_agg_mode": (
        "train.objective.aggregation",
        choice(_AGGREGATIONS, "aggregation"),
    ),
    f"{_ROLLOUT}.n": ("collector.group_size", whole),
    f"{_ROLLOUT}.temperature": "collector.temperature",
    f"{_ROLLOUT}.name": ("engine", choice({"vllm": "vllm", "hf": "transformers"}, "engine")),
    f"{_ROLLOUT}.dtype": ("inference.dtype", choice(_DTYPES, "number format")),
    f"{_ROLLOUT}.tensor_model_parallel_size": "inference.tensor_parallel_size",
    f"{_ROLLOUT}.max_model_len": "inference.max_model_len",
    f"{_ROLLOUT}.max_num_seqs": "inference.max_num_seqs",
    "trainer.save_freq": ("train.checkpoint_every", positive),
    "trainer.test_freq": ("evaluation.every", _evaluations),
    "trainer.experiment_name": ("run", run_name),
    "trainer.project_name": "trackers.project",
}
_OPTIONS_OF_VLLM = {
    f"{_ROLLOUT}.{name}": name
    for name in ("gpu_memory_utilization", "max_num_batched_tokens", "enable_chunked_prefill")
}
_REASONS = {
    "critic": "there is no critic: advantages compare the trajectories of a group",
    "algorithm.gamma": "there is no critic: advantages compare the trajectories of a group",
    "algorithm.lam": "there is no critic: advantages compare the trajectories of a group",
    "defaults": "hydra's parts are not read: import the composed config (`--cfg job --resolve`)",
    "hydra": "it belongs to hydra",
    "trainer.resume_mode": "a run goes on where it was; --fresh replaces it",
    "trainer.default_local_dir": "runs are written to runs/<name>: set `run`",
    "data.shuffle": "tasks are always shuffled, by `seed`",
    "data.truncation": "prompts are never cut; max_model_len bounds prompt and answer",
    "data.filter_overlong_prompts": "prompts are never dropped; max_model_len bounds them",
    "ray_kwargs": "there is no Ray",
    "ray_init": "there is no Ray",
    f"{_ACTOR}.clip_ratio": "clip_ratio_low and clip_ratio_high take its place, as in verl",
    f"{_ROLLOUT}.top_p": "what is trained is sampled from the whole distribution",
    f"{_ROLLOUT}.top_k": "what is trained is sampled from the whole distribution",
    f"{_ROLLOUT}.val_kwargs": "evaluations are greedy, and sampled at temperature 1",
    f"{_ROLLOUT}.multi_turn": "an environment with tools is written as one: docs/environments.md",
    f"{_ACTOR}.fsdp_config": "several trainer processes share the model by FSDP2: num_processes",
    f"{_ACTOR}.strategy": "several trainer processes share the model by FSDP2: num_processes",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "rows are packed: max_row_tokens in [train]",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "rows are packed: max_row_tokens in [train]",
    "actor_rollout_ref.ref": "the reference model is the scorer's: see [scorer]",
    "reward_model": "reward models are functions of yours in [[scorer.rewards]]",
    "reward": "reward models are functions of yours in [[scorer.rewards]]",
    "trainer.val_before_train": "evaluation.num_tasks are always played before and after",
}
# verl's defaults for these are somebody's own files and model, or "???".
_NOT_SAID = (
    ("data.train_files", "environment.options.train_files", "gsm8k in the home"),
    ("data.val_files", "environment.options.val_files", "gsm8k in the home"),
    (f"{_MODEL}.path", "model.directory", "deepseek-llm-7b-chat in the home"),
    (f"{_ROLLOUT}.name", "engine", "none, and refuse to start"),
    ("trainer.experiment_name", "run", "gsm8k"),
)
_DEFAULT_SCORE = "verl.utils.reward_score:default_compute_score"


def read_verl(values: dict[str, Any], *, folder: Path) -> ForeignKeys:
    """Return the keys of a verl config as ours; what it does not say is as verl has it."""
    given, table = _flat(values), tables()
    every = {**table["verl"], **given}
    keys = ForeignKeys(
        given={name: _resolve(value, every) for name, value in given.items()},
        defaults={name: _resolve(value, every) for name, value in table["verl"].items()},
        title=f"ppo_trainer of verl {table['versions']['verl']}",
        folder=folder,
    )
    for name, key, value in _NOT_SAID:
        if keys.given.get(name) is None:
            keys.values[name] = None
            keys.to_fill_in[key] = f"{name} is not set; verl would take {value}"
    keys.mapped["environment.use"] = "verl"
    keys.map(_KEYS)
    if f"{_ACTOR}.grad_clip" in given and f"{_ACTOR}.optim.clip_grad" not in given:
        keys.map({f"{_ACTOR}.grad_clip": "train.max_grad_norm"})
    keys.map_options_of_vllm(_OPTIONS_OF_VLLM)
    if keys.mapped.get("model.lora_rank"):
        keys.mapped["model.lora_alpha"] = float(keys.number(f"{_MODEL}.lora_alpha"))
    else:
        for name in {f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules"} & given.keys():
            keys.leave(name, "lora_rank is 0")
        keys.mapped.pop("model.lora_targets", None)
    trackers_in(keys, "trainer.logger")
    _map_reward(keys)
    _map_lengths(keys)
    _map_steps(keys)
    _map_devices(keys)
    _map_loss(keys)
    _map_correction(keys)
    _map_advantages(keys)
    return keys.finish(_REASONS, _NO_MEANING)


def _map_reward(keys: ForeignKeys) -> None:
    options = "environment.options"
    for table in ("reward.custom_reward_function", "custom_reward_function"):
        path = keys.take(f"{table}.path")
        name = keys.take(f"{table}.name", "compute_score")
        if path:
            keys.mapped[f"{options}.compute_score"] = f"{_home(path)}:{name}"
            start = f"{table}.reward_kwargs."
            arguments: dict[str, Any] = {}
            for key in filter(lambda key: key.startswith(start), keys.given):
                name = key.removeprefix(start)
                override_in(arguments, Override(path=name, value=keys.take(key), origin=key))
            if arguments:
                keys.mapped[f"{options}.reward_kwargs"] = arguments
    keys.mapped.setdefault(f"{options}.compute_score", _DEFAULT_SCORE)


def _map_lengths(keys: ForeignKeys) -> None:
    defaults, mapped = keys.defaults, keys.mapped
    answer = mapped.setdefault("collector.max_new_tokens", defaults["data.max_response_length"])
    prompt = keys.number("data.max_prompt_length")
    mapped.setdefault("inference.max_model_len", prompt + answer)
    batch = mapped.setdefault("train.groups_per_train_step", defaults["data.train_batch_size"])
    small = keys.number(f"{_ACTOR}.ppo_mini_batch_size")
    mapped["train.num_minibatches"] = max(1, batch // small)


def _map_steps(keys: ForeignKeys) -> None:
    """Map how long training is; verl's schedule counts train steps, ours counts updates."""
    mapped, optim = keys.mapped, f"{_ACTOR}.optim"
    steps = keys.number("trainer.total_training_steps")
    epochs = keys.number("trainer.total_epochs")
    if steps is not None and steps > 0:
        mapped["train.num_steps"] = int(steps)
        if "trainer.total_epochs" in keys.given:
            keys.leave("trainer.total_epochs", "total_training_steps says how long training is")
    else:
        rows = keys.num_rows(mapped.get("environment.options.train_files"))
        steps_of_epochs(keys, epochs, rows, mapped["train.groups_per_train_step"])
    updates = mapped["train.num_minibatches"] * mapped.get("train.objective.num_epochs", 1)
    total, warmup = mapped.get("train.num_steps"), keys.number(f"{optim}.lr_warmup_steps")
    share = keys.number(f"{optim}.lr_warmup_steps_ratio")
    if warmup <= 0 and share and total is None:
        keys.to_fill_in["train.num_warmup_updates"] = f"it is a share of {share:g} of all updates"
    else:
        first = int(share * (total or 0)) if warmup <= 0 else warmup
        mapped["train.num_warmup_updates"] = int(first) * updates
    if ":" not in str(mapped.get("train.optimizer")):
        mapped["train.weight_decay_all"] = True  # verl gives AdamW all parameters in one group
    floor = keys.number(f"{optim}.min_lr_ratio") or 0.0
    if mapped.get("train.schedule") != "constant":
        mapped["train.learning_rate_floor"] = floor
    if keys.take(f"{_ACTOR}.fsdp_config.model_dtype") in ("bf16", "bfloat16"):
        mapped["dtype"] = "bfloat16"
    elif keys.take(f"{_ACTOR}.fsdp_config.dtype") in ("bf16", "bfloat16"):
        mapped["train.autocast"] = "bfloat16"


def _map_devices(keys: ForeignKeys) -> None:
    """Map verl's GPUs, on which trainer and engine take turns, to a part for each of the two."""
    mapped = keys.mapped
    nodes, each = (keys.number(f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node"))
    if keys.take("trainer.device") != "cuda":
        mapped |= {"train.device": "cpu", "inference.tensor_parallel_size": 1}
        keys.leave("trainer.device", "devices are cuda and cpu; the CPU stands here")
        return
    mapped["train.device"] = "cuda"
    if mapped.get("engine") == "transformers":
        mapped["inference.device"] = "cuda"
    mapped |= {"resources.num_nodes": nodes, "resources.gpus_per_node": each}
    keys.to_fill_in["resources.gpu_memory_gib"] = (
        "with the memory of a GPU `dialoop config check` says whether the job fits"
    )
    if nodes * each == 1:
        mapped |= {"placement": "shared", "inference.tensor_parallel_size": 1}
        return
    size = mapped.get("inference.tensor_parallel_size", 1)
    if nodes == 1 and size >= each:
        size = mapped["inference.tensor_parallel_size"] = each // 2
        keys.leave(f"{_ROLLOUT}.tensor_model_parallel_size", "half of the GPUs train")
    trainers = each if nodes > 1 else each // 2 // size * size or each - size
    replicas = max(1, (each - trainers) // size if nodes == 1 else (nodes - 1) * (each // size))
    mapped |= {"train.num_processes": trainers, "inference.num_replicas": replicas}
    keys.assumed["train.num_processes"] = (
        f"{trainers} GPUs train and {replicas} x {size} sample at the same time, where in verl all "
        f"{nodes} x {each} take turns"
    )
    if nodes > 1:
        mapped["launch.on"] = "ray"


def _map_loss(keys: ForeignKeys) -> None:
    mode = keys.take(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode not in ("vanilla", "gspo"):
        keys.leave(f"{_ACTOR}.policy_loss.loss_mode", "Dialoop has no such loss; grpo stands here")
    loss = "gspo" if mode == "gspo" else "grpo"
    options = {}
    for side in ("low", "high"):
        name = f"{_ACTOR}.clip_ratio_{side}"
        is_unset = keys.values[name] is None  # then verl takes the ratio of both sides
        options[f"clip_{side}"] = keys.number(f"{_ACTOR}.clip_ratio" if is_unset else name)
    if loss == "grpo":
        options["dual_clip"] = keys.number(f"{_ACTOR}.clip_ratio_c")
    else:
        keys.leave(f"{_ACTOR}.clip_ratio_c", "the loss gspo takes none")
    keys.mapped["train.loss"] = loss
    keys.mapped["train.loss_options"] = {name: float(value) for name, value in options.items()}
    keys.mapped.setdefault("train.objective.aggregation", "token")
    weight = keys.number(f"{_ACTOR}.kl_loss_coef")
    kind = keys.take(f"{_ACTOR}.kl_loss_type", "low_var_kl")
    if not keys.take(f"{_ACTOR}.use_kl_loss", False):
        return
    keys.mapped["train.objective.kl_coeff"] = weight
    keys.mapped["scorer.reference_logprobs"] = True
    if kind in _KL:
        keys.mapped["train.objective.kl_estimator"] = _KL[kind]
    else:
        keys.leave(f"{_ACTOR}.kl_loss_type", "Dialoop has no such estimator; k3 stands here")


def _map_correction(keys: ForeignKeys) -> None:
    """Map truncated importance sampling between engine and trainer, by token."""
    start = "algorithm.rollout_correction"
    kind = keys.take(f"{start}.rollout_is")
    if kind is None:
        return
    if kind != "token":
        keys.leave(f"{start}.rollout_is", "Dialoop has no such correction")
        return
    objective = "train.objective.correction"
    keys.mapped |= {objective: "tis", f"{objective}_low": 0.0}
    keys.mapped[f"{objective}_high"] = keys.number(f"{start}.rollout_is_threshold")


def _map_advantages(keys: ForeignKeys) -> None:
    estimator = keys.take("algorithm.adv_estimator", "gae")
    by_std = keys.take("algorithm.norm_adv_by_std_in_grpo", True)
    if estimator == "grpo":
        keys.mapped["scorer.divide_by_std"] = bool(by_std)
    elif estimator == "rloo":
        keys.mapped |= {"scorer.divide_by_std": False, "scorer.leave_one_out": True}
    else:
        keys.leave(
            "algorithm.adv_estimator",
            "Dialoop has no such estimator; advantages compare the trajectories of a group",
        )
    # verl divides by the standard deviation + 1e-6.
    keys.mapped |= {"scorer.advantage_divisor": "sum", "scorer.advantage_eps": 1e-6}
    if keys.mapped["collector.group_size"] < 2:
        keys.mapped["collector.group_size"] = 8
        keys.leave(f"{_ROLLOUT}.n", "groups need 2 or more; 8 stands here")
    kind, weight = (
        keys.take("algorithm.kl_penalty", "kl"),
        keys.number("algorithm.kl_ctrl.kl_coef"),
    )
    if keys.take("algorithm.use_kl_in_reward", False):
        keys.mapped["scorer.kl_coefficient"] = weight
        keys.mapped["scorer.reference_logprobs"] = True
        keys.mapped["scorer.kl_estimator"] = _KL.get(kind, "k1")
    if keys.take("algorithm.filter_groups.enable", False):
        keys.mapped["scorer.drop_uniform"] = True


def _flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = f"{path}.{name}" if path else str(name)
        flat |= _flat(value, inner) if isinstance(value, dict) and value else {inner: value}
    return flat


def _resolve(value: Any, flat: dict[str, Any], depth: int = 8) -> Any:
    """Return what OmegaConf's ${a.b} and ${oc.select:a.b,default} stand for; others as written."""
    whole = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*(.*))?\}", str(value))
    if whole is None or not isinstance(value, str) or not depth:
        return value
    name, default = whole[1], whole[2]
    if name in flat:
        return _resolve(flat[name], flat, depth - 1)
    if default is None:
        return value
    if default.startswith("${"):
        return _resolve(default, flat, depth - 1)
    return _parse(default)


def _parse(text: str) -> Any:
    constants: dict[str, Any] = {
        "null": None,
        "true": True,
        "True": True,
        "false": False,
        "False": False,
        "[]": [],
    }
    if text in constants:
        return constants[text]
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text
