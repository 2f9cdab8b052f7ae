"""Settings of the replay service: DIALOOP_REPLAY_..."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.settings import JobSettings, job_key
from dialoop_services.replay.store import QueueLimits


class ReplaySettings(JobSettings):
    """Where the queue is kept, and when it gives up."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_REPLAY_")

    store: Literal["redis", "memory"] = job_key("store")
    """Where the queue lives; memory is gone when the process ends."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// or unix://; 6.2 or later."""
    redis_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which Redis counts as not answering."""
    max_attempts: int = Field(default=3, ge=1)
    """Failed attempts at a task before it is dropped; a lease that ran out is one."""
    max_deliveries: int = Field(default=3, ge=1)
    """Failed deliveries of a group before it is a dead letter.

    A lease that ran out is one, until its holder comes back, and unless its work had been done.
    """
    max_dead_letters: int = Field(default=1000, ge=1)
    """Dead letters of a run that are kept whole; then the oldest are forgotten, which is counted.

    The groups stay dropped, under dead_letter_forgotten instead of dead_letter.
    """
    lease_s: float = Field(default=600.0, gt=0)
    """Seconds a lease runs when the caller does not say."""
    vocab_size: int = Field(default=0, ge=0)
    """Token ids must be below it; 0 for unknown."""
    poll_s: float = Field(default=0.25, gt=0)
    """How often a waiting call looks for what other processes did, and for leases that ran out."""

    @property
    def limits(self) -> QueueLimits:
        """When the store gives up."""
        return QueueLimits(
            max_attempts=self.max_attempts,
            max_deliveries=self.max_deliveries,
            max_dead_letters=self.max_dead_letters,
            lease_s=self.lease_s,
            # Room for what stands around the groups; above the limit a lease cannot be answered.
            max_lease_bytes=self.max_message_bytes * 9 // 10,
        )
