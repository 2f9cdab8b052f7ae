"""Define the tables of the job file: one model each, of which the services' settings are made.

class TrainerSettings(JobSettings, TrainFields)      # [train], read from DIALOOP_TRAINER_... too

`XFields` holds the keys of a table that its service reads. `XSection` is the whole table where the
stack reads more keys of it. A new key needs a field here and the place that uses it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from dialoop.reasons import DropReason
from dialoop_learning.loss.facts import (
    DEFAULT_LOSS,
    DEMONSTRATION_LOSS,
    LOSSES,
    OPTIMIZERS,
    Oversize,
    facts_of,
)
from pydantic import AfterValidator, Field, model_validator

from dialoop_services.config.candidates import CandidateSettings
from dialoop_services.config.mesh import MeshSettings
from dialoop_services.config.values import FilePath, NameOf, Section

DATA_PLANES = ("shared_memory", "chunks", "nccl", "ipc")
DataPlane = Annotated[str, AfterValidator(NameOf("data plane", DATA_PLANES, "module:Class"))]
"""A built-in data plane, or the import path of one."""
Dtype = Literal["float32", "bfloat16"]
LossName = Annotated[str, AfterValidator(NameOf("loss", LOSSES))]
"""A built-in loss, or the import path of one."""
OptimizerName = Annotated[str, AfterValidator(NameOf("optimizer", OPTIMIZERS))]
"""A built-in optimiser, or the import path of one."""
Share = Annotated[float, Field(ge=0, lt=1)]
Device = Literal["auto", "cpu", "cuda"]
UpdateMode = Literal["recompute", "keep_kv", "wait"]
Overflow = Literal["block", "reject", "drop_oldest"]
"""What happens when max_waiting_groups groups wait in the queue and another is to join them."""
DEVICE_PLANES = ("nccl", "ipc")
"""Data planes that copy whole tensors between devices, with both sides on them at once."""

_MIN_BAD_BATCHES, _MIN_ROW_TOKENS = 3, 1024
_FIRST_DEPTH = 2
_STAGES, _MEMORY_SHARE = "pipeline_parallel_size", "gpu_memory_utilization"


def published_dtype(trained: Dtype, engine: str) -> Dtype:
    """Return the number format of whole policies: the engine's, where it is the narrower one."""
    return "bfloat16" if engine == "bfloat16" else trained


def turns_spent(total_turns: int) -> str:
    """Return the reason of tasks for which that limit left no turn.

    A queue keeps its counts: the limit's number lets a job go on that is resumed with another one.
    """
    return f"{DropReason.TURNS_SPENT}_{total_turns}"


class ModelSection(Section):
    """The model that training starts from."""

    directory: FilePath = ""
    """Hugging Face model directory with its tokenizer; empty: the demo's tiny model is made."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of the LoRA adapters to train; 0: the model's own weights are trained instead."""
    lora_alpha: float = Field(default=0.0, ge=0)
    """Scale of the LoRA adapters times their rank; 0: twice lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get LoRA adapters, as ["q_proj", "v_proj"]; empty: all of them."""
    publish: Literal["", "adapter", "merged"] = ""
    """What a LoRA run publishes: "adapter", or "merged" weights that contain it. Empty: "adapter",
    but "merged" where data_plane is "nccl" or "ipc"."""

    def publishes_adapters(self, data_plane: DataPlane) -> bool:
        """Return whether replicas get the adapter alone and add it into their base weights."""
        publish = self.publish or ("merged" if data_plane in DEVICE_PLANES else "adapter")
        return bool(self.lora_rank) and publish == "adapter"

    def require_publishable(self, data_plane: DataPlane) -> None:
        """Raise ValueError where an adapter alone cannot be published."""
        if self.publish == "adapter" and not self.lora_rank:
            raise ValueError('publish = "adapter" in [model] needs a lora_rank above 0')
        if self.publish == "adapter" and data_plane in DEVICE_PLANES:
            raise ValueError(
                f'data_plane {data_plane} moves whole tensors only: set publish = "merged" in '
                "[model]"
            )


class TrialSettings(Section):
    """How a task is played with `play = "trial"`."""

    episodes_per_trial: int = Field(default=1, ge=1)
    """Number of episodes of one task in a trial; the last one is trained."""
    free_shots: int = Field(default=0, ge=0)
    """Number of first episodes that earn nothing; fewer than episodes_per_trial."""
    mask_scope: Literal["all", "final"] = "all"
    """Which tokens of the last episode are trained: "all" that the policy sampled, or those of its
    "final" action."""
    reward_split: Literal["turn", "even", "last", "terminal"] = "turn"
    """What a turn's reward becomes. "turn", one number; the others, one for each of its sampled
    tokens, and dense rewards count from their token on: "even", in equal parts; "last", all on the
    last token; "terminal", the episode's reward in equal parts over all tokens."""
    agent: str = ""
    """Function of a policy, a tokenizer and sampling parameters that returns the trial's agent, as
    "module:function"; empty: the agent answers with the policy's text."""

    @model_validator(mode="after")
    def _require_an_episode_that_counts(self) -> Self:
        if self.free_shots >= self.episodes_per_trial:
            raise ValueError(
                f"free_shots is {self.free_shots} of {self.episodes_per_trial} episodes_per_trial, "
                "so no episode would count: set free_shots lower"
            )
        return self


class EnvironmentSection(Section):
    """Where tasks come from and who answers the policy."""

    use: str = "arithmetic"
    """Environment to load: "arithmetic", "jsonl", "verl", "trl", "messages", "verifiers", or your
    own as "module:attribute"."""
    play: Literal["chat", "trial", "text"] = "chat"
    """How a task is played: "chat" as messages in a chat template; "trial" as episodes of a game in
    plain tokens; "text" as one running text in which tools answer."""
    trial: TrialSettings = TrialSettings()
    name: str = ""
    """Name of the environment in tasks; empty: `use`, or "jsonl" with a task_file."""
    task_file: FilePath = ""
    """Question and answer pairs, in a JSONL or Parquet file or the folder of a saved data set; sets
    `use` to "jsonl"."""
    heldout_file: FilePath = ""
    """Tasks for evaluation, in such a file; empty: heldout_fraction of `task_file` is held out."""
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of `task_file` that is held out for evaluation, below 1."""
    train_split: str = "train"
    """Name of the split whose tasks are trained on."""
    heldout_split: str = "heldout"
    """Name of the split whose tasks are evaluated on."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function that makes the environment."""
    tools_in_prompt: bool = True
    """Whether the chat template shows the policy the tools that it calls in its own syntax."""
    text_environments: tuple[str, ...] = ("calculator",)
    """Text environments to serve too: "calculator", or "module:attribute" of a TextSetup."""
    weight: float = Field(default=1.0, gt=0)
    """How often tasks of this environment are drawn, relative to the other environments."""
    agent: str = ""
    """Agent that plays the tasks: "module:function" or "verifiers"; empty: the policy itself."""

    @property
    def kind(self) -> str:
        """Return what to load: `use`, or "jsonl" when there is a task file."""
        return "jsonl" if self.task_file else self.use

    @property
    def served_name(self) -> str:
        """Return the name that tasks carry."""
        return self.name or self.kind

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the function that makes the environment: options and files."""
        if not self.task_file:
            return dict(self.options)
        if self.heldout_file:
            files: dict[str, Any] = {"heldout_path": self.heldout_file}
        else:
            files = {"heldout_fraction": self.heldout_fraction}
        return {"path": self.task_file, **files, **self.options}

    @model_validator(mode="before")
    @classmethod
    def _accept_a_name(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_one_kind_and_way_to_play(self) -> Self:
        if self.heldout_file and not self.task_file:
            raise ValueError("heldout_file is set without task_file: set both, or neither")
        if self.task_file and self.use not in ("arithmetic", "jsonl"):
            raise ValueError("use and task_file are both set: leave one out")
        if self.agent and self.play != "chat":
            where = "agent in the table `trial`" if self.play == "trial" else 'play = "chat"'
            raise ValueError(
                f'agent is set, and play is "{self.play}", in which no OpenAI agent plays: set '
                f"{where}, or leave one out"
            )
        if self.trial != TrialSettings() and self.play != "trial":
            raise ValueError(
                f'the table `trial` is set, and play is "{self.play}": set play = "trial", or '
                "leave the table out"
            )
        return self


class InferenceFields(Section):
    """How the policy is sampled from."""

    max_model_len: int = Field(default=384, ge=2)
    """Largest number of tokens of prompt and response together; left out, with a model.directory:
    the smaller of its positions and 8192."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Largest number of sequences that the engine samples at the same time."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Number format of the engine's weights: "float32" or "bfloat16". Published weights are cast to
    it. Empty: the trainer's `dtype`."""
    device: Device = "auto"
    """Device of the transformers engine's model: "cpu", "cuda", or "auto" for a GPU where one is
    left. Other engines choose theirs, as vLLM does by the package that is installed; leave it out
    for them."""
    data_plane: DataPlane = "shared_memory"
    """How published weights reach the engine. "shared_memory", a file in memory; "chunks", bytes
    over gRPC; "nccl" or "ipc", vLLM's own transfer (CUDA only); or your own as "module:Class". Left
    out, it is "ipc" where the trainer and its one replica of vLLM share a GPU."""
    deltas: Literal["auto", "always", "never"] = "auto"
    """Whether a publish of whole weights sends only what changed, where that is smaller. "auto":
    over data planes that carry bytes ("chunks", your own). "always": as a file, too, which pays
    where replicas read it over a network. Replicas keep a file of the policy for it."""
    update_mode: UpdateMode = "recompute"
    """What a publish does to answers that are being sampled. "recompute" computes their keys and
    values anew, "keep_kv" keeps them, "wait" lets them end first."""
    kv_cache_mib: int = Field(default=64, ge=1)
    """Memory for vLLM's cache of keys and values, in MiB; left out, with a model.directory: room
    for max_num_seqs sequences of max_model_len tokens, of 32768 tokens at most, or one sequence."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of devices over which one replica spreads the model."""
    max_adapters: int = Field(default=0, ge=0)
    """Number of LoRA adapters held beside the policy; 0: none. With any, vLLM is half as fast."""
    max_adapter_rank: int = Field(default=16, ge=1)
    """Largest rank that a LoRA adapter may have."""
    batching: bool = True
    """Whether requests may wait to be sampled together. If false, leave out min_batch_size,
    max_batch_size and batching_timeout_s."""
    min_batch_size: int = Field(default=1, ge=1)
    """Number of samples that begin together; early ones wait up to batching_timeout_s for it."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Largest number of samples in the engine at one time; absent: as many as it takes."""
    batching_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a waiting request begins even without min_batch_size samples."""
    answer_base_s: float = Field(default=60.0, gt=0)
    """Seconds that an answer may be sampled for, beside answer_s_per_token for each token it may
    have. Waiting to begin does not count. An answer that takes longer fails."""
    answer_s_per_token: float = Field(default=1.0, ge=0)
    """Seconds added to answer_base_s for each token that an answer may have, by its max_new_tokens
    and the room in the context."""
    record_routed_experts: bool = False
    """Whether answers carry the experts that computed each token, for the trainer to replay. Only
    for a mixture of experts, and for engines that can say it: "transformers" can, "vllm" cannot."""
    num_threads: int | None = Field(default=None, ge=0)
    """Number of CPU threads of an engine without a GPU; 0: one on each core. Absent: one for the
    transformers engine, and one on each core but one for vLLM."""
    wake_after_s: float = Field(default=60.0, gt=0)
    """Seconds after which a sleeping replica wakes by itself if nobody uses the shared device."""
    served_model_name: str = ""
    """Name of the policy under /v1/models; empty: the name of its directory."""
    max_recordings: int = Field(default=1024, ge=1)
    """Largest number of recordings kept at one time; new ones replace closed ones."""
    max_recorded_calls: int = Field(default=512, ge=1)
    """Largest number of calls in one recording."""
    recording_ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which a recording is dropped."""

    @model_validator(mode="after")
    def _require_sizes_that_fit(self) -> Self:
        fields = InferenceFields.model_fields
        sizes = ("min_batch_size", "max_batch_size", "batching_timeout_s")
        changed = [name for name in sizes if getattr(self, name) != fields[name].default]
        if changed and not self.batching:
            raise ValueError(
                f"batching is false, so {', '.join(changed)} would have no effect: leave that out, "
                "or set batching = true"
            )
        if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"min_batch_size is {self.min_batch_size}, above max_batch_size "
                f"{self.max_batch_size}: set it to {self.max_batch_size} or less"
            )
        if self.deltas == "always" and self.data_plane in DEVICE_PLANES:
            raise ValueError(
                f'data_plane {self.data_plane} moves whole tensors only: set deltas = "auto"'
            )
        return self


class InferenceSection(InferenceFields):
    """How the policy is sampled from."""

    num_replicas: int = Field(default=1, ge=1, le=64)
    """Number of inference processes; each loads every published policy."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM under its own names, as {gpu_memory_utilization = 0.8}."""

    @property
    def num_devices(self) -> int:
        """Return the number of devices of one replica on GPUs."""
        return self.tensor_parallel_size * int(self.engine.get(_STAGES, 1))

    @property
    def has_fixed_cache(self) -> bool:
        """Return whether kv_cache_mib says the size of the cache, and not a share of memory."""
        return _MEMORY_SHARE not in self.engine

    @model_validator(mode="after")
    def _require_options_that_fit(self) -> Self:
        stages = self.engine.get(_STAGES, 1)
        if not isinstance(stages, int) or stages < 1:
            raise ValueError(f"{_STAGES} is {stages!r} in [inference.engine]: set a whole number")
        default = InferenceFields.model_fields["kv_cache_mib"].default
        if not self.has_fixed_cache and self.kv_cache_mib != default:
            raise ValueError(f"kv_cache_mib and {_MEMORY_SHARE} say the same: leave one out")
        return self


class CollectorSection(Section):
    """How episodes are played."""

    group_size: int = Field(default=8, ge=1)
    """Number of trajectories played for each task; RL compares them and needs 2 or more."""
    min_group_size: int = Field(default=2, ge=0)
    """Fewest trajectories of a group that is used though others cannot be played; 0: all."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training tasks that set none themselves."""
    max_groups_in_flight: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Largest number of groups that a collector plays at the same time; "auto": more while answers
    do not wait in the engines' queues, fewer while they do, from 16 on. pipeline_depth says how
    many there are to play."""
    max_new_tokens: int = Field(default=24, ge=1)
    """Largest number of tokens sampled in one turn, for tasks that set none themselves; left out,
    with a model.directory: the smaller of 1024 and half of inference.max_model_len."""
    long_prompts: Literal["refuse", "skip"] = "refuse"
    """What happens where a prompt fills max_model_len and leaves no token for an answer. "refuse"
    starts no job that has one in its first rows; "skip" plays it without an answer, and drops the
    group. None is cut: the policy would read another task than the one that is rewarded."""
    stop: tuple[str, ...] | None = None
    """Strings that end an answer, for tasks that set none; absent: the environment's own."""
    max_turns: int = Field(default=64, ge=1)
    """Number of turns after which an episode ends if its environment has not ended it."""
    total_turns: int = Field(default=-1, ge=-1)
    """Number of turns of training episodes after which a collector begins no more, and training
    ends with the whole batches that are left; -1: no limit. An episode under way counts as one."""
    last_turn_only: bool = False
    """Whether only the last turn of each training episode goes into the queue, with its rewards;
    what came before it is context. Evaluations keep all turns."""
    agent_time_limit_s: float = Field(default=600.0, gt=0)
    """Seconds after which the episode of an agent, a trial or a text episode is stopped as
    failed."""
    page_size: int = Field(default=64, ge=1)
    """Number of tasks put into the queue at a time, and kept waiting there."""
    member_retries: int = Field(default=2, ge=0)
    """Number of times a trajectory is played again after a failure that is not the policy's."""
    lease_s: float = Field(default=60.0, ge=1)
    """Seconds after which the queue takes a task back from a collector that has gone away."""
    wait_s: float = Field(default=5.0, gt=0)
    """Longest time that one request for tasks waits, in seconds."""
    patience_s: float = Field(default=120.0, gt=0)
    """Seconds that a service may be away before the groups that need it are given back."""

    @model_validator(mode="after")
    def _require_turns(self) -> Self:
        if self.total_turns == 0:
            raise ValueError(
                "total_turns is 0, so nothing would be played: set it to 1 or more, or to -1, "
                "which is no limit"
            )
        return self


class ReplaySection(Section):
    """How many groups the queue keeps for the scorer and the trainer."""

    max_waiting_groups: int = Field(default=0, ge=0)
    """Largest number of training groups that are played and not yet with the trainer, those with
    the scorer included; 0: no bound besides pipeline_depth."""
    overflow: Overflow = "block"
    """What happens at max_waiting_groups: "block" starts no group that might find no room,
    "reject" drops the newly played group, "drop_oldest" the group that waits longest."""


class ObjectiveSettings(Section):
    """What goes with any loss: aggregation, KL, entropy bonus, correction for sampler mismatch."""

    aggregation: Literal["", "token", "sequence", "prompt", "constant", "sum"] = ""
    """How token losses become one number; empty: as the loss's paper does it. "token", "sequence",
    "prompt" and "constant" are means over these; "sum" is the plain sum."""
    constant: float = Field(default=0.0, ge=0)
    """Divisor of aggregation "constant", in tokens; 0: max_new_tokens."""
    kl_coeff: float = Field(default=0.0, ge=0)
    """Weight of the KL term in the loss; 0: none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL term is estimated from sampled tokens: "k1", "k2" or "k3"."""
    kl_to: Literal["ref", "inference"] = "ref"
    """Model to which the KL term measures the distance. "ref" is the scorer's reference model,
    "inference" the engine that sampled."""
    kl_inference_coeff: float = Field(default=0.0, ge=0)
    """Weight of a second KL term, to the engine that sampled, beside one to "ref"; 0: none."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss; 0: none."""
    router_balance_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the loss that keeps a mixture of experts using all of them alike (Switch
    Transformer's); 0: none. Models without experts refuse it."""
    entropy_metric: bool = True
    """Whether entropy is measured without an entropy bonus too; never with logprob_kernel "cut"."""
    correction: Literal["", "tis", "icepop", "token_mask", "sequence_mask", "kl_mask"] = ""
    """Weights of tokens for which engine and trainer compute different log-probs; empty: none.
    "tis", "icepop", "token_mask" and "sequence_mask" use the ratio of trainer to engine. "kl_mask"
    drops tokens that are far from the model of correction_to."""
    correction_low: float = Field(default=0.5, ge=0)
    """Smallest ratio of trainer to engine probability that a correction keeps."""
    correction_high: float = Field(default=2.0, gt=0)
    """Largest ratio of trainer to engine probability that a correction keeps. For "kl_mask" it is
    the largest squared log-ratio over two."""
    correction_to: Literal["inference", "ref"] = "inference"
    """Model that "kl_mask" keeps the policy near. "inference" is the engine that sampled, "ref" the
    scorer's reference model."""
    proximal: bool = False
    """Whether to clip around the policy at the start of the train step, not around the engine's."""
    sibling_answer: bool = True
    """Whether the prompt of a teacher that reads feedback shows a successful answer of the same
    group too, one of candidates.success_reward or more, where there is one."""
    num_epochs: int = Field(default=1, ge=1)
    """Number of times that a train step goes over its batch."""
    max_fresh_mismatch_kl: float = Field(default=1e-2, gt=0)
    """KL between engine and trainer above which an alarm is raised, in nats. It is measured on data
    that the current policy sampled."""

    @model_validator(mode="after")
    def _require_a_correction_to_the_reference(self) -> Self:
        if self.correction_to == "ref" and self.correction != "kl_mask":
            raise ValueError(
                f"correction_to is ref, which only correction kl_mask can use, and correction is "
                f"'{self.correction}': set correction to kl_mask, or correction_to to inference"
            )
        return self


class TrainFields(Section):
    """The training itself: reinforcement learning, or supervised fine-tuning."""

    mode: Literal["rl", "sft"] = "rl"
    """What to train on: "rl" what collectors play, "sft" the demonstrations of [sft]."""
    num_steps: int = Field(default=50, ge=0)
    """Number of train steps; each takes a batch of groups or demonstrations and publishes once."""
    num_threads: int = Field(default=1, ge=0)
    """Number of CPU threads of each trainer process; 0: one on each core, and what else computes on
    this machine goes first, such as an engine."""
    max_row_tokens: int | None = Field(default=None, ge=16)
    """Largest number of tokens in a packed row, on a CPU without those that its sequences have in
    common; absent: 1024, or inference.max_model_len if more."""
    groups_per_train_step: int = Field(default=16, ge=1)
    """Number of groups that one train step trains; groups without a signal do not count."""
    # A few bad groups become dead letters and the job goes on. Many in a row, with no good one
    # between them, mean that settings, loss and scorer do not fit together.
    max_bad_groups: int = Field(default=16, ge=1)
    """Number of untrainable groups in a row, at least three batches, after which the job fails."""
    candidates: CandidateSettings = CandidateSettings()
    """Which groups are trained, and how many are played to find them."""
    num_minibatches: int = Field(default=2, ge=1)
    """Number of optimiser updates in a train step."""
    oversize: Oversize = "error"
    """What happens to a sequence longer than max_row_tokens. "error" sets its group aside; "drop"
    and "truncate" affect the sequence alone."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    optimizer: OptimizerName = "adamw"
    """Optimiser: "adamw", "muon" for hidden matrices with AdamW for the other weights, or your own
    as "module:function"."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate over all updates: "constant", or "linear" or "cosine" down to
    learning_rate_floor."""
    learning_rate_floor: float = Field(default=0.1, ge=0, le=1)
    """Share of learning_rate at which "linear" and "cosine" end."""
    num_warmup_updates: int = Field(default=0, ge=0)
    """Number of updates in which the learning rate rises from 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of AdamW's running means of gradients and of their squares."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, decoupled from the gradient; 0: none. Norms and biases have none."""
    weight_decay_all: bool = False
    """Whether weight decay takes norms and biases too. An optimiser of your own decides itself."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm above which gradients are scaled down."""
    loss: LossName = DEFAULT_LOSS
    """Loss: the name of a built-in one, or your own as "module:function". With mode "sft" it is
    "sft" or "minor_sft"."""
    loss_options: dict[str, float] = Field(default_factory=dict)
    """Options of the loss, as {clip_low = 0.2, clip_high = 0.28}."""
    loss_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a loss of your own may take for one packed row; then the job ends."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """What goes with any loss: aggregation, KL, entropy, corrections, epochs."""
    pipeline_depth: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Number of train steps that generation may run ahead, while policies are published beside
    train steps; 0: all take turns; "auto": as many as the trainer needs so as not to wait, by the
    times of play and of training, and 0 on a shared device."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Number of policy versions that the oldest trained token may lag behind; "auto": as long as
    tokens of an age have an effective sample size of 0.3 or more."""
    selection: Literal["fifo", "uniform", "priority"] = "fifo"
    """Which scored groups are trained first: the oldest ("fifo"), any with the same chance
    ("uniform"), or those with the largest advantages ("priority")."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Number of train steps between checkpoints."""
    mesh: MeshSettings = MeshSettings()
    """How the trainer's processes share the work, where there are several."""
    sharded_checkpoints: bool | Literal["auto"] = "auto"
    """Whether each process writes a part of a checkpoint, "auto": where there are several and the
    optimizer is built in. Both kinds resume on any number and mesh."""
    keep_policies: int = Field(default=4, ge=0)
    """Number of newest policies to keep on disk, beside the first and milestones; 0: all."""
    keep_policies_every: int = Field(default=10, ge=0)
    """Every n-th policy is a milestone, beside those that were evaluated; 0: none is."""
    keep_milestones: int = Field(default=8, ge=0)
    """Number of newest milestones to keep on disk, beside the one that earned most; 0: all."""
    min_free_disk_mb: int = Field(default=256, ge=0)
    """Free megabytes on the disk of the run's folder, beside room for one more checkpoint, below
    which training pauses with the alarm DISK_LOW; 0: the disk is not watched."""
    device: Device = "auto"
    """Device of the trainer's model: "cpu", "cuda", or "auto" for a GPU where one is left."""
    lease_s: float = Field(default=120.0, gt=0)
    """Seconds after which the queue takes the trainer's groups back unless it extends the lease."""
    publish_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds in which a replica must load a policy and pass its check. After that the job goes on
    with the other replicas. Without any it waits with an alarm, and a requested publish fails."""
    sleep_drain_s: float = Field(default=30.0, gt=0)
    """Seconds that a replica's running answers have to end before it is put to sleep."""
    autocast: Literal["", "bfloat16"] = ""
    """Number format in which layers compute while weights keep `dtype`: "bfloat16"; empty: off."""
    logprob_kernel: Literal["chunked", "cut"] = "chunked"
    """How log-probs are computed: "chunked", or "cut" for cut-cross-entropy. "cut" needs CUDA,
    bfloat16 and the extra `gpu`, and gives no entropy."""
    replay_routed_experts: bool = True
    """Whether the trainer computes a token with the experts that the engine recorded for it, where
    it did (record_routed_experts in [inference])."""
    activation_checkpointing: bool = False
    """Whether the backward pass recomputes activations: less memory for a third more time."""
    activation_offload: bool = False
    """Whether activations wait in the host's memory for the backward pass; slower, CUDA only."""
    debug_table_every: int = Field(default=0, ge=0)
    """Number of train steps after which debug_table.jsonl in the run directory gets the tokens,
    log-probs, rewards and advantages of every trained sequence; 0: never."""
    keep_steps: int = Field(default=0, ge=0)
    """Number of newest train steps of which all numbers stay on disk, with the checkpoints before
    them, so that `dialoop replay-step` can repeat and compare them; 0: none. One process only."""
    max_trajectories_mb: int = Field(default=0, ge=0)
    """Size of all parts of trajectories.jsonl in MB at which the oldest is deleted; 0: none is."""

    @property
    def demonstration_loss(self) -> str:
        """Return the loss of demonstrations: the job's own if it imitates, else the default one."""
        is_supervised = self.mode == "sft" and facts_of(self.loss).imitates
        return self.loss if is_supervised else DEMONSTRATION_LOSS

    @property
    def max_refused_groups(self) -> int:
        """Return how many bad groups in a row fail the job: max_bad_groups, at least 3 batches."""
        return max(self.max_bad_groups, _MIN_BAD_BATCHES * self.groups_per_train_step)

    @property
    def max_outstanding_groups(self) -> int:
        """Return how many groups may be outstanding when training begins."""
        return self.outstanding_groups(self.first_depth)

    @property
    def first_depth(self) -> int:
        """Return the pipeline's depth until a train step has been measured."""
        if self.pipeline_depth != "auto":
            return self.pipeline_depth
        oldest = self.max_staleness
        return _FIRST_DEPTH if oldest == "auto" else min(_FIRST_DEPTH, oldest)

    def outstanding_groups(self, depth: int) -> int:
        """Return how many groups may be outstanding at a depth: depth + 1 batches.

        Oversampling allows so many times more. None where nothing trains on them: for SFT, and
        without train steps.
        """
        if self.mode == "sft" or not self.num_steps:
            return 0
        num_groups = (depth + 1) * self.groups_per_train_step
        return math.ceil(num_groups * self.candidates.oversampling)

    def row_tokens(self, max_model_len: int) -> int:
        """Return the most tokens in a packed row, which holds whatever the engine can sample."""
        if self.max_row_tokens is None:
            return max(_MIN_ROW_TOKENS, max_model_len)
        return self.max_row_tokens

    def require_turns(self, data_plane: DataPlane) -> None:
        """Raise ValueError where trainer and replica could not take turns on one device."""
        if self.mode == "rl" and self.pipeline_depth not in (0, "auto"):
            raise ValueError(
                f"pipeline_depth is {self.pipeline_depth} on a shared device, where nothing can be "
                "generated during training: set pipeline_depth = 0 in [train]"
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
                "Muon does not train LoRA, whose factors cannot take its full-rank updates: set "
                'optimizer = "adamw", or lora_rank = 0'
            )

    @model_validator(mode="after")
    def _require_a_built_in_optimizer(self) -> Self:
        for name in ("sharded_checkpoints", "weight_decay_all"):
            if getattr(self, name) is True and self.optimizer not in OPTIMIZERS:
                raise ValueError(
                    f"optimizer is {self.optimizer}, your own, and {name} is for built-in ones "
                    f"only: set {name} = false"
                )
        return self

    @model_validator(mode="after")
    def _require_keys_that_fit(self) -> Self:
        if (
            isinstance(self.max_staleness, int)
            and isinstance(self.pipeline_depth, int)
            and self.max_staleness < self.pipeline_depth
        ):
            raise ValueError(
                f"max_staleness is {self.max_staleness}, below pipeline_depth "
                f"{self.pipeline_depth}: all data would become too stale to train; set "
                f"max_staleness to {self.pipeline_depth} or more"
            )
        if self.objective.kl_inference_coeff and self.objective.kl_to == "inference":
            raise ValueError(
                'kl_inference_coeff and kl_to = "inference" are the same KL: set kl_coeff alone, '
                'or kl_to to "ref"'
            )
        kl_to_ref = self.objective.kl_coeff and self.objective.kl_to == "ref"
        if kl_to_ref and facts_of(self.loss).needs_feedback:
            raise ValueError(
                f"kl_coeff {self.objective.kl_coeff:g} is to the reference, and that of loss "
                f'{self.loss} is the policy itself: set kl_to = "inference", or kl_coeff = 0'
            )
        if self.mesh.cp > 1 and self.objective.router_balance_coeff:
            raise ValueError(
                f"router_balance_coeff is {self.objective.router_balance_coeff:g}, and with cp = "
                f"{self.mesh.cp} in [train.mesh] no process sees all tokens of a row: leave one out"
            )
        if self.logprob_kernel == "cut" and self.objective.entropy_coeff:
            raise ValueError(
                f"entropy_coeff {self.objective.entropy_coeff:g} needs the entropy, and "
                'logprob_kernel cut gives none: set logprob_kernel = "chunked", or entropy_coeff '
                "= 0"
            )
        # What needs advantages or an engine's log-probs: demonstrations have neither.
        if self.mode == "rl":
            return self
        supervised = [name for name, facts in LOSSES.items() if facts.imitates]
        if self.loss not in (*supervised, DEFAULT_LOSS):
            raise ValueError(
                f'loss is {self.loss} with mode = "sft", which takes only '
                f"{' or '.join(supervised)}: set one of these"
            )
        objective, default = self.objective, ObjectiveSettings()
        for name in ("kl_to", "kl_inference_coeff", "correction", "proximal", "num_epochs"):
            if getattr(objective, name) != getattr(default, name):
                raise ValueError(
                    f"objective.{name} is {getattr(objective, name)}, which has no effect with "
                    'mode = "sft": leave it out'
                )
        return self


class TrainSection(TrainFields):
    """The training itself: reinforcement learning, or supervised fine-tuning."""

    num_nodes: int = Field(default=1, ge=1, le=1024)
    """Number of machines with trainer processes, each with num_processes."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Number of trainer processes on each machine, up to 64, as [train.mesh] lays them out; on CUDA
    each has its own GPU."""

    @property
    def num_ranks(self) -> int:
        """Return the number of trainer processes on all machines."""
        return self.num_nodes * self.num_processes

    @property
    def num_shards(self) -> int:
        """Return among how many processes one copy of weights and optimiser is divided."""
        return self.num_ranks // self.mesh.dp_replicate

    @model_validator(mode="after")
    def _require_a_mesh_of_all_processes(self) -> Self:
        self.mesh.sizes(self.num_ranks)
        return self
