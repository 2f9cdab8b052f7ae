"""The tables of the job file: one model each, of which the services' settings are made.

class TrainerSettings(JobSettings, TrainFields)      # [train], read from DIALOOP_TRAINER_... too

`XFields` is what a service reads of its table, `XSection` the whole table where the stack reads
more of it. A new key is a field here and its use.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dialoop_services.config.losses import DEFAULT_LOSS, DEMONSTRATION_LOSS, LOSSES, facts_of

DataPlane = Literal["shared_memory", "chunks", "nccl", "ipc"]
Dtype = Literal["float32", "bfloat16"]
UpdateMode = Literal["recompute", "keep_kv", "wait"]
Oversize = Literal["error", "drop", "truncate"]
"""What becomes of a sequence that is longer than a packed row."""

DEVICE_PLANES = ("nccl", "ipc")
"""Data planes that move whole tensors between devices, which both sides hold at once."""

_MIN_BAD_BATCHES = 3
_MIN_ROW_TOKENS = 1024


class Section(BaseModel):
    """A table."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelSection(Section):
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

    def publishes_adapters(self, data_plane: DataPlane) -> bool:
        """Return whether replicas get the adapter alone and add it into their base weights."""
        asked = self.publish or ("merged" if data_plane in DEVICE_PLANES else "adapter")
        return bool(self.lora_rank) and asked == "adapter"

    def require_publishable(self, data_plane: DataPlane) -> None:
        """Raise ValueError where an adapter alone cannot be published."""
        if self.publish == "adapter" and not self.lora_rank:
            raise ValueError('publish = "adapter" in [model] needs a lora_rank')
        if self.publish == "adapter" and data_plane in DEVICE_PLANES:
            raise ValueError(
                f'data_plane {data_plane} moves whole tensors only: set publish = "merged" in '
                "[model]"
            )


class EnvironmentSection(Section):
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
    """Share of the task file that is held out for evaluation."""
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

    @property
    def arguments(self) -> dict[str, Any]:
        """What the function that makes it is given: the options, and the files of a task file."""
        if not self.task_file:
            return dict(self.options)
        if self.heldout_file:
            files: dict[str, Any] = {"heldout_path": self.heldout_file}
        else:
            files = {"heldout_fraction": self.heldout_fraction}
        return {"path": self.task_file, **files, **self.options}

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _require_one_kind(self) -> Self:
        if self.heldout_file and not self.task_file:
            raise ValueError("heldout_file needs a task_file")
        if self.task_file and self.use not in ("arithmetic", "jsonl"):
            raise ValueError("give use or task_file, not both")
        return self


class InferenceFields(Section):
    """How the policy is sampled from."""

    max_model_len: int = Field(default=384, ge=2)
    """Most tokens of prompt and response together."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences sampled at one time."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Number format of the engine, which casts what is published; empty: as the trainer's."""
    data_plane: DataPlane = "shared_memory"
    """How a publish gets here: a file in memory, bytes over gRPC, or vLLM's own transfer (CUDA)."""
    update_mode: UpdateMode = "recompute"
    """What a publish does to answers under way: compute their keys anew, keep them, or wait."""
    kv_cache_mib: int = Field(default=64, ge=1)
    """Memory of vLLM's keys and values."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one replica spans."""
    max_adapters: int = Field(default=0, ge=0)
    """LoRA adapters held beside the policy; 0 for none, as vLLM is half as fast with them."""
    max_adapter_rank: int = Field(default=16, ge=1)
    """Largest rank of an adapter."""
    batching: bool = True
    """Whether requests may be made to wait for each other; sizes without it are an error."""
    min_batch_size: int = Field(default=1, ge=1)
    """Samples that begin together; the first ones wait for so many, up to the timeout."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Samples that are with the engine at one time; absent: as many as it takes."""
    batching_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a request begins with whoever is there."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the transformers engine."""
    wake_after_s: float = Field(default=60.0, gt=0)
    """Seconds without anybody on a shared device until a sleeping replica wakes by itself."""
    served_model_name: str = ""
    """The policy's name under /v1/models; empty: that of its directory."""
    max_recordings: int = Field(default=1024, ge=1)
    """Recordings kept at one time; closed ones give way to new ones."""
    max_recorded_calls: int = Field(default=512, ge=1)
    """Calls of one recording."""
    recording_ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call until a recording is dropped."""

    @model_validator(mode="after")
    def _require_sizes_that_fit(self) -> Self:
        fields = InferenceFields.model_fields
        sizes = ("min_batch_size", "max_batch_size", "batching_timeout_s")
        given = [name for name in sizes if getattr(self, name) != fields[name].default]
        if given and not self.batching:
            raise ValueError(
                f"{', '.join(given)} say how to batch, and batching is false: leave them out, or "
                "turn batching on"
            )
        if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"min_batch_size is {self.min_batch_size}, above max_batch_size, which is "
                f"{self.max_batch_size}"
            )
        return self


class InferenceSection(InferenceFields):
    """How the policy is sampled from."""

    num_replicas: int = Field(default=1, ge=1, le=64)
    """Inference processes; each loads every publish."""


class CollectorSection(Section):
    """How episodes are played."""

    group_size: int = Field(default=8, ge=1)
    """Trajectories of one task: advantages are computed among them, so that RL needs two."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training tasks that do not say."""
    max_groups_in_flight: int = Field(default=16, ge=1)
    """Groups played at one time."""
    max_new_tokens: int = Field(default=24, ge=1)
    """Most tokens of one turn, for tasks that do not say."""
    stop: tuple[str, ...] | None = None
    """Strings that end an answer, for tasks that do not say; absent: the environment's own."""
    max_turns: int = Field(default=64, ge=1)
    """Turns after which an episode ends whose environment never ends it."""
    agent_time_limit_s: float = Field(default=600.0, gt=0)
    """Longest run of an agent."""
    page_size: int = Field(default=64, ge=1)
    """Tasks offered at a time, and kept waiting in the queue."""
    member_retries: int = Field(default=2, ge=0)
    """How often a trajectory that failed through no fault of the policy is played again."""
    lease_s: float = Field(default=60.0, ge=1)
    """Seconds until the queue takes a task back from a collector that is gone."""
    wait_s: float = Field(default=5.0, gt=0)
    """Longest wait of one request for tasks."""
    patience_s: float = Field(default=120.0, gt=0)
    """How long a service may be away before the groups that need it are given back."""


class RewardSpec(Section):
    """A reward computed on whole groups: {"name": "brief", "use": "mine:brief", "weight": 0.1}."""

    name: str = Field(min_length=1)
    """What the reward is called in trajectories and metrics."""
    use: str
    """`module:function` of yours."""
    weight: float = 1.0
    """Factor of the reward."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest computation for one group."""


class ScorerFields(Section):
    """How groups are scored."""

    divide_by_std: bool | None = None
    """Divide advantages by the standard deviation of rewards; absent: as the loss is meant."""
    leave_one_out: bool | None = None
    """Compare each trajectory with the mean of the others; absent: as the loss is meant."""
    advantages_of: Literal["trajectory", "turn"] = "trajectory"
    """Advantages of whole trajectories, or of each turn among all turns of the group."""
    advantage_aggregate: Literal["sum", "max", "mean"] = "sum"
    """What of the rewards of a trajectory's turns is compared: sum, largest or mean."""
    top_k: int = Field(default=0, ge=0)
    """Advantage 1 for at most this many of a group, of those above its median, 0 for the others.

    Losses that imitate (sft, minor_sft) train those alone; 0: advantages as otherwise set.
    """
    drop_uniform: bool = False
    """Drop groups whose rewards are all the same, from which nothing is learned."""
    reference_logprobs: bool = False
    """Give every sampled token its log-prob under the reference: for KL terms and distillation."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Reward -coefficient * KL(policy, reference model) of each trajectory."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How KL is estimated from the sampled tokens."""
    dtype: Dtype = "float32"
    """Number format of the reference model."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where the reference model is: cpu, cuda or cuda:1."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the reference model."""
    rewards: tuple[RewardSpec, ...] = ()
    """Rewards beside the environment's: {name, use = "module:function", weight}."""
    advantage_eps: float = Field(default=1e-6, gt=0)
    """Smallest divisor, and the spread of rewards up to which a group counts as uniform."""
    max_row_tokens: int = Field(default=4096, ge=16)
    """Most tokens in a packed row; a longer sequence has a row of its own."""
    max_groups: int = Field(default=8, ge=1)
    """Groups leased at a time."""
    lease_s: float = Field(default=60.0, ge=1)
    """Seconds until the queue takes groups back from a scorer that is gone."""
    wait_s: float = Field(default=5.0, gt=0)
    """Longest wait of one request for groups."""
    patience_s: float = Field(default=120.0, gt=0)
    """How long the queue may be away before work is left to another delivery."""

    def baseline_for(self, loss: str) -> dict[str, bool]:
        """Return divide_by_std and leave_one_out: this table's word, or else as `loss` is meant."""
        facts = facts_of(loss)
        return {
            name: getattr(facts, name) if getattr(self, name) is None else getattr(self, name)
            for name in ("divide_by_std", "leave_one_out")
        }

    @model_validator(mode="after")
    def _require_something_to_aggregate(self) -> Self:
        if self.advantages_of == "turn" and self.advantage_aggregate != "sum":
            raise ValueError(
                f"advantage_aggregate is {self.advantage_aggregate}, and advantages are of turns, "
                "whose rewards are not put together: leave it out, or set advantages_of to "
                "trajectory"
            )
        if self.advantages_of == "turn" and self.top_k:
            raise ValueError(
                "top_k chooses whole trajectories, and advantages are of turns: set advantages_of "
                "to trajectory, or leave top_k out"
            )
        if self.kl_coefficient and self.advantage_aggregate != "sum":
            raise ValueError(
                f"advantage_aggregate is {self.advantage_aggregate}, which would lose or shrink "
                "the KL penalty, a reward of the last turn: set kl_coefficient to 0, or the "
                "aggregate to sum"
            )
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names) or "kl" in names:
            raise ValueError(
                f"the rewards {names} are not named apart: give each its own name; 'kl' is taken"
            )
        return self


class ScorerSection(ScorerFields):
    """How groups are scored."""

    reference_model: str = ""
    """Directory of the reference or teacher model; empty: the starting model."""


class WarmStartSection(Section):
    """Supervised steps on demonstrations before reinforcement learning."""

    num_steps: int = Field(default=0, ge=0)
    """SFT steps; 0 for none."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations in a step."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak learning rate; decays to a tenth."""
    num_warmup_steps: int = Field(default=20, ge=0)
    """Steps that raise the learning rate from 0."""
    checkpoint_every: int = Field(default=100, ge=1)
    """SFT steps between checkpoints."""
    file: str = ""
    """JSONL of {"messages": [...]}; empty: the environment's own demonstrations."""


class ObjectiveSettings(Section):
    """Aggregation, KL term, entropy bonus, correction for sampler mismatch."""

    aggregation: Literal["", "token", "sequence", "prompt", "constant", "sum"] = ""
    """How token losses become one number; empty: as the loss's paper has it."""
    constant: float = Field(default=0.0, ge=0)
    """Divisor of aggregation "constant"; 0: max_new_tokens."""
    kl_coeff: float = Field(default=0.0, ge=0)
    """Weight of the KL term; 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL from sampled tokens."""
    kl_to: Literal["ref", "inference"] = "ref"
    """KL to the scorer's reference model, or to the engine that sampled."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; 0 for none."""
    entropy_metric: bool = True
    """Measure the entropy where it is no part of the loss, too (never with kernel "cut")."""
    correction: Literal["", "tis", "icepop", "token_mask", "sequence_mask", "kl_mask"] = ""
    """Weights for tokens that engine and trainer see differently; empty for none."""
    correction_low: float = Field(default=0.5, ge=0)
    """Smallest ratio trainer / engine that is kept."""
    correction_high: float = Field(default=2.0, gt=0)
    """Largest ratio that is kept; of kl_mask, the largest squared log-ratio over two."""
    correction_to: Literal["inference", "ref"] = "inference"
    """What kl_mask keeps the policy near: the engine that sampled, or the scorer's reference."""
    proximal: bool = False
    """Clip around the policy as the train step began, not around the engine's."""
    num_epochs: int = Field(default=1, ge=1)
    """Times that a train step goes over its batch."""
    max_fresh_mismatch_kl: float = Field(default=1e-2, gt=0)
    """KL between engine and trainer on data of the present policy that is an alarm, in nats."""

    @model_validator(mode="after")
    def _require_a_correction_to_the_reference(self) -> Self:
        if self.correction_to == "ref" and self.correction != "kl_mask":
            raise ValueError(
                f"correction_to is ref, and correction '{self.correction}': only kl_mask is of the "
                "reference, the others are of the engine that sampled"
            )
        return self


class SftSettings(Section):
    """Supervised fine-tuning, for `mode = "sft"`; steps, rates and schedules are those of train."""

    file: str = ""
    """JSONL of {"messages": [...]}; empty: what the environment demonstrates of its train split."""
    heldout_file: str = ""
    """Demonstrations to take the held-out loss on; empty: a share of `file`."""
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of `file` that is held out for the held-out loss."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations in a train step."""
    num_epochs: int = Field(default=0, ge=0)
    """Times to go over all demonstrations; 0: as many steps as train.num_steps says."""


class TrainFields(Section):
    """The training itself: reinforcement learning, or supervised fine-tuning."""

    mode: Literal["rl", "sft"] = "rl"
    """Reinforcement learning on what collectors play, or `sft` on the demonstrations of `sft`."""
    num_steps: int = Field(default=50, ge=0)
    """Train steps; one leased batch (or batch of demonstrations) and one publish each."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer, of each of its processes."""
    max_row_tokens: int | None = Field(default=None, ge=16)
    """Most tokens in a packed row; absent: 1024, or inference.max_model_len where that is more."""
    groups_per_train_step: int = Field(default=16, ge=1)
    """Groups leased for a train step."""
    # A few are no reason to stop, and become dead letters. So many without one that can be trained
    # mean that settings, loss and scorer do not go together.
    max_bad_groups: int = Field(default=16, ge=1)
    """Groups in a row that no train step can take before the job fails; three batches at least."""
    num_minibatches: int = Field(default=2, ge=1)
    """Optimiser updates of a train step."""
    oversize: Oversize = "error"
    """A sequence above max_row_tokens: set its group aside, or drop or truncate it alone."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What takes all updates; muon for hidden matrices with adamw for the rest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes down to a tenth over all updates, or not."""
    num_warmup_updates: int = Field(default=0, ge=0)
    """Updates that raise the learning rate from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm to clip at."""
    loss: str = DEFAULT_LOSS
    """A built-in loss, or `module:function` of yours; of SFT `sft` or `minor_sft`."""
    loss_options: dict[str, float] = {}
    """Options of the loss, as clip_low and clip_high."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """What goes with any loss: aggregation, KL, entropy, corrections, epochs."""
    pipeline_depth: int = Field(default=2, ge=0)
    """Train steps that generation may run ahead; 0 is synchronous."""
    max_staleness: int = Field(default=4, ge=0)
    """Policy versions that the oldest trained token may lag."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Train steps between checkpoints."""
    sharded_checkpoints: bool = False
    """Every process writes its own part of a checkpoint; either kind resumes on any number."""
    keep_policies: int = Field(default=0, ge=0)
    """Published policies to keep on disk; 0 keeps all, which re-scoring needs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the trainer has its model."""
    lease_s: float = Field(default=120.0, gt=0)
    """Seconds that a leased group is the trainer's without an extension."""
    publish_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds a replica has to load a policy, and to prove it; then the others go on without it."""
    sleep_drain_s: float = Field(default=30.0, gt=0)
    """Seconds that a replica's answers under way have to end when it is put to sleep."""
    autocast: Literal["", "bfloat16"] = ""
    """Compute the layers in this format while weights keep `dtype`; empty for not."""
    logprob_kernel: Literal["chunked", "cut"] = "chunked"
    """Log-probs in chunks, or by cut-cross-entropy: CUDA, bfloat16, no entropy, extra `gpu`."""
    activation_checkpointing: bool = False
    """Compute activations anew in the backward pass: less memory for a third more time."""
    max_trajectories_mb: int = Field(default=4096, ge=0)
    """Size in MB at which the oldest part of trajectories.jsonl goes; 0 keeps all of it."""

    @property
    def demonstration_loss(self) -> str:
        """The loss of demonstrations: the job's own where it imitates, else the plain one."""
        is_supervised = self.mode == "sft" and facts_of(self.loss).imitates
        return self.loss if is_supervised else DEMONSTRATION_LOSS

    @property
    def max_refused_groups(self) -> int:
        """Bad groups in a row that fail the job: max_bad_groups, and no less than three batches."""
        return max(self.max_bad_groups, _MIN_BAD_BATCHES * self.groups_per_train_step)

    @property
    def max_outstanding_groups(self) -> int:
        """Groups that may be outstanding: (pipeline_depth + 1) batches; none when SFT trains."""
        return 0 if self.mode == "sft" else (self.pipeline_depth + 1) * self.groups_per_train_step

    def row_tokens(self, max_model_len: int) -> int:
        """Return the most tokens in a packed row, which holds whatever the engine can sample."""
        if self.max_row_tokens is None:
            return max(_MIN_ROW_TOKENS, max_model_len)
        return self.max_row_tokens

    def require_turns(self, data_plane: DataPlane) -> None:
        """Raise ValueError where trainer and replica could not take turns on one device."""
        if self.mode == "rl" and self.pipeline_depth:
            raise ValueError(
                f"pipeline_depth is {self.pipeline_depth} on a shared device, and nothing is "
                "generated while the trainer has it: set pipeline_depth = 0 in [train]"
            )
        if data_plane in DEVICE_PLANES:
            raise ValueError(
                f"data_plane {data_plane} on a shared device needs trainer and replica there at "
                "the same time: set data_plane to shared_memory"
            )

    def require_optimizer_for(self, model: ModelSection) -> None:
        """Raise ValueError where the optimiser does not train what the model has."""
        if model.lora_rank and self.optimizer == "muon":
            raise ValueError(
                "Muon does not train LoRA, whose two factors are no matrices to make an update of "
                'full rank of: set optimizer = "adamw", or lora_rank = 0'
            )

    @model_validator(mode="after")
    def _require_fresh_enough_data(self) -> Self:
        if self.max_staleness < self.pipeline_depth:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, below pipeline_depth "
                f"{self.pipeline_depth}: all data would end up stale"
            )
        return self

    @model_validator(mode="after")
    def _require_a_kernel_with_entropy(self) -> Self:
        if self.logprob_kernel == "cut" and self.objective.entropy_coeff:
            raise ValueError(
                "entropy_coeff asks for the entropy, and the log-prob kernel cut gives none: set "
                'logprob_kernel = "chunked", or entropy_coeff = 0'
            )
        return self

    @model_validator(mode="after")
    def _require_what_sft_takes(self) -> Self:
        """Demonstrations have neither advantages nor log-probs of an engine."""
        if self.mode == "rl":
            return self
        supervised = [name for name, facts in LOSSES.items() if facts.imitates]
        if self.loss not in (*supervised, DEFAULT_LOSS):
            raise ValueError(
                f'loss is {self.loss} with mode = "sft", whose losses are '
                f"{' and '.join(supervised)}"
            )
        asked, plain = self.objective, ObjectiveSettings()
        for name in ("kl_to", "correction", "proximal", "num_epochs"):
            if getattr(asked, name) != getattr(plain, name):
                raise ValueError(
                    f'objective.{name} is {getattr(asked, name)} with mode = "sft", where it has '
                    "no effect; leave it out"
                )
        return self


class TrainSection(TrainFields):
    """The training itself: reinforcement learning, or supervised fine-tuning."""

    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes that share the model (FSDP2); on CUDA each has a device of its own."""


class EvaluationSection(Section):
    """Held-out evaluation through the same services."""

    num_tasks: int = Field(default=256, ge=0)
    """Tasks before and after training, greedy and sampled; 0 for no evaluation."""
    every: int = Field(default=10, ge=0)
    """Train steps between evaluations while training goes on; 0 for none."""
    num_running_tasks: int = Field(default=64, ge=1)
    """Tasks of an evaluation while training goes on."""
    stop_at: float | None = None
    """Stop once an evaluation while training reaches this reward (of SFT's loss: its negative)."""
    stop_without_gain: int = Field(default=0, ge=0)
    """Stop once so many evaluations in a row are no better than the best; 0 for never."""


class TrackerSettings(Section):
    """Who else gets the rows of metrics.jsonl; each needs its package."""

    trackio: bool = False
    """trackio."""
    wandb: bool = False
    """Weights & Biases."""
    tensorboard: bool = False
    """TensorBoard event files under the run's directory, by tensorboardX."""
    project: str = "dialoop"
    """The project that trackio and Weights & Biases file the run under."""
