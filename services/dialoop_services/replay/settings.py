"""Define the settings of the replay service, read from DIALOOP_REPLAY_* variables."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dialoop_services.config.settings import JobSettings, job_key
from dialoop_services.config.tables import ReplaySection
from dialoop_services.replay.store import QueueLimits


class ReplaySettings(JobSettings, ReplaySection):
    """Where the queue is kept, and when it drops work."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_REPLAY_")
    ROLE = "replay"
    TABLE = "replay"

    store: Literal["redis", "memory"] = job_key("store")
    """Where the queue is kept: "redis", or "memory", which only a clean stop keeps."""
    run_dir: Path | None = None
    """Folder of the run, where store = "memory" leaves its queue at a clean stop; absent: nowhere.
    """
    redis_url: str = "redis://127.0.0.1:6379/0"
    """URL of Redis 6.2 or later: redis://, rediss:// or unix://."""
    full_at: float = Field(default=0.8, gt=0, le=1)
    """Share of Redis's maxmemory above which no tasks are offered and no trajectories appended
    (STORE_FULL). Scoring, training and acknowledging, which free memory, go on in the rest."""
    redis_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which Redis counts as not answering."""
    max_attempts: int = Field(default=3, ge=1)
    """Number of failed attempts at a task before it is dropped; an expired lease counts as one."""
    max_deliveries: int = Field(default=3, ge=1)
    """Number of failed deliveries of a group before it becomes a dead letter. An expired lease
    counts as one, unless its holder comes back or its work had been done."""
    max_dead_letters: int = Field(default=1000, ge=1)
    """Number of dead letters of a run that are kept whole. Above it the oldest are forgotten, which
    is counted. Their groups stay dropped, under dead_letter_forgotten instead of dead_letter."""
    max_finished: int = Field(default=10_000, ge=1)
    """Number of consumed and dropped tasks that the ledger remembers, so that repeated calls about
    them do no harm. Older ones are forgotten; about half a kilobyte each."""
    lease_s: float = Field(default=600.0, gt=0)
    """Seconds that a lease lasts when the caller sets none."""
    vocab_size: int = Field(default=0, ge=0)
    """Number of tokens of the vocabulary, which token ids must be below; 0: that of `model_dir`."""
    model_dir: Path | None = None
    """Model directory whose config.json says how large the vocabulary is; absent: unknown."""
    poll_s: float = Field(default=0.25, gt=0)
    """Seconds between looks of a waiting call for other processes' changes and expired leases."""

    @cached_property
    def _vocabulary(self) -> int:
        path = self.model_dir and self.model_dir / "config.json"
        if self.vocab_size or path is None:
            return self.vocab_size
        config = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("text_config", config).get("vocab_size", 0))

    def read_vocab_size(self) -> int:
        """Return vocab_size, or what the model's config.json says; 0 while neither is known."""
        try:
            return self._vocabulary
        except FileNotFoundError:  # the tiny model is made while the queue starts
            return 0

    @property
    def limits(self) -> QueueLimits:
        """Return the limits at which the store drops work."""
        return QueueLimits(
            max_attempts=self.max_attempts,
            max_deliveries=self.max_deliveries,
            max_dead_letters=self.max_dead_letters,
            max_finished=self.max_finished,
            full_at=self.full_at,
            lease_s=self.lease_s,
            max_waiting_groups=self.max_waiting_groups,
            overflow=self.overflow,
            # The rest is room for the message around the groups. A larger answer cannot be sent.
            max_lease_bytes=self.max_answer_bytes * 9 // 10,
        )
