"""Settings that the config file and the trainer share: SFT, LoRA, trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
