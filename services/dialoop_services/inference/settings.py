"""Settings of the inference service, from DIALOOP_INFERENCE_* variables."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic_settings import SettingsConfigDict

from dialoop_services.config.engines import EngineName
from dialoop_services.config.job import JobConfig
from dialoop_services.config.settings import JobSettings, job_key
from dialoop_services.config.tables import DEVICE_PLANES, Dtype, InferenceFields
from dialoop_services.inference.replica.batching import BatchLimits


class InferenceSettings(JobSettings, InferenceFields):
    """Which model to serve, with which engine, and how large."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_INFERENCE_")
    TABLE = "inference"
    SUCCESSORS = MappingProxyType({"torch_threads": "num_threads", "weight_transfer": "data_plane"})

    model_dir: Path
    """Hugging Face model directory with its tokenizer."""
    engine: EngineName = job_key("engine")
    """What samples: vllm, transformers, or the import path of an engine, module:Class."""
    seed: int = job_key("seed")
    """Seed of the sampling of requests that carry no seed."""
    weights_root: Path | None = None
    """Folder of published policies; the replica loads the one named in its latest.json."""
    max_new_tokens: int = job_key("collector.max_new_tokens")
    """Most tokens sampled for a request that gives no limit."""
    device_lock: Path | None = None
    """File lock of the device that this replica shares with a trainer; absent if it shares none."""

    @classmethod
    def derived(cls, job: JobConfig) -> dict[str, Any]:
        """Return the number format, which is the trainer's where the table says none."""
        model = {"model_dir": job.model.directory} if job.model.directory else {}
        return {"dtype": job.inference.dtype or job.dtype, **model}

    @property
    def engine_dtype(self) -> Dtype:
        """Return the number format of the policy's weights; log-probs are always float32."""
        return self.dtype or "float32"

    @property
    def weight_transfer(self) -> str:
        """Return vLLM's transfer backend; empty where weights come as a file or in chunks."""
        return self.data_plane if self.data_plane in DEVICE_PLANES else ""

    @property
    def batch_limits(self) -> BatchLimits:
        """Return how requests wait for each other; by default they do not."""
        return BatchLimits(
            min_batch_size=self.min_batch_size,
            max_batch_size=self.max_batch_size,
            timeout_s=self.batching_timeout_s,
        )

    @property
    def model_name(self) -> str:
        """Return the model name that OpenAI clients send."""
        return self.served_model_name or self.model_dir.name
