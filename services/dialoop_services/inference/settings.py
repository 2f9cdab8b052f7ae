"""Define the settings of the inference service, read from DIALOOP_INFERENCE_* variables."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.derived import lengths_of
from dialoop_services.config.engines import require_device, require_options
from dialoop_services.config.job import JobConfig
from dialoop_services.config.settings import JobSettings, job_key
from dialoop_services.config.tables import DEVICE_PLANES, Dtype, InferenceFields
from dialoop_services.inference.replica.batching import BatchLimits
from dialoop_services.inference.replica.time_limit import TimeLimit


class InferenceSettings(JobSettings, InferenceFields):
    """Which model to serve, with which engine, and how large."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_INFERENCE_")
    ROLE = "inference"
    TABLE = "inference"
    SUCCESSORS = MappingProxyType({"torch_threads": "num_threads", "weight_transfer": "data_plane"})

    model_dir: Path
    """Hugging Face model directory with its tokenizer."""
    engine: str = job_key("engine")
    """Engine that samples: "vllm", "transformers", "openai" (a server that Dialoop does not run; it
    is not trained), or the import path of yours, module:Class."""
    engine_options: dict[str, Any] = job_key("inference.engine")
    """Further options of the engine under its own names, as JSON: {"block_size": 32}."""
    seed: int = job_key("seed")
    """Seed for sampling requests that carry no seed."""
    weights_root: Path | None = None
    """Folder of published policies; the one that its latest.json names is loaded at the start."""
    awaits_policy: bool = False
    """Take no requests before a trainer has brought a policy. Set it for a replica that a trainer
    feeds and that has no weights_root: restarted, it would serve the model directory's weights."""
    max_new_tokens: int = job_key("collector.max_new_tokens")
    """Number of tokens sampled when a request sets no limit."""
    discovery: Literal["addresses", "registry"] = job_key("discovery")
    """Whether the replica announces itself in the registry, under a lease that it renews."""
    replay_address: str = "127.0.0.1:7003"
    """host:port of the replay service, which has the registry."""
    run: str = "default"
    """Run id, under which the replica announces itself."""
    name: str = ""
    """Name of the replica in the registry; empty: that of its machine and its port."""
    advertised_address: str = ""
    """host:port under which others reach the replica; empty: the address it listens on."""
    device_lock: Path | None = None
    """Lock file of the device shared with a trainer; absent: the replica has its own device."""

    @model_validator(mode="before")
    @classmethod
    def _with_lengths_of_the_model(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Add the lengths that follow from the model where no job file gives any."""
        given = {
            name: int(value) if isinstance(value, str) and value.isdecimal() else value
            for name, value in values.items()
        }
        inference = given | {"engine": values.get("engine_options", {})}
        job: dict[str, dict[str, Any]] = {
            "model": {"directory": str(values.get("model_dir", ""))},
            "inference": inference,
            "collector": given,
        }
        engine, dtype = values.get("engine", "vllm"), values.get("dtype") or "float32"
        derived = lengths_of(job, str(engine), str(dtype))
        return {path.partition(".")[2]: each.value for path, each in derived.items()} | values

    @field_validator("device", mode="after")
    @classmethod
    def choose_device(cls, device: str) -> str:
        """Return the device as it is: most engines choose theirs."""
        return device

    @classmethod
    def derive(cls, job: JobConfig) -> dict[str, Any]:
        """Return the number format: the table's, or else the trainer's; and the job's model."""
        model = {"model_dir": job.model.directory} if job.model.directory else {}
        return {"dtype": job.inference.dtype or job.dtype, **model}

    @model_validator(mode="after")
    def _require_options(self) -> Self:
        require_options(self.engine, self.engine_options)
        require_device(self.engine, self.device)
        return self

    @property
    def engine_dtype(self) -> Dtype:
        """Return the number format of weights and computation; log-probs are always float32."""
        return self.dtype or "float32"

    @property
    def weight_transfer(self) -> str:
        """Return vLLM's own transfer, or empty where weights come as a file or in chunks."""
        return self.data_plane if self.data_plane in DEVICE_PLANES else ""

    @property
    def batch_limits(self) -> BatchLimits:
        """Return how requests wait for each other; by default they do not wait."""
        return BatchLimits(
            min_batch_size=self.min_batch_size,
            max_batch_size=self.max_batch_size,
            timeout_s=self.batching_timeout_s,
        )

    @property
    def time_limit(self) -> TimeLimit:
        """Return how long an answer may be sampled."""
        return TimeLimit(base_s=self.answer_base_s, per_token_s=self.answer_s_per_token)

    @property
    def model_name(self) -> str:
        """Return the name of the policy for clients of the OpenAI API."""
        return self.served_model_name or self.model_dir.name
