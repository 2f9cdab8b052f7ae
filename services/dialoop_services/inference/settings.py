"""Settings of the inference service, from DIALOOP_INFERENCE_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.shared import InferenceFields
from dialoop_services.inference.replica.batching import BatchLimits
from dialoop_services.runtime.settings import ServerSettings

_BATCHING = {"min_batch_size", "max_batch_size", "batching_timeout_s"}


class InferenceSettings(ServerSettings, InferenceFields):
    """Which model to serve, with which engine, and how large."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_INFERENCE_")

    model_dir: Path
    """Hugging Face model directory with its tokenizer."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples; nothing falls back to the other by itself."""
    weights_root: Path | None = None
    """Folder of published policies; what its latest.json names is loaded at the start."""
    max_model_len: int = Field(default=512, ge=2)
    """Most tokens of prompt and answer together."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Requests that are decoded at one time."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Tokens sampled when a request gives no limit."""
    batching: bool = True
    """Whether requests may be made to wait for each other; sizes without it are an error."""
    min_batch_size: int = Field(default=1, ge=1)
    """Samples that begin together; who comes first waits for so many, up to the timeout."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Samples that are with the engine at one time; absent: as many as it takes."""
    batching_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds after which a request begins with whoever is there."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the policy's weights and computation; log-probs are float32 always."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of the transformers engine."""
    weight_transfer: Literal["", "nccl", "ipc"] = ""
    """vLLM's own weight transfer, on CUDA devices; empty: weights come as a file or in chunks."""
    device_lock: Path | None = None
    """File lock of the device that this replica shares with a trainer; absent: it has its own."""
    wake_after_s: float = Field(default=60.0, gt=0)
    """Seconds without anybody on the shared device until a sleeping replica wakes by itself."""
    seed: int = 0
    """Seeds sampling of requests that carry no seed."""
    served_model_name: str = ""
    """The policy's name under /v1/models; empty: that of its directory."""
    max_recordings: int = Field(default=1024, ge=1)
    """Recordings kept at one time; closed ones give way to new ones."""
    max_recorded_calls: int = Field(default=512, ge=1)
    """Calls of one recording."""
    recording_ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call until a recording is dropped."""

    @model_validator(mode="after")
    def _require_sizes_that_fit(self) -> InferenceSettings:
        given = {f"DIALOOP_INFERENCE_{n.upper()}" for n in _BATCHING & self.model_fields_set}
        if given and not self.batching:
            raise ValueError(
                f"{', '.join(sorted(given))} say how to batch, and DIALOOP_INFERENCE_BATCHING is "
                "false: leave them out, or turn batching on"
            )
        if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"DIALOOP_INFERENCE_MIN_BATCH_SIZE is {self.min_batch_size}, above "
                f"DIALOOP_INFERENCE_MAX_BATCH_SIZE, which is {self.max_batch_size}"
            )
        return self

    @property
    def batch_limits(self) -> BatchLimits:
        """How requests wait for each other; by default not at all."""
        return BatchLimits(
            min_batch_size=self.min_batch_size,
            max_batch_size=self.max_batch_size,
            timeout_s=self.batching_timeout_s,
        )

    @property
    def model_name(self) -> str:
        """The name that OpenAI's clients ask for."""
        return self.served_model_name or self.model_dir.name
