"""The job config: what a TOML file may say, with defaults that train the built-in arithmetic task.

What a table shares with its service stands in `dialoop_services.config.shared`, once.

engine = "vllm"
[train]
num_train_steps = 50
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dialoop_services.config.shared import (
    CollectorFields,
    InferenceFields,
    ScorerFields,
    SftSettings,
    TrackerSettings,
    TrainFields,
)

_NEED_REFERENCE = ("distill", "minor_sft")
_IMITATE = ("sft", "minor_sft")


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelSection(_Section):
    """The policy to start from."""

    directory: str = ""
    """Hugging Face model directory with its tokenizer; empty: make the tiny model of the demo."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters, which are trained instead of the weights; 0 trains all weights."""
    lora_alpha: float = Field(default=0.0, ge=0)
    """Scale of the adapters times their rank; 0: twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers with adapters, as ["q_proj", "v_proj"]; empty: all of them."""
    publish: Literal["", "adapter", "merged"] = ""
    """What LoRA publishes; empty: the adapter alone, but the sum over nccl and ipc."""


class EnvironmentSection(_Section):
    """Where tasks come from and who answers the policy."""

    use: str = "arithmetic"
    """`arithmetic`, `jsonl`, or `module:attribute` of yours."""
    name: str = ""
    """The environment's own name; empty: as `use`."""
    task_file: str = ""
    """JSONL file of question and answer pairs; makes `use` "jsonl"."""
    heldout_file: str = ""
    """Tasks to evaluate on; empty: a share of `task_file`."""
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    """That share."""
    train_split: str = "train"
    """Split that is trained on."""
    heldout_split: str = "heldout"
    """Split that is evaluated on."""
    options: dict[str, Any] = {}
    """Arguments of the function that makes the environment."""
    text_environments: tuple[str, ...] = ("calculator",)
    """Text environments to serve beside it: `calculator`, or `module:attribute` of a TextSetup."""
    weight: float = Field(default=1.0, gt=0)
    """How often its tasks are drawn beside those of [[environments]]."""
    agent: str = ""
    """`module:function` of an agent that plays the tasks; empty: the policy plays them itself."""

    @property
    def kind(self) -> str:
        """What to load: `use`, or jsonl when there is a task file."""
        return "jsonl" if self.task_file else self.use

    @property
    def served_name(self) -> str:
        """The name that tasks carry."""
        return self.name or self.kind

    @model_validator(mode="after")
    def _require_one_kind(self) -> EnvironmentSection:
        if self.heldout_file and not self.task_file:
            raise ValueError("heldout_file needs a task_file")
        if self.task_file and self.use not in ("arithmetic", "jsonl"):
            raise ValueError("give use or task_file, not both")
        return self


class InferenceSection(_Section, InferenceFields):
    """How the policy is sampled from."""

    num_replicas: int = Field(default=1, ge=1, le=64)
    """Inference processes; each loads every publish."""
    max_model_len: int = Field(default=384, ge=16)
    """Most tokens of prompt and response together."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences sampled at one time."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Number format of the engine, which casts what is published; empty: as the trainer's."""
    data_plane: Literal["shared_memory", "chunks", "nccl", "ipc"] = "shared_memory"
    """How a publish gets here: a file in memory, bytes over gRPC, or vLLM's own transfer (CUDA)."""


class CollectorSection(_Section, CollectorFields):
    """How episodes are played."""

    max_new_tokens: int = Field(default=24, ge=1)
    """Most tokens of one turn."""


class ScorerSection(_Section, ScorerFields):
    """How groups are scored."""

    divide_by_std: bool | None = None
    """Divide advantages by the standard deviation of rewards; absent: as the loss is meant."""
    leave_one_out: bool | None = None
    """Compare each trajectory with the mean of the others; absent: as the loss is meant."""
    reference_model: str = ""
    """Directory of the reference or teacher model; empty: the starting model."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the reference model."""
    rewards: tuple[dict[str, Any], ...] = ()
    """Rewards beside the environment's: {name, use = "module:function", weight}."""


class WarmStartSection(_Section):
    """Supervised steps on demonstrations before reinforcement learning."""

    num_steps: int = Field(default=0, ge=0)
    """SFT steps; 0 for none."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations in a step."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate; decays to a tenth."""
    num_warmup_steps: int = Field(default=20, ge=0)
    """Steps that raise the learning rate from 0."""
    file: str = ""
    """JSONL of {"messages": [...]}; empty: the environment's own demonstrations."""


class TrainSection(_Section, TrainFields):
    """The training itself: reinforcement learning, or supervised fine-tuning."""

    num_steps: int = Field(default=50, ge=0)
    """Train steps; one leased batch and one publish each."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes that share the model (FSDP2); on CUDA each has a device of its own."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer, of each of its processes."""
    max_row_tokens: int | None = Field(default=None, ge=16)
    """Most tokens in a packed row; absent: 1024, or inference.max_model_len where that is more."""

    @model_validator(mode="after")
    def _require_staleness_covers_depth(self) -> TrainSection:
        if self.max_staleness < self.pipeline_depth:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, below pipeline_depth "
                f"{self.pipeline_depth}: all data would end up stale"
            )
        return self


class EvaluationSection(_Section):
    """Held-out evaluation through the same services."""

    num_tasks: int = Field(default=256, ge=0)
    """Tasks before and after training, greedy and sampled; 0 for no evaluation."""
    every: int = Field(default=10, ge=0)
    """Train steps between evaluations while training goes on; 0 for none."""
    num_running_tasks: int = Field(default=64, ge=1)
    """Tasks of one of those."""
    stop_at: float | None = None
    """Stop training once one of those reaches this mean reward (of SFT's loss: its negative)."""
    stop_without_gain: int = Field(default=0, ge=0)
    """Stop once so many of them in a row are no better than the best; 0 for never."""


class GatesSection(_Section):
    """What must hold at the end for exit code 0, beside what always must; absent: not asked."""

    heldout_greedy_before_at_most: float | None = None
    """Greedy held-out accuracy before training."""
    heldout_greedy_after_at_least: float | None = None
    """Greedy held-out accuracy after training."""
    heldout_sampled_gain_at_least: float | None = None
    """Sampled held-out accuracy after training, less that before."""
    tool_call_rate_after_at_least: float | None = None
    """Share of sampled held-out trajectories that call a tool, after training."""
    older_data_share_at_least: float | None = None
    """Share of train steps that used data of an older policy version."""
    policy_versions_at_least: int | None = None
    """Published policy versions."""
    logprob_difference_at_most: float = Field(default=1e-4, gt=0)
    """Trainer against inference after every publish, and re-scoring, in nats."""


class PortsSection(_Section):
    """Fixed loopback ports; 0 for any free one."""

    redis: int = Field(default=0, ge=0, le=65535)
    """Port of the Redis that is started."""
    replay: int = Field(default=0, ge=0, le=65535)
    """Port of the replay service."""
    environment: int = Field(default=0, ge=0, le=65535)
    """Port of the environment service."""
    inference: int = Field(default=0, ge=0, le=65535)
    """Port of the first inference replica."""
    trainer: int = Field(default=0, ge=0, le=65535)
    """Port of the trainer."""
    scorer: int = Field(default=0, ge=0, le=65535)
    """Port of the scorer."""
    collector: int = Field(default=0, ge=0, le=65535)
    """Port of the collector."""
    replay_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the replay service."""
    environment_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the environment service."""
    inference_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the first inference replica."""
    trainer_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the trainer."""
    scorer_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the scorer."""
    collector_rest: int = Field(default=0, ge=0, le=65535)
    """Port of the collector's health and metrics."""


class JobConfig(_Section):
    """A whole job."""

    run: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the run; its state is under runs/<name>/."""
    seed: int = Field(default=0, ge=0)
    """Seed of the tiny model, demonstrations, task order and sampling; SEED overrides it."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the trainer's weights; log-probs agree to 1e-4 in float32 only."""
    store: Literal["redis", "memory"] = "redis"
    """Where the queue lives; memory forgets when the replay service ends."""
    placement: Literal["split", "shared"] = "split"
    """Engine and trainer on devices of their own, or on one device by turns."""
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    environments: tuple[EnvironmentSection, ...] = ()
    """Further environments to train on, by weight; the warm start and evaluations use the first."""
    inference: InferenceSection = InferenceSection()
    collector: CollectorSection = CollectorSection()
    scorer: ScorerSection = ScorerSection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    sft: SftSettings = SftSettings()
    evaluation: EvaluationSection = EvaluationSection()
    trackers: TrackerSettings = TrackerSettings()
    gates: GatesSection = GatesSection()
    ports: PortsSection = PortsSection()

    @property
    def all_environments(self) -> tuple[EnvironmentSection, ...]:
        """What is trained on, [environment] first."""
        return (self.environment, *self.environments)

    @model_validator(mode="after")
    def _require_names(self) -> JobConfig:
        names = [section.served_name for section in self.all_environments]
        if len(set(names)) != len(names):
            raise ValueError(
                f"two environments have one name: {', '.join(names)}; give each its own"
            )
        return self

    @model_validator(mode="after")
    def _require_an_adapter_to_publish(self) -> JobConfig:
        if self.model.publish == "adapter" and not self.model.lora_rank:
            raise ValueError('publish = "adapter" in [model] needs a lora_rank')
        if self.model.publish == "adapter" and self.inference.data_plane in ("nccl", "ipc"):
            raise ValueError(
                f"data_plane {self.inference.data_plane} moves whole tensors only: set publish = "
                '"merged" in [model]'
            )
        return self

    @model_validator(mode="after")
    def _require_one_device(self) -> JobConfig:
        """What two who take turns on one device cannot do."""
        if self.placement == "split":
            return self
        train, inference = self.train, self.inference
        if train.mode == "rl" and train.pipeline_depth:
            raise ValueError(
                f'placement = "shared" with pipeline_depth = {train.pipeline_depth}: nothing is '
                "generated while the trainer has the device; set pipeline_depth = 0 in [train]"
            )
        if inference.tensor_parallel_size > 1:
            raise ValueError(
                'placement = "shared" is for one device, and tensor_parallel_size is '
                f"{inference.tensor_parallel_size}; set it to 1, or placement to split"
            )
        if train.num_processes > 1:
            raise ValueError(
                'placement = "shared" is for one process of the trainer, and num_processes is '
                f"{train.num_processes}; set it to 1, or placement to split"
            )
        if inference.data_plane in ("nccl", "ipc"):
            raise ValueError(
                f'placement = "shared" with data_plane = "{inference.data_plane}", which needs '
                "both on their devices at once; set data_plane to shared_memory"
            )
        if self.engine == "transformers" and train.device == "cuda":
            raise ValueError(
                'placement = "shared" with engine = "transformers", which samples on the CPU, and '
                'device = "cuda": they have a device each; set placement to split'
            )
        return self

    @property
    def max_row_tokens(self) -> int:
        """A packed row of the trainer holds whatever the engine can sample."""
        said = self.train.max_row_tokens
        return max(1024, self.inference.max_model_len) if said is None else said

    @model_validator(mode="after")
    def _require_rows_for_what_is_sampled(self) -> JobConfig:
        is_asked = self.train.mode == "rl" and self.train.oversize == "error"
        if is_asked and self.max_row_tokens < self.inference.max_model_len:
            raise ValueError(
                f"max_row_tokens is {self.max_row_tokens}, below max_model_len "
                f"{self.inference.max_model_len} in [inference]: a longer sequence could not be "
                "trained; leave it out, raise it, or set oversize"
            )
        return self

    @model_validator(mode="after")
    def _require_a_baseline(self) -> JobConfig:
        size = self.collector.group_size
        if self.train.mode == "rl" and self.train.num_steps and size < 2:
            raise ValueError(
                f"group_size is {size}: advantages compare the trajectories of a group, so that no "
                "group of one is ever trained; set it to 2 or more in [collector]"
            )
        return self

    @model_validator(mode="after")
    def _require_a_choice_to_imitate(self) -> JobConfig:
        train = self.train
        is_trained = train.mode == "rl" and train.num_steps
        if is_trained and train.loss in _IMITATE and not self.scorer.top_k:
            raise ValueError(
                f"loss {train.loss} imitates bad trajectories like good ones: set top_k in "
                "[scorer], which chooses the best of each group"
            )
        return self

    @model_validator(mode="after")
    def _require_reference_for_the_loss(self) -> JobConfig:
        objective, loss = self.train.objective, self.train.loss
        asked = {
            f"loss {loss}": loss in _NEED_REFERENCE,
            f"kl_coeff {objective.kl_coeff:g}": objective.kl_coeff and objective.kl_to == "ref",
            "correction_to ref": objective.correction and objective.correction_to == "ref",
        }
        askers = [name for name, asks in asked.items() if asks]
        if self.train.mode == "rl" and askers and not self.scorer.reference_logprobs:
            raise ValueError(
                f"{' and '.join(askers)} needs log-probs of a reference model: set "
                "reference_logprobs = true in [scorer]"
            )
        if self.scorer.top_k > self.collector.group_size:
            raise ValueError(
                f"top_k is {self.scorer.top_k}, above group_size {self.collector.group_size}"
            )
        return self
