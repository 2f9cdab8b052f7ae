"""Define the settings of the scorer; `__main__` reads them once."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_learning.rl.advantages import AdvantageSettings
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.job import JobConfig
from dialoop_services.config.scorer_tables import ScorerFields
from dialoop_services.config.settings import JobSettings, this_worker


class ScorerSettings(JobSettings, ScorerFields):
    """Which run to score, and how."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_SCORER_")
    ROLE = "scorer"
    TABLE = "scorer"
    SUCCESSORS = MappingProxyType({"torch_threads": "num_threads"})

    run: str = "default"
    """Run id, which is part of the queue's keys."""
    worker: str = Field(default_factory=this_worker, min_length=1)
    """Name of this scorer in leases."""
    replay_address: str = "127.0.0.1:7003"
    """host:port of the replay service."""

    model_dir: Path | None = None
    """Hugging Face model directory of the reference model."""
    loss: str = ""
    """Loss of the trainer, which decides how advantages are computed; empty: GRPO's."""

    @classmethod
    def derive(cls, job: JobConfig) -> dict[str, Any]:
        """Return the loss, and the reference model: the file's, or the starting model."""
        model_dir = job.scorer.reference_model or job.model.directory
        return {"loss": job.train.loss} | ({"model_dir": model_dir} if model_dir else {})

    @property
    def advantages(self) -> AdvantageSettings:
        """Return how rewards become advantages."""
        return AdvantageSettings(**self.advantage_rule(self.loss))

    def require_consistent(self) -> ScorerSettings:
        """Return these settings; InvalidConfig when they need a reference model and name none."""
        if self.needs_reference and self.model_dir is None:
            raise InvalidConfig(
                "reference_logprobs or kl_coefficient is set, which needs a reference model, and "
                "model_dir is not set.",
                reason=Reason.NO_REFERENCE_MODEL,
                remedy="Set DIALOOP_SCORER_MODEL_DIR to the reference model.",
            )
        return self
