"""Say what of a job works, and perhaps not as its author thinks: keys without effect, and others.

for warning in warnings_in(config): ...      # a sentence without a full stop
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from dialoop_learning.loss.facts import LOSSES, LossFacts, facts_of

from dialoop_services.config.derived import DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dialoop_services.config.job import JobConfig
    from dialoop_services.config.tables import EnvironmentSection

# Options by which the environments trl and verl are given reward functions.
_REWARD_OPTIONS = ("reward_funcs", "compute_score")
_HALF = "bfloat16"
_ROUNDING = 1e-2
"""Nats: in bfloat16, log-probs of engine and trainer differ by more than this."""


def warnings_in(config: JobConfig) -> tuple[str, ...]:
    """Return a warning for each setting of the file that works but may be a mistake."""
    return (
        *warnings_for_advantages(config),
        *warnings_for_formats(config),
        *warnings_for_cache(config),
        *warnings_for_rewards(config),
        *warnings_for_steps(config),
        *warnings_for_agents(config),
        *warnings_for_unused(config),
    )


_Row = tuple[object, str, tuple[str, ...], str]
"""Whether keys count for nothing, their table, the keys (none: all of it), and why."""

_PLAYED = (
    "groups_per_train_step",
    "max_bad_groups",
    "candidates",
    "num_minibatches",
    "pipeline_depth",
    "max_staleness",
    "selection",
)
"""Keys of [train] that are about groups."""


def warnings_for_unused(config: JobConfig) -> tuple[str, ...]:
    """Return a warning for each table with keys that count for nothing beside another key."""
    rows = [
        (is_unused, table, attrgetter(table)(config), keys, why)
        for part in (_unused_in_mode, _unused_in_train, _unused_in_scorer, _unused_in_places)
        for is_unused, table, keys, why in part(config)
    ]
    for section in config.all_environments:
        table = "environment" if section is config.environment else "environments"
        rows += [(row[0], table, section, *row[1:]) for row in _unused_of(section, config)]
    warnings = []
    for is_unused, table, section, keys, why in rows:
        fields = type(section).model_fields
        named = [
            name
            for name in (keys or fields)
            if is_unused
            and name in section.model_fields_set
            and f"{table}.{name}" not in DEVICES
            and getattr(section, name) != fields[name].get_default(call_default_factory=True)
        ]
        if named:
            count = "counts" if len(named) == 1 else "count"
            warnings.append(f"{' and '.join(named)} in [{table}] {count} for nothing: {why}")
    return tuple(warnings)


def _unused_in_mode(config: JobConfig) -> Iterator[_Row]:
    """Yield what only one way to train reads: rl, sft, or a warm start."""
    train, sft, warm_start = config.train, config.sft, config.warm_start
    is_sft, mode = train.mode == "sft", f'mode is "{train.mode}" in [train]'
    yield not is_sft, "sft", (), mode
    for table in ("warm_start", "scorer", "replay"):
        yield is_sft, table, (), mode
    yield is_sft, "train", _PLAYED, mode
    yield is_sft, "collector", ("group_size", "min_group_size", "total_turns"), mode
    yield is_sft and sft.num_epochs, "train", ("num_steps",), "num_epochs in [sft] says how many"
    yield is_sft and not sft.file, "sft", ("heldout_file", "ignore_columns"), "it names no file"
    is_split = sft.file and not sft.heldout_file
    why = "it is of file, and the demonstrations are elsewhere"
    yield is_sft and not is_split, "sft", ("heldout_fraction",), why
    is_warm = not is_sft and warm_start.num_steps
    yield not is_sft and not is_warm, "warm_start", (), "num_steps is 0 in it"
    yield is_warm and not warm_start.file, "warm_start", ("ignore_columns",), "it names no file"


def _unused_in_train(config: JobConfig) -> Iterator[_Row]:
    """Yield keys of the model, of updates and of the loss."""
    train, objective, facts = config.train, config.train.objective, facts_of(config.train.loss)
    candidates, evaluation = train.candidates, config.evaluation
    lora = ("lora_alpha", "lora_targets", "publish")
    yield not config.model.lora_rank, "model", lora, "lora_rank is 0"
    why = "schedule is constant"
    yield train.schedule == "constant", "train", ("learning_rate_floor",), why
    yield not train.weight_decay, "train", ("weight_decay_all",), "weight_decay is 0"
    yield train.loss in LOSSES, "train", ("loss_timeout_s",), "it is for losses of your own"
    why = "keep_policies is 0, which keeps all"
    yield not train.keep_policies, "train", ("keep_policies_every", "keep_milestones"), why
    yield config.dtype == _HALF, "train", ("autocast",), f"dtype is {_HALF}"
    table, is_rl = "train.objective", train.mode == "rl"
    if facts.holds_to_reference:
        yield True, table, ("kl_coeff",), f"loss {train.loss} holds the policy to the reference"
    has_kl = objective.kl_coeff or objective.kl_inference_coeff
    yield not has_kl, table, ("kl_estimator",), "kl_coeff is 0"
    yield is_rl and not objective.kl_coeff, table, ("kl_to",), "kl_coeff is 0"
    divides = (objective.aggregation or facts.aggregation) == "constant"
    yield not divides, table, ("constant",), 'aggregation is not "constant"'
    why = f'correction is "{objective.correction}"'
    yield not objective.correction, table, ("correction_low", "correction_high"), why
    yield objective.correction in ("tis", "kl_mask"), table, ("correction_low",), why
    why = f"loss {train.loss} reads no feedback"
    yield not facts.needs_feedback, table, ("sibling_answer",), why
    counts = facts.needs_feedback or candidates.success_rate_above is not None
    counts = counts or candidates.success_rate_below is not None
    yield not counts, "train.candidates", ("success_reward",), "it has no success_rate"
    is_early = 0 < candidates.stop_after_empty <= candidates.max_empty_batches
    why = f"training ends at stop_after_empty, {candidates.stop_after_empty}"
    yield is_early, "train.candidates", ("max_empty_batches",), why
    is_long = evaluation.every < train.num_steps or (not is_rl and config.sft.num_epochs)
    is_evaluated = evaluation.every and is_long and (not is_rl or evaluation.num_tasks)
    keys = ("stop_at", "stop_without_gain", "num_running_tasks")
    why = "num_tasks or every is 0, or every is not below num_steps in [train]"
    yield not is_evaluated, "evaluation", keys, f"{why}, so nothing is evaluated during training"


def _unused_in_scorer(config: JobConfig) -> Iterator[_Row]:
    """Yield keys of [scorer] that another key of rewards, advantages or models makes idle."""
    if config.train.mode == "sft":
        return  # the whole table is named
    scorer, facts, loss = config.scorer, facts_of(config.train.loss), config.train.loss
    baseline = ("divide_by_std", "leave_one_out", "advantage_divisor")
    yield scorer.top_k, "scorer", baseline, "top_k is set"
    why = "advantage_estimator computes the advantages"
    yield scorer.advantage_estimator, "scorer", ("advantage_divisor",), why
    if not facts.needs_advantages:
        chosen = ("advantage_estimator", "advantages_of", "advantage_aggregate", "top_k")
        why = f"loss {loss} reads no advantages"
        yield True, "scorer", (*baseline, *chosen, "kl_coefficient"), why
    yield not scorer.kl_coefficient, "scorer", ("kl_estimator",), "kl_coefficient is 0"
    reference = ("reference_model", "reference_server")
    why = "reference_logprobs is false"
    yield not scorer.needs_reference, "scorer", reference, why
    loads = scorer.needs_reference and scorer.reference_server is None
    loads = loads or any(model.server is None for model in scorer.models)
    yield not loads, "scorer", ("dtype", "num_threads", "max_row_tokens"), "it loads no model"


def _unused_in_places(config: JobConfig) -> Iterator[_Row]:
    """Yield keys of engines, collectors, machines and ports."""
    inference, launch, trackers = config.inference, config.launch, config.trackers
    engine = f'engine is "{config.engine}"'
    is_ours = config.engine == "transformers"
    yield is_ours, "inference", ("tensor_parallel_size", "kv_cache_mib"), engine
    yield not inference.max_adapters, "inference", ("max_adapter_rank",), "max_adapters is 0"
    why = "min_batch_size is 1"
    yield inference.min_batch_size == 1, "inference", ("batching_timeout_s",), why
    why = "replay_routed_experts is false in [train]"
    replays = config.train.replay_routed_experts
    yield not replays, "inference", ("record_routed_experts",), why
    is_apart, why = config.placement == "split", 'placement is "split"'
    yield is_apart, "inference", ("wake_after_s",), why
    yield is_apart, "train", ("sleep_drain_s",), why
    sections = config.all_environments
    plays = any(each.agent or each.play != "chat" for each in sections)
    why = "the policy itself plays all environments"
    yield not plays, "collector", ("agent_time_limit_s",), why
    why = "an agent sets its own in each environment"
    yield all(each.agent for each in sections), "collector", ("stop",), why
    yield not config.replay.max_waiting_groups, "replay", ("overflow",), "max_waiting_groups is 0"
    tracks = (trackers.trackio, trackers.wandb, trackers.tensorboard, *trackers.use)
    yield not any(tracks), "trackers", ("project",), "no tracker is on"
    yield not config.console, "ports", ("console",), "console is false"
    yield config.store == "memory", "ports", ("redis",), 'store is "memory"'
    yield config.train.num_nodes == 1, "ports", ("rendezvous",), "one machine trains"
    on = f'on is "{launch.on}" in [launch]'
    for other in ("ray", "slurm"):
        why = f"{on}; `dialoop train --on {other}` starts the job there"
        yield launch.on != other, f"launch.{other}", (), why
    yield launch.on == "local", "launch", ("shared_folder",), on


def _unused_of(
    section: EnvironmentSection, config: JobConfig
) -> Iterator[tuple[object, tuple[str, ...], str]]:
    """Yield keys of one environment, as rows without their table."""
    split = ("heldout_fraction",)
    yield not section.task_file, split, "no task_file is named"
    yield section.heldout_file, split, "heldout_file has the tasks for evaluation"
    yield len(config.all_environments) == 1, ("weight",), "there is no other environment"
    yield section.play != "chat", ("tools_in_prompt",), f'play is "{section.play}"'
    why = "evaluations use the first environment alone"
    is_further = section is not config.environment
    yield is_further, ("heldout_split", "heldout_file"), why
    is_sft = config.train.mode == "sft"
    yield is_sft and is_further, (), 'mode is "sft" in [train], which trains on the first alone'


def warnings_for_steps(config: JobConfig) -> Iterator[str]:
    """Yield a warning for each number of updates or samples that others never reach."""
    train, warm_start, inference = config.train, config.warm_start, config.inference
    is_rl, num_steps = train.mode == "rl", train.num_steps
    if is_rl and num_steps and train.num_minibatches > train.groups_per_train_step:
        yield (
            f"num_minibatches is {train.num_minibatches} in [train], above groups_per_train_step "
            f"{train.groups_per_train_step}, so an update trains less than a group: lower the "
            "first or raise the second"
        )
    num_updates = num_steps * (train.num_minibatches * train.objective.num_epochs if is_rl else 1)
    is_known = is_rl or not config.sft.num_epochs
    for key, number, most in (
        ("num_warmup_updates in [train]", train.num_warmup_updates, is_known and num_updates),
        (
            "num_warmup_steps in [warm_start]",
            warm_start.num_warmup_steps,
            is_rl and warm_start.num_steps,
        ),
    ):
        if most and number >= most:
            yield (
                f"{key} is {number}, and there are {most} in all, so learning_rate is never "
                f"reached: set it below {most}"
            )
    each = _episodes_of_a_replica(config)
    if each and inference.min_batch_size > each:
        yield (
            f"min_batch_size is {inference.min_batch_size} in [inference], and at most {each:g} "
            "samples of training are with a replica at one time, so each batch waits for "
            "batching_timeout_s: lower it"
        )


def warnings_for_agents(config: JobConfig) -> Iterator[str]:
    """Yield a warning for each limit of recordings that playing agents would reach."""
    if not any(section.agent for section in config.all_environments):
        return
    inference, longest = config.inference, config.collector.agent_time_limit_s
    each = _episodes_of_a_replica(config)
    if each > inference.max_recordings:
        yield (
            f"max_recordings is {inference.max_recordings} in [inference], and up to {each:g} "
            "episodes of agents are recorded by a replica at one time, of which the others fail: "
            "raise it, or lower max_groups_in_flight in [collector]"
        )
    if inference.recording_ttl_s < longest:
        yield (
            f"recording_ttl_s is {inference.recording_ttl_s:g} in [inference], below "
            f"agent_time_limit_s {longest:g} in [collector]: an agent that makes no call for so "
            "long loses its recording, so raise the first"
        )


def _episodes_of_a_replica(config: JobConfig) -> float:
    """Return how many training episodes a replica has at one time, at the first depth."""
    num_groups, most = config.train.max_outstanding_groups, config.collector.max_groups_in_flight
    if most != "auto":
        num_groups = min(num_groups, most)
    return num_groups * config.collector.group_size / config.inference.num_replicas


def warnings_for_formats(config: JobConfig) -> tuple[str, ...]:
    """Return a warning for each number format that would round away what the job learns."""
    trains = config.train.num_steps or config.train.mode == "sft" or config.warm_start.num_steps
    bound = config.logprob_bound
    warnings: list[str] = []
    if trains and config.dtype == _HALF:
        warnings.append(
            "dtype bfloat16 rounds away updates below a 256th of a weight: set dtype to float32 "
            f'with autocast = "{_HALF}" in [train] and dtype = "{_HALF}" in [inference]'
        )
    if trains and _HALF in (config.dtype, config.inference.dtype) and bound < _ROUNDING:
        warnings.append(
            f"log-probs in bfloat16 differ by more than logprob_difference_at_most = {bound:g} in "
            "[gates]: leave it out"
        )
    return tuple(warnings)


def warnings_for_cache(config: JobConfig) -> tuple[str, ...]:
    """Return a warning where a share of memory sets vLLM's cache, and demands to be free."""
    if config.engine != "vllm" or config.inference.has_fixed_cache:
        return ()
    share = config.inference.engine["gpu_memory_utilization"]
    return (
        f"gpu_memory_utilization = {share} in [inference.engine] takes the place of kv_cache_mib: "
        "vLLM fills that share of the GPU, and starts or restarts only where so much is free. "
        "Beside a trainer on the same GPU leave it out, and set kv_cache_mib in [inference]",
    )


def warnings_for_rewards(config: JobConfig) -> tuple[str, ...]:
    """Return a warning for reward functions beside an agent, which may reward itself."""
    return tuple(
        f"{name} in the options of environment {section.served_name} rewards an episode only where "
        f"the agent {section.agent} returns None: a reward that it returns takes their place"
        for section in config.all_environments
        for name in _REWARD_OPTIONS
        if section.agent and section.options.get(name)
    )


def warnings_for_advantages(config: JobConfig) -> tuple[str, ...]:
    """Return a warning for each setting of [scorer] that differs from what the loss needs.

    A loss that needs GRPO's advantages also works with others, so it gets no warning about them.
    """
    if config.train.mode != "rl" or not config.train.num_steps:
        return ()
    loss, baseline = config.train.loss, config.scorer.baseline_for(config.train.loss)
    facts, default = facts_of(loss), LossFacts()
    needed = {name: getattr(facts, name) for name in baseline}
    is_own = bool(config.scorer.advantage_estimator)
    if is_own or all(needed[name] == getattr(default, name) for name in needed):
        needed = {}
    differing = {name: value for name, value in needed.items() if value != baseline[name]}
    if facts.drop_uniform and not config.scorer.drop_uniform:
        differing["drop_uniform"] = True
    if config.scorer.drop_uniform and not facts.needs_advantages:
        differing["drop_uniform"] = False
    return tuple(
        f"loss {loss} is meant for {name} = {str(value).lower()} in [scorer], and this config "
        "says otherwise"
        for name, value in differing.items()
    )
