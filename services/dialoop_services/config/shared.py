"""Settings that the config file and the services share: what a job may say of each.

class TrainSection(TrainFields)                      # [train] of the config file
class TrainerSettings(ServerSettings, TrainFields)   # DIALOOP_TRAINER_...

The stack tells a service whatever its table says under the service's own names.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dialoop_services.config.objective_settings import ObjectiveSettings

Oversize = Literal["error", "drop", "truncate"]
"""What becomes of a sequence that is longer than a packed row."""


class _Shared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SftSettings(_Shared):
    """Supervised fine-tuning, for `mode = "sft"`; steps, rates and schedules are those of train."""

    file: str = ""
    """JSONL of {"messages": [...]}; empty: what the environment demonstrates of its train split."""
    heldout_file: str = ""
    """Demonstrations to take the held-out loss on; empty: a share of `file`."""
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    """That share."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations in a train step."""
    num_epochs: int = Field(default=0, ge=0)
    """Times to go over all demonstrations; 0: as many steps as train.num_steps says."""


class LoraSettings(_Shared):
    """Low-rank adapters (arXiv 2106.09685) are trained alone; W + alpha / rank B A is served."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(default=0.0, ge=0)
    """Scale of the adapters times their rank; 0: twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers, as "q_proj"; empty: all between embedding and head."""
    publish: Literal["", "adapter", "merged"] = ""
    """What is published; empty: the adapter alone, but the sum over nccl and ipc."""


class TrackerSettings(_Shared):
    """Who else gets the rows of metrics.jsonl; each needs its package."""

    trackio: bool = False
    """trackio."""
    wandb: bool = False
    """Weights & Biases."""
    tensorboard: bool = False
    """TensorBoard event files under the run's directory, by tensorboardX."""
    project: str = "dialoop"
    """The project that trackio and Weights & Biases file the run under."""


class InferenceFields(_Shared):
    """Shared by [inference] and the inference service."""

    kv_cache_mib: int = Field(default=64, ge=1)
    """Memory of vLLM's keys and values."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one replica spans."""
    update_mode: Literal["recompute", "keep_kv", "wait"] = "recompute"
    """What a publish does to answers under way: compute their keys anew, keep them, or wait."""
    max_adapters: int = Field(default=0, ge=0)
    """LoRA adapters held beside the policy; 0 for none, as vLLM is half as fast with them."""
    max_adapter_rank: int = Field(default=16, ge=1)
    """Largest rank of an adapter."""


class CollectorFields(_Shared):
    """Shared by [collector] and the collector."""

    group_size: int = Field(default=8, ge=1)
    """Trajectories of one task: advantages are computed among them, so that RL needs two."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training tasks that do not say."""
    max_groups_in_flight: int = Field(default=16, ge=1)
    """Groups played at one time."""


class ScorerFields(_Shared):
    """Shared by [scorer] and the scorer."""

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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the reference model."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where the reference model is: cpu, cuda or cuda:1."""

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
        return self


class TrainFields(_Shared):
    """Shared by [train] and the trainer."""

    mode: Literal["rl", "sft"] = "rl"
    """Reinforcement learning on what collectors play, or `sft` on the demonstrations of `sft`."""
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
    loss: str = "dppo_mask"
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
    autocast: Literal["", "bfloat16"] = ""
    """Compute the layers in this format while weights keep `dtype`; empty for not."""
    logprob_kernel: Literal["chunked", "cut"] = "chunked"
    """Log-probs in chunks, or by cut-cross-entropy: CUDA, bfloat16, no entropy, extra `gpu`."""
    activation_checkpointing: bool = False
    """Compute activations anew in the backward pass: less memory for a third more time."""
    max_trajectories_mb: int = Field(default=4096, ge=0)
    """Size in MB at which the oldest part of trajectories.jsonl goes; 0 keeps all of it."""

    @model_validator(mode="after")
    def _require_what_sft_takes(self) -> Self:
        """Demonstrations have neither advantages nor log-probs of an engine."""
        if self.mode == "rl":
            return self
        if self.loss not in ("sft", "minor_sft", type(self).model_fields["loss"].default):
            raise ValueError(
                f'loss is {self.loss} with mode = "sft", whose losses are sft and minor_sft'
            )
        asked, plain = self.objective, ObjectiveSettings()
        for name in ("kl_to", "correction", "proximal", "num_epochs"):
            if getattr(asked, name) != getattr(plain, name):
                raise ValueError(
                    f'objective.{name} is {getattr(asked, name)} with mode = "sft", where it has '
                    "no effect; leave it out"
                )
        return self
