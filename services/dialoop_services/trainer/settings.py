"""Define the settings of the trainer, read from DIALOOP_TRAINER_* variables once, in __main__."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.job import (
    EvaluationSection,
    JobConfig,
    SftSettings,
    TrackerSettings,
    WarmStartSection,
)
from dialoop_services.config.settings import JobSettings, job_key
from dialoop_services.config.tables import (
    Dtype,
    EnvironmentSection,
    ModelSection,
    TrainFields,
    UpdateMode,
    published_dtype,
)


class TrainerSettings(JobSettings, TrainFields):
    """What to train, on which tasks, how, and where to write it."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_TRAINER_")
    ROLE = "trainer"
    TABLE = "train"
    SUCCESSORS = MappingProxyType(
        {
            "num_train_steps": "num_steps",
            "torch_threads": "num_threads",
            "lora": "model__lora_rank",
            "lora__rank": "model__lora_rank",
            "lora__alpha": "model__lora_alpha",
            "lora__targets": "model__lora_targets",
            "lora__publish": "model__publish",
            "environment_use": "environment__use",
            "environment_options": "environment__options",
            "heldout_split": "environment__heldout_split",
            "warm_start_steps": "warm_start__num_steps",
            "warm_start_batch_size": "warm_start__batch_size",
            "warm_start_learning_rate": "warm_start__learning_rate",
            "warm_start_warmup_steps": "warm_start__num_warmup_steps",
            "warm_start_checkpoint_every": "warm_start__checkpoint_every",
            "warm_start_file": "warm_start__file",
            "warm_start_split": "environment__train_split",
            "evaluate_every": "evaluation__every",
            "num_evaluation_tasks": "evaluation__num_tasks",
            "num_running_evaluation_tasks": "evaluation__num_running_tasks",
            "stop_at": "evaluation__stop_at",
            "stop_without_gain": "evaluation__stop_without_gain",
        }
    )

    run: str = "default"
    """Run id, which is part of the queue's keys."""
    run_dir: Path = Path("runs/default")
    """Folder for metrics, trajectories, policies and checkpoints."""
    model_dir: Path = Path("runs/default/model")
    """Hugging Face model directory with its tokenizer, from which training starts."""
    tiny_model_seed: int | None = None
    """Seed with which the trainer makes the demo's tiny model when model_dir is missing; absent: a
    missing model is an error."""
    replay_address: str = "127.0.0.1:7003"
    """host:port of the replay service."""
    environment_address: str = "127.0.0.1:7001"
    """host:port of the environment service, which has the tasks for evaluation."""
    discovery: Literal["addresses", "registry"] = job_key("discovery")
    """Whether replicas are those of inference_addresses, or those in the registry."""
    inference_addresses: list[str] = Field(default=["127.0.0.1:7002"], min_length=1)
    """host:port of every inference replica; every publish goes to all of them."""
    shared_memory_dir: Path | None = None
    """Folder in memory to which policies are copied; it is the replicas' weights root. Absent:
    replicas read the policies of run_dir."""
    device_lock: Path | None = None
    """Lock file of the device shared with the replicas; absent: the trainer has its own device."""
    exit_when_done: bool = False
    """Whether the process ends with exit code 0 once the job has ended, instead of serving on. Set
    it where nobody else ends the trainer, as in a cluster's job."""

    seed: int = job_key("seed")
    """Seed of the order of demonstrations and minibatches."""
    dtype: Dtype = job_key("dtype")
    """Number format of the trained weights: "float32" or "bfloat16"."""
    update_mode: UpdateMode = job_key("inference.update_mode")
    """What a publish does to answers that are being sampled. After "keep_kv" no single version
    explains such an answer exactly."""
    data_plane: str = job_key("inference.data_plane")
    """How weights reach replicas: as a file, as bytes over gRPC, or by vLLM's own transfer."""
    inference_dtype: Literal["", "float32", "bfloat16"] = job_key("inference.dtype")
    """Number format of the engine's weights; empty: as `dtype`."""
    deltas: Literal["auto", "always", "never"] = job_key("inference.deltas")
    """Over which data planes a publish sends only what changed."""
    inference_world_size: int = Field(default=1, ge=1)
    """Number of devices of one replica, which nccl needs."""
    max_model_len: int = job_key("inference.max_model_len")
    """Largest number of tokens of prompt and response; a packed row has room for so many."""
    max_new_tokens: int = job_key("collector.max_new_tokens")
    """Largest number of tokens that an evaluation samples in one turn."""
    total_turns: int = job_key("collector.total_turns")
    """Number of turns of training episodes after which collectors begin no more; -1: no limit."""
    max_logprob_difference: float = Field(default=1e-4, gt=0)
    """Difference of log-probs between trainer and replica that is logged as an error, in nats."""

    model: ModelSection = ModelSection()
    """LoRA adapters to train instead of the weights, if any, and how they are published."""
    environment: EnvironmentSection = EnvironmentSection()
    """Environment that is evaluated on, and that demonstrates."""
    warm_start: WarmStartSection = WarmStartSection()
    """Supervised steps before reinforcement learning."""
    sft: SftSettings = SftSettings()
    """Demonstrations that SFT trains on."""
    evaluation: EvaluationSection = EvaluationSection()
    """Held-out evaluations, and the results at which training stops early."""
    trackers: TrackerSettings = TrackerSettings()
    """Trackers that get the metrics, besides metrics.jsonl."""

    @classmethod
    def derive(cls, job: JobConfig) -> dict[str, Any]:
        """Return the job's folders, what its number formats allow, and the size of a replica."""
        model = {"model_dir": job.model.directory} if job.model.directory else {}
        return {
            "run_dir": f"runs/{job.run}",
            "max_logprob_difference": job.logprob_bound,
            "inference_world_size": job.inference.num_devices,
            **model,
        }

    @model_validator(mode="after")
    def _require_tables_that_fit(self) -> TrainerSettings:
        self.model.require_publishable(self.data_plane)
        self.require_optimizer_for(self.model)
        if self.device_lock is not None:
            self.require_turns(self.data_plane)
        return self

    @property
    def publishes_adapters(self) -> bool:
        """Return whether replicas get the LoRA adapter alone and add it into their base weights."""
        return self.model.publishes_adapters(self.data_plane)

    @property
    def published_dtype(self) -> Dtype:
        """Return the number format of whole policies."""
        return published_dtype(self.dtype, self.inference_dtype)

    @property
    def first_depth(self) -> int:
        """Return the pipeline's depth until a train step has been measured."""
        is_shared = self.device_lock is not None  # then nothing can be sampled during training
        return 0 if is_shared and self.pipeline_depth == "auto" else super().first_depth

    @property
    def packed_row_tokens(self) -> int:
        """Return the largest number of tokens in a packed row."""
        return self.row_tokens(self.max_model_len)
