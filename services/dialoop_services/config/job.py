"""Define the job config: what a TOML file may say. The defaults train arithmetic.

engine = "vllm"
[train]
num_steps = 50

The tables that services read stand in `dialoop_services.config.tables`. This module has the tables
of the stack, of demonstrations and of what is measured, and the checks that concern two tables.
"""

from __future__ import annotations

from typing import Any, Literal

from dialoop_learning.loss.facts import facts_of
from pydantic import Field, model_validator

from dialoop_services.config.derived import with_derived
from dialoop_services.config.engines import (
    EngineName,
    facts_of_engine,
    require_device,
    require_options,
)
from dialoop_services.config.launch import LaunchSection
from dialoop_services.config.presets import with_preset
from dialoop_services.config.resources import ResourcesSection
from dialoop_services.config.scorer_tables import ScorerSection
from dialoop_services.config.tables import (
    DEVICE_PLANES,
    CollectorSection,
    Dtype,
    EnvironmentSection,
    InferenceSection,
    ModelSection,
    ReplaySection,
    TrainSection,
)
from dialoop_services.config.values import FilePath, Section

SCHEMA = 1
"""Version of the job file that this package reads."""

_HALF = "bfloat16"
_EXACT_BOUND, _HALF_BOUND = 1e-4, 0.5
"""Nats that single log-probs may differ by: in float32, and where one side rounds to bfloat16.
There an unlikely token may be off by tenths, and the mismatch KL by depth is what tells a fault."""


class WarmStartSection(Section):
    """Supervised steps on demonstrations before reinforcement learning."""

    num_steps: int = Field(default=0, ge=0)
    """Number of supervised steps before reinforcement learning; 0: none."""
    batch_size: int = Field(default=64, ge=1)
    """Number of demonstrations in a step of the warm start."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate of the warm start; it decays to a tenth."""
    num_warmup_steps: int = Field(default=20, ge=0)
    """Number of steps in which the warm start's learning rate rises from 0."""
    checkpoint_every: int = Field(default=100, ge=1)
    """Number of warm-start steps between checkpoints."""
    file: FilePath = ""
    """Demonstrations, rows of {"messages": [...]}: a JSONL or Parquet file, or the folder of a
    saved data set; empty: the environment's own."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of `file` to leave out; others than messages and tools are refused."""


class SftSettings(Section):
    """Supervised fine-tuning, for `mode = "sft"`; steps, rates and schedules are in [train]."""

    file: FilePath = ""
    """Demonstrations, rows of {"messages": [...]}: a JSONL or Parquet file, or the folder of a
    saved data set, of which the split "train" counts. Empty: what the environment demonstrates for
    the tasks of its train split."""
    heldout_file: FilePath = ""
    """Demonstrations for the held-out loss: a file, or a folder with its split "test"; empty:
    heldout_fraction of `file`."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of both files to leave out; others than messages and tools are refused."""
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of `file` that is kept for the held-out loss, below 1."""
    batch_size: int = Field(default=64, ge=1)
    """Number of demonstrations in a train step."""
    num_epochs: int = Field(default=0, ge=0)
    """Number of times to go over all demonstrations; 0: as many steps as train.num_steps says."""


class EvaluationSection(Section):
    """Held-out evaluation through the same services."""

    num_tasks: int = Field(default=256, ge=0)
    """Number of tasks before and after training, greedy and sampled; 0: no evaluation."""
    every: int = Field(default=10, ge=0)
    """Number of train steps between evaluations during training; 0: none."""
    num_running_tasks: int = Field(default=64, ge=1)
    """Number of tasks in an evaluation during training."""
    min_share: float = Field(default=0.9, gt=0, le=1)
    """Share of an evaluation's episodes that must count, since nothing but the policy failed in
    them. Below it the mean ends no training, is no best, and no gate on it holds."""
    stop_at: float | None = None
    """Reward in an evaluation during training at which training stops; absent: never. With mode
    "sft" it is the negative of the held-out loss."""
    stop_without_gain: int = Field(default=0, ge=0)
    """Number of evaluations in a row without a new best after which training stops; 0: never."""


class TrackerSettings(Section):
    """Trackers that get the rows of metrics.jsonl too; each needs its package."""

    trackio: bool = False
    """Whether trackio gets the metrics."""
    wandb: bool = False
    """Whether Weights & Biases gets the metrics."""
    tensorboard: bool = False
    """Whether tensorboardX writes TensorBoard event files under the run's directory."""
    use: tuple[str, ...] = ()
    """Trackers of your own, as ["module:Class"]."""
    project: str = "dialoop"
    """Name of the project in which trackers file the run."""


class GatesSection(Section):
    """What must hold at the end for exit code 0, besides the built-in checks; absent: no check."""

    heldout_greedy_before_at_most: float | None = None
    """Largest mean reward of the greedy held-out evaluation before training."""
    heldout_greedy_after_at_least: float | None = None
    """Smallest mean reward of the greedy held-out evaluation after training."""
    heldout_sampled_gain_at_least: float | None = None
    """Smallest gain of the sampled held-out mean reward: after training, minus before."""
    tool_call_rate_after_at_least: float | None = None
    """Smallest share of sampled held-out trajectories that call a tool, after training."""
    older_data_share_at_least: float | None = None
    """Smallest share of train steps that used data of an older policy version."""
    policy_versions_at_least: int | None = None
    """Smallest number of published policy versions."""
    logprob_difference_at_most: float | None = Field(default=None, gt=0)
    """Largest difference of log-probs between trainer and engine, in nats. It is measured after
    every publish and, at the end, by scoring a sample of the trajectories again. Absent: 0.0001
    where both compute in float32, and 0.5 where one of them computes in bfloat16."""
    rescoring_s: float = Field(default=60.0, ge=0)
    """Seconds that scoring trajectories again may take at the end; 0: nothing is scored again."""


class PortsSection(Section):
    """Fixed ports on 127.0.0.1; 0: any free one."""

    redis: int = Field(default=0, ge=0, le=65535)
    """Port of Redis, where the stack starts one; 0: any free one."""
    replay: int = Field(default=0, ge=0, le=65535)
    """gRPC port of the replay service; 0: any free one."""
    environment: int = Field(default=0, ge=0, le=65535)
    """gRPC port of the environment service; 0: any free one."""
    inference: int = Field(default=0, ge=0, le=65535)
    """gRPC port of the first inference replica; 0: any free one."""
    trainer: int = Field(default=0, ge=0, le=65535)
    """gRPC port of the trainer; 0: any free one."""
    scorer: int = Field(default=0, ge=0, le=65535)
    """gRPC port of the scorer; 0: any free one."""
    collector: int = Field(default=0, ge=0, le=65535)
    """gRPC port of the collector; 0: any free one."""
    replay_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the replay service; 0: any free one."""
    environment_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the environment service; 0: any free one."""
    inference_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the first inference replica; 0: any free one."""
    trainer_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the trainer; 0: any free one."""
    scorer_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the scorer; 0: any free one."""
    collector_rest: int = Field(default=0, ge=0, le=65535)
    """Port of the collector's health and metrics; 0: any free one."""
    rendezvous: int = Field(default=0, ge=0, le=65535)
    """Port at which the trainer's machines meet, where there are several; 0: any free one."""
    console: int = Field(default=0, ge=0, le=65535)
    """Port of the console; 0: any free one."""


class JobConfig(Section):
    """A whole job."""

    run: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the run; its files are in runs/<name>/. It has up to 64 letters, digits, "_", "." and
    "-", and starts with a letter or digit."""
    preset: Literal["", "torchrl_grpo", "torchtune_grpo"] = ""
    """Defaults of another library's GRPO for [train] and [scorer], under the keys that this file
    sets: "torchrl_grpo" or "torchtune_grpo"; empty: Dialoop's own."""
    seed: int = Field(default=0, ge=0)
    """Seed of the tiny model, demonstrations, task order and sampling. The variable SEED overrides
    it."""
    engine: EngineName = "vllm"
    """Engine that samples: "vllm", "transformers", "openai" (a server that Dialoop does not run; it
    is not trained), or the import path of yours, module:Class."""
    dtype: Dtype = "float32"
    """Number format of the trainer's weights: "float32" or "bfloat16". Log-probs of engine and
    trainer agree to 1e-4 in float32 only."""
    store: Literal["redis", "memory"] = "redis"
    """Where the queue is kept: "redis", or "memory", which is saved at a clean stop alone."""
    placement: Literal["split", "shared"] = "split"
    """Devices: "split" for engines and trainer apart, "shared" for turns on the same devices."""
    discovery: Literal["addresses", "registry"] = "addresses"
    """Inference replicas that collectors and the trainer use: the "addresses" of this stack, or
    those in the "registry", which may join and leave while the job runs."""
    hang_timeout_s: float = Field(default=60.0, ge=0)
    """Seconds without any answer after which a process of the stack is killed and started again; 0:
    never."""
    console: bool = True
    """Serve the console of this run while its services run."""
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    environments: tuple[EnvironmentSection, ...] = ()
    """Further environments to train on, by weight. The warm start and evaluations use [environment]
    alone."""
    inference: InferenceSection = InferenceSection()
    collector: CollectorSection = CollectorSection()
    replay: ReplaySection = ReplaySection()
    scorer: ScorerSection = ScorerSection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    sft: SftSettings = SftSettings()
    evaluation: EvaluationSection = EvaluationSection()
    trackers: TrackerSettings = TrackerSettings()
    gates: GatesSection = GatesSection()
    ports: PortsSection = PortsSection()
    resources: ResourcesSection = ResourcesSection()
    launch: LaunchSection = LaunchSection()

    @property
    def logprob_bound(self) -> float:
        """Return how far log-probs of trainer and engine may be apart, in nats."""
        bound = self.gates.logprob_difference_at_most
        formats = (self.dtype, self.inference.dtype, self.train.autocast)
        return bound or (_HALF_BOUND if _HALF in formats else _EXACT_BOUND)

    @property
    def is_one_device_each(self) -> bool:
        """Return whether trainer and replicas are one process with one device each."""
        replicas = self.inference.num_replicas * self.inference.num_devices
        return replicas == self.train.num_ranks == 1

    @property
    def all_environments(self) -> tuple[EnvironmentSection, ...]:
        """Return the environments that are trained on, [environment] first."""
        return (self.environment, *self.environments)

    @model_validator(mode="before")
    @classmethod
    def _with_preset_of_known_schema(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        values = with_derived(with_preset(value))
        schema = values.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise ValueError(
                f"schema is {schema!r}, and this version of Dialoop reads schema {SCHEMA}: install "
                f"the version that the file was written for, or set schema = {SCHEMA} and compare "
                "the keys with `dialoop config print`"
            )
        return values

    @model_validator(mode="after")
    def _require_places_that_fit(self) -> JobConfig:
        """Refuse what machines, devices and data plane cannot do together."""
        if self.discovery == "registry":
            if self.placement == "shared":
                raise ValueError(
                    'placement = "shared" takes turns with the replicas of this machine alone; '
                    'set discovery = "addresses"'
                )
            if self.inference.data_plane in DEVICE_PLANES:
                raise ValueError(
                    f'inference.data_plane = "{self.inference.data_plane}" connects the replicas '
                    'that are there at the start; set discovery = "addresses", or another '
                    "data plane"
                )
        on = self.launch.on
        if on != "local" and self.placement == "shared":
            raise ValueError(
                f'placement = "shared" takes turns on one machine, and on is "{on}" in [launch]: '
                'set placement = "split", or on = "local"'
            )
        if on != "local" and not self.launch.shared_folder:
            if self.inference.data_plane == "shared_memory":
                raise ValueError(
                    "shared_folder is false in [launch], and data_plane is shared_memory, which "
                    'brings weights through the run\'s folder: set data_plane = "chunks" in '
                    "[inference]"
                )
            if not self.model.directory:
                raise ValueError(
                    "shared_folder is false in [launch], and the tiny model is made in the run's "
                    "folder: set directory in [model] to one that every machine has"
                )
        if self.inference.data_plane in DEVICE_PLANES and self.engine == "transformers":
            raise ValueError(
                f'data_plane = "{self.inference.data_plane}" needs vLLM, and engine is '
                '"transformers": set data_plane = "shared_memory", or engine = "vllm"'
            )
        if self.inference.data_plane == "ipc" and not self.is_one_device_each:
            raise ValueError(
                'data_plane = "ipc" shares the memory of one GPU between one trainer process and '
                "one replica with one device: set num_processes, num_replicas and "
                "tensor_parallel_size to 1, or leave data_plane out"
            )
        return self

    @model_validator(mode="after")
    def _require_parts_that_fit(self) -> JobConfig:
        """Refuse tables that contradict each other."""
        names = [section.served_name for section in self.all_environments]
        if len(set(names)) != len(names):
            raise ValueError(
                f"two environments have the same name: {', '.join(names)}; set a different name "
                "in each"
            )
        self.model.require_publishable(self.inference.data_plane)
        self.train.require_optimizer_for(self.model)
        require_options(self.engine, self.inference.engine)
        require_device(self.engine, self.inference.device)
        if self.train.activation_offload and self.train.device == "cpu":
            raise ValueError(
                "activation_offload moves activations from a GPU to the host's memory, and device "
                "is cpu, where they are already: leave it out, or set activation_checkpointing"
            )
        if self.train.logprob_kernel == "cut" and _HALF not in (self.dtype, self.train.autocast):
            raise ValueError(
                "logprob_kernel cut computes in half precision alone, and dtype is "
                f'{self.dtype}: set autocast = "{_HALF}" in [train], or logprob_kernel = "chunked"'
            )
        if self.train.keep_steps and self.train.num_ranks > 1:
            raise ValueError(
                f"keep_steps is {self.train.keep_steps}, and {self.train.num_ranks} processes "
                "train: set num_processes and num_nodes to 1, or keep_steps to 0, in [train]"
            )
        server, temperature = self.scorer.reference_server, self.collector.temperature
        if server is not None and self.scorer.needs_reference and temperature != 1.0:
            raise ValueError(
                f"temperature is {temperature:g} in [collector], and reference_server in [scorer] "
                "scores at temperature 1: set temperature to 1, or name a reference_model instead"
            )
        if server is not None and self.scorer.reference_model:
            raise ValueError(
                "reference_model and reference_server in [scorer] say the same: leave one out; the "
                "server's model must have the tokenizer of the policy"
            )
        return self

    @model_validator(mode="after")
    def _require_lengths_that_fit(self) -> JobConfig:
        """Refuse lengths that leave no room for a prompt, or could not be trained."""
        longest = self.inference.max_model_len
        row_tokens = self.train.row_tokens(longest)
        is_error = self.train.mode == "rl" and self.train.oversize == "error"
        if is_error and row_tokens < longest:
            raise ValueError(
                f"max_row_tokens is {row_tokens}, below max_model_len {longest} in [inference], so "
                "the longest sequences could not be trained: leave it out, raise it, or set "
                "oversize to drop or truncate"
            )
        longest, answer = self.inference.max_model_len, self.collector.max_new_tokens
        if self.train.mode == "rl" and answer >= longest:
            raise ValueError(
                f"max_new_tokens is {answer} in [collector] and max_model_len is {longest} in "
                "[inference], which leaves no token for the prompt: set max_model_len to the "
                "longest prompt plus max_new_tokens, or max_new_tokens to less"
            )
        return self

    @model_validator(mode="after")
    def _require_turns(self) -> JobConfig:
        """Refuse what cannot work where engines and trainer take turns on the same devices."""
        if self.placement == "split":
            return self
        train, inference = self.train, self.inference
        train.require_turns(inference.data_plane)
        if train.num_ranks > 1:
            raise ValueError(
                'placement = "shared" takes one trainer process, and num_processes is '
                f"{train.num_processes} and num_nodes {train.num_nodes}: set both to 1, or "
                "placement to split"
            )
        if not facts_of_engine(self.engine).takes_device or inference.device == train.device:
            return self
        where = {"cpu": "the CPU", "cuda": "a GPU"}
        raise ValueError(
            f'placement = "shared" with engine = "{self.engine}", which samples on '
            f'{where[inference.device]}, and device = "{train.device}" in [train]: they have a '
            "device each; set placement to split, or the same device in [inference]"
        )

    @model_validator(mode="after")
    def _require_what_the_loss_needs(self) -> JobConfig:
        """Refuse groups and scores from which the loss could not learn."""
        size = self.collector.group_size
        if self.train.mode == "rl" and self.train.num_steps and size < 2:
            raise ValueError(
                f"group_size is {size}, and advantages compare the trajectories of a group: set it "
                "to 2 or more in [collector]"
            )
        splits = [env.trial.reward_split for env in self.all_environments]
        dense, aggregate = [s for s in splits if s != "turn"], self.scorer.advantage_aggregate
        if dense and aggregate != "sum":
            raise ValueError(
                f'reward_split is "{dense[0]}" in the table `trial`, which gives each token a '
                f"number, and advantage_aggregate is {aggregate} in [scorer], which compares one "
                "number for each turn: set advantage_aggregate to sum, or leave reward_split out"
            )
        train = self.train
        objective, loss, facts = train.objective, train.loss, facts_of(train.loss)
        is_trained = train.mode == "rl" and train.num_steps
        if is_trained and facts.imitates and not self.scorer.top_k:
            raise ValueError(
                f"loss {loss} imitates all trajectories, bad ones too: set top_k in "
                "[scorer] to choose the best of each group"
            )
        needs_reference = {
            f"loss {loss}": facts.needs_reference,
            f"kl_coeff {objective.kl_coeff:g}": objective.kl_coeff and objective.kl_to == "ref",
            "correction_to ref": objective.correction and objective.correction_to == "ref",
        }
        users = [name for name, needs_it in needs_reference.items() if needs_it]
        if self.train.mode == "rl" and users and not self.scorer.reference_logprobs:
            raise ValueError(
                f"{' and '.join(users)} needs log-probs of a reference model: set "
                "reference_logprobs = true in [scorer]"
            )
        if self.scorer.top_k > self.collector.group_size:
            raise ValueError(
                f"top_k is {self.scorer.top_k}, above group_size {self.collector.group_size}: set "
                f"it to {self.collector.group_size} or less in [scorer]"
            )
        return self

    @model_validator(mode="after")
    def _require_tokens_that_count(self) -> JobConfig:
        """Refuse a correction that no token, or no loss, would have a use for."""
        loss, objective = self.train.loss, self.train.objective
        kind, low, high = objective.correction, objective.correction_low, objective.correction_high
        if kind and (facts_of(loss).imitates or not facts_of(loss).needs_advantages):
            raise ValueError(
                f"correction is {kind}, which weights advantages, and loss {loss} reads none: "
                "leave correction out, or set another loss"
            )
        if kind not in ("", "tis", "kl_mask") and low >= high:
            raise ValueError(
                f"correction_low is {low:g} and correction_high {high:g}, so no token would be "
                "kept: set correction_low lower"
            )
        return self

    @model_validator(mode="after")
    def _require_groups_that_can_come(self) -> JobConfig:
        """Refuse bounds within which no train step would ever have its groups."""
        train, size = self.train, self.collector.group_size
        if train.mode == "sft" or not train.num_steps:
            return self
        turns, num_groups = self.collector.total_turns, train.groups_per_train_step
        if 0 < turns <= (num_groups - 1) * size:
            raise ValueError(
                f"total_turns is {turns} in [collector], which {-(-turns // size)} groups of "
                f"{size} use up, and a train step takes {num_groups}: set it above "
                f"{(num_groups - 1) * size}, or to -1, which is no limit"
            )
        low, high = train.candidates.success_rate_above, train.candidates.success_rate_below
        shares = (successes / size for successes in range(size + 1))
        if not any((low is None or x > low) and (high is None or x < high) for x in shares):
            raise ValueError(
                f"no share of {size} trajectories (group_size in [collector]) lies between "
                f"success_rate_above {low or 0:g} and success_rate_below {high or 1:g}, so no "
                "group could be trained: set them further apart, or a larger group_size"
            )
        return self

    @model_validator(mode="after")
    def _require_gates_that_can_hold(self) -> JobConfig:
        """Refuse gates on figures that the job will not have; it would fail at its very end."""
        gates, size = self.gates, self.collector.group_size
        named = [
            name
            for name in type(gates).model_fields
            if name.startswith(("heldout", "tool_call")) and getattr(gates, name) is not None
        ]
        train = self.train
        is_job = train.num_steps or self.sft.num_epochs  # what serves alone has no gates
        if is_job and named and not self.evaluation.num_tasks:
            raise ValueError(
                f"{' and '.join(named)} in [gates] cannot hold, since num_tasks is 0 in "
                "[evaluation]: set num_tasks above 0, or leave the gate out"
            )
        needs_older = (gates.older_data_share_at_least or 0) > 0
        is_behind = train.first_depth and (
            train.pipeline_depth != "auto" or self.placement == "split"
        )
        if is_job and needs_older and (train.mode == "sft" or not is_behind):
            why = (
                f"pipeline_depth is {train.pipeline_depth} and max_staleness {train.max_staleness}"
            )
            raise ValueError(
                f"older_data_share_at_least in [gates] cannot hold, since {why} in [train] and no "
                "step has older data: raise them, or leave the gate out"
            )
        most = train.num_steps + 1  # and the first one
        versions = gates.policy_versions_at_least or 0
        if is_job and not self.sft.num_epochs and versions > most:
            raise ValueError(
                f"policy_versions_at_least is {versions} in [gates], and {train.num_steps} train "
                f"steps publish {most}: set it to {most} or less, or raise num_steps in [train]"
            )
        least = self.collector.min_group_size
        if "min_group_size" in self.collector.model_fields_set and least > size:
            raise ValueError(
                f"min_group_size is {least}, above group_size {size} in [collector]: set it to "
                f"{size} or less"
            )
        return self
