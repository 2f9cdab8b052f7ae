"""Settings of the trainer, read from DIALOOP_TRAINER_... once, in __main__."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dialoop.errors import InvalidConfig
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.shared import LoraSettings, SftSettings, TrackerSettings, TrainFields
from dialoop_services.runtime.settings import ServerSettings

_DEVICE_PLANES = ("nccl", "ipc")
_BAD_BATCHES = 3


class TrainerSettings(ServerSettings, TrainFields):
    """What to train, on what, how, and where to write it."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_TRAINER_")

    run: str = "default"
    """Run id: scopes the queue's keys."""
    run_dir: Path = Path("runs/default")
    """Where metrics, trajectories, policies and checkpoints go."""
    model_dir: Path = Path("runs/default/model")
    """Hugging Face model directory to start from, with its tokenizer."""
    seed: int = 0
    """Seeds the order of demonstrations and minibatches."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of one train step."""

    replay_address: str = "127.0.0.1:7003"
    """host:port of the replay service."""
    environment_address: str = "127.0.0.1:7001"
    """host:port of the environment service; asked for the tasks to evaluate on."""
    inference_addresses: list[str] = Field(default=["127.0.0.1:7002"], min_length=1)
    """host:port of every inference replica; each gets every publish."""
    update_mode: Literal["recompute", "keep_kv", "wait"] = "recompute"
    """What a publish does to answers under way; after keep_kv no version explains them exactly."""
    data_plane: Literal["shared_memory", "chunks", "nccl", "ipc"] = "shared_memory"
    """How weights get to replicas: a file they open, bytes over gRPC, or vLLM's own transfer."""
    shared_memory_dir: Path | None = None
    """Folder in memory that the file is copied to, the replicas' weights root; absent: policies."""
    inference_world_size: int = Field(default=1, ge=1)
    """Devices of one replica, which nccl has to know."""
    publish_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds a replica has to load a policy, and to prove it; then the others go on without it."""

    environment: str = "arithmetic"
    """Name of the environment to evaluate on."""
    heldout_split: str = "heldout"
    """Split that evaluations use."""
    max_new_tokens: int = Field(default=24, ge=1)
    """Most tokens an evaluation samples in one turn."""

    warm_start_steps: int = Field(default=0, ge=0)
    """SFT steps before RL; 0 for none."""
    warm_start_batch_size: int = Field(default=64, ge=1)
    """Demonstrations in an SFT step."""
    warm_start_learning_rate: float = Field(default=3e-3, gt=0)
    """Peak SFT learning rate; decays to a tenth."""
    warm_start_warmup_steps: int = Field(default=20, ge=0)
    """SFT steps that raise the learning rate from 0."""
    warm_start_checkpoint_every: int = Field(default=100, ge=1)
    """SFT steps between checkpoints of a warm start."""
    warm_start_file: Path | None = None
    """JSONL of {"messages": [...]} demonstrations; absent: the environment's own."""
    warm_start_split: str = "train"
    """Split whose tasks the environment demonstrates."""
    environment_use: str = ""
    """What demonstrates: a built-in's name or module:attribute; empty: as `environment`."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that environment, as the environment service has them."""

    sft: SftSettings = SftSettings()
    """What SFT trains on, as {"file": "chats.jsonl", "num_epochs": 3}."""
    num_train_steps: int = Field(default=50, ge=0)
    """Train steps; one leased batch each, or one batch of demonstrations."""
    max_row_tokens: int = Field(default=1024, ge=16)
    """Most tokens in a packed row: of the longest sequence, at least."""

    lease_s: float = Field(default=120.0, gt=0)
    """Seconds a leased group is ours without an extension."""

    evaluate_every: int = Field(default=10, ge=0)
    """Train steps between evaluations while training goes on; 0 for none."""
    num_evaluation_tasks: int = Field(default=256, ge=0)
    """Held-out tasks before and after training; 0 for no evaluation."""
    num_running_evaluation_tasks: int = Field(default=64, ge=1)
    """Held-out tasks of an evaluation while training goes on."""

    stop_at: float | None = None
    """Stop once an evaluation while training goes on reaches this mean reward."""
    stop_without_gain: int = Field(default=0, ge=0)
    """Stop once so many of them in a row are no better than the best; 0 for never."""

    max_logprob_difference: float = Field(default=1e-4, gt=0)
    """Trainer and replica may differ by this much on the probe, in nats, before it is an alarm."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type of the trained model."""
    device_lock: Path | None = None
    """File lock of the device that is shared with the replicas, by turns; absent: it is ours."""
    sleep_drain_s: float = Field(default=30.0, gt=0)
    """Seconds that a replica's answers under way have to end when it is put to sleep."""
    lora: LoraSettings = LoraSettings()
    """Train adapters instead of all weights, as {"rank": 8, "alpha": 16}."""
    trackers: TrackerSettings = TrackerSettings()
    """Who gets metrics beside metrics.jsonl, as {"tensorboard": true}."""

    def require_consistent(self) -> TrainerSettings:
        """Check what one field cannot; InvalidConfig names both."""
        if self.max_staleness < self.pipeline_depth:
            raise InvalidConfig(
                f"max_staleness is {self.max_staleness} and pipeline_depth {self.pipeline_depth}.",
                remedy="Set max_staleness at least to pipeline_depth, or all data ends up stale.",
            )
        if self.device_lock is not None:
            self._require_turns()
        if self.logprob_kernel == "cut" and self.objective.entropy_coeff:
            raise InvalidConfig(
                "entropy_coeff asks for the entropy, and the log-prob kernel cut gives none.",
                reason="KERNEL_WITHOUT_ENTROPY",
                remedy='Set logprob_kernel = "chunked", or entropy_coeff = 0.',
            )
        if self.lora.rank and self.optimizer == "muon":
            raise InvalidConfig(
                "Muon does not train LoRA: it makes an update of full rank out of every matrix, "
                "and an adapter's two factors are no such matrices.",
                reason="MUON_WITH_LORA",
                remedy='Set optimizer = "adamw", or lora_rank = 0.',
            )
        self._require_publishable()
        return self

    def _require_publishable(self) -> None:
        if self.lora.publish == "adapter" and not self.lora.rank:
            raise InvalidConfig(
                "Without LoRA there is no adapter to publish.",
                reason="NO_ADAPTER",
                remedy="Set lora_rank, or leave publish out.",
            )
        if self.lora.publish == "adapter" and self.data_plane in _DEVICE_PLANES:
            raise InvalidConfig(
                f"An adapter is not published over {self.data_plane}: it moves whole tensors only.",
                reason="ADAPTER_OVER_TRANSFER",
                remedy='Set publish = "merged", or data_plane to shared_memory or chunks.',
            )

    @property
    def publishes_adapters(self) -> bool:
        """Whether replicas get the LoRA adapter alone, and add it into their base weights."""
        asked = self.lora.publish or ("merged" if self.data_plane in _DEVICE_PLANES else "adapter")
        return bool(self.lora.rank) and asked == "adapter"

    def _require_turns(self) -> None:
        """What two who take turns on one device cannot do."""
        if self.mode == "rl" and self.pipeline_depth:
            raise InvalidConfig(
                f"pipeline_depth is {self.pipeline_depth} on a shared device: nothing is generated "
                "while the trainer has it.",
                reason="SHARED_DEVICE",
                remedy="Set pipeline_depth to 0, or give the trainer a device of its own.",
            )
        if self.data_plane in ("nccl", "ipc"):
            raise InvalidConfig(
                f"{self.data_plane} needs trainer and replica on their devices at the same time.",
                reason="SHARED_DEVICE",
                remedy="Set data_plane to shared_memory, or give the trainer a device of its own.",
            )

    @property
    def max_refused_groups(self) -> int:
        """Bad groups in a row that fail the job: max_bad_groups, and no less than three batches."""
        return max(self.max_bad_groups, _BAD_BATCHES * self.groups_per_train_step)

    @property
    def max_outstanding_groups(self) -> int:
        """Groups that may be outstanding: (pipeline_depth + 1) batches; none when SFT trains."""
        if self.mode == "sft":
            return 0
        return (self.pipeline_depth + 1) * self.groups_per_train_step
