"""What a scorer needs to know; read once in `__main__`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dialoop.errors import InvalidConfig
from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.shared import ScorerFields
from dialoop_services.rl.advantages import AdvantageSettings
from dialoop_services.runtime.settings import ServerSettings


def _this_worker() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class RewardSpec(BaseModel):
    """A reward computed on whole groups: {"name": "brief", "use": "mine:brief", "weight": 0.1}."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    use: str
    weight: float = 1.0
    timeout_s: float = Field(default=60.0, gt=0)


class ScorerSettings(ServerSettings, ScorerFields):
    """Which run to score and how."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_SCORER_")

    run: str = "default"
    """Run id: scopes the queue's keys."""
    worker: str = Field(default_factory=_this_worker, min_length=1)
    """Name of this scorer in leases."""
    replay_address: str = "127.0.0.1:7003"
    """host:port of the replay service."""

    rewards: tuple[RewardSpec, ...] = ()
    """Rewards beside the environment's: name, use ("module:function") and weight, as JSON."""
    divide_by_std: bool = True
    """Divide advantages by the standard deviation of the group's rewards."""
    leave_one_out: bool = False
    """Compare each trajectory with the mean of the others instead of the mean of all."""
    advantage_eps: float = Field(default=1e-6, gt=0)
    """Smallest divisor, and the spread of rewards up to which a group counts as uniform."""

    model_dir: Path | None = None
    """Hugging Face model directory of the reference model."""
    max_row_tokens: int = Field(default=4096, ge=16)
    """Most tokens in a packed row; a longer sequence has a row of its own."""
    torch_threads: int = Field(default=1, ge=1)
    """CPU threads of the reference model."""

    max_groups: int = Field(default=8, ge=1)
    """Groups leased at a time."""
    lease_s: float = Field(default=60.0, ge=1)
    """Seconds until replay takes groups back from a scorer that is gone."""
    wait_s: float = Field(default=5.0, gt=0)
    """Longest wait of one request for groups."""
    patience_s: float = Field(default=120.0, gt=0)
    """How long replay may be away before work is left to another delivery."""

    @property
    def advantages(self) -> AdvantageSettings:
        """How rewards become advantages."""
        return AdvantageSettings(
            divide_by_std=self.divide_by_std,
            leave_one_out=self.leave_one_out,
            eps=self.advantage_eps,
            aggregate=self.advantage_aggregate,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether the queue's groups need the reference model."""
        return self.reference_logprobs or self.kl_coefficient > 0

    def require_consistent(self) -> ScorerSettings:
        """Check what one field cannot; InvalidConfig says what is missing."""
        if self.needs_reference and self.model_dir is None:
            raise InvalidConfig(
                "reference_logprobs or kl_coefficient is set, and model_dir is not.",
                reason="NO_REFERENCE_MODEL",
                remedy="Set DIALOOP_SCORER_MODEL_DIR to the reference model.",
            )
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names) or "kl" in names:
            raise InvalidConfig(
                f"The rewards {names} are not named apart.",
                remedy="Give each its own name; 'kl' is taken.",
            )
        return self
