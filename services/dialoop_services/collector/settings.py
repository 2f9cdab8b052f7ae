"""What a collector needs to know; read once in `__main__`."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from dialoop.trajectory import Purpose, SamplingParams, Task
from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from dialoop_services.collector.mixture import Ingredient, Mixture
from dialoop_services.config.shared import CollectorFields
from dialoop_services.runtime.settings import ServerSettings


def _this_worker() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class MixedEnvironment(BaseModel):
    """One more environment to train on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: str
    """Its name."""
    split: str = "train"
    """The split whose tasks are offered."""
    weight: float = Field(default=1.0, gt=0)
    """How often it is drawn beside the others."""


class CollectorSettings(ServerSettings, CollectorFields):
    """Which tasks to play, on what, how many at a time; `port` serves health only."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_COLLECTOR_")

    run: str = "default"
    """Run id: scopes the queue's keys."""
    run_dir: Path | None = None
    """Where collector-<worker>.json goes; absent: nowhere."""
    worker: str = Field(default_factory=_this_worker, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of this collector in leases and files."""

    replay_address: str = "127.0.0.1:7003"
    """host:port of the replay service."""
    environment_address: str = "127.0.0.1:7001"
    """host:port of the environment service."""
    inference_addresses: list[str] = Field(default=["127.0.0.1:7002"], min_length=1)
    """host:port of every inference replica; asked in turn."""

    inference_rest_addresses: list[str] = Field(default_factory=list)
    """host:port of every replica's REST door, in the same order; agents call there."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Environment to module:function, the agent that plays its tasks instead of the policy."""
    agent_time_limit_s: float = Field(default=600.0, gt=0)
    """Longest run of an agent."""

    environment: str = "arithmetic"
    """Environment whose tasks are offered for training."""
    train_split: str = "train"
    """Split whose tasks are offered for training."""
    weight: float = Field(default=1.0, gt=0)
    """How often that environment is drawn beside those of `mixed_environments`."""
    mixed_environments: list[MixedEnvironment] = Field(default_factory=list)
    """Further environments whose tasks are offered: {environment, split, weight}."""
    page_size: int = Field(default=64, ge=1)
    """Tasks offered at a time, and kept waiting in the ledger."""
    shuffle_seed: int = 0
    """Orders the tasks of each epoch; 0 keeps the source's order."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Most tokens of one answer, for tasks that do not say."""
    stop: list[str] | None = None
    """Strings that end an answer, for tasks that do not say; absent: the environment's own."""
    max_turns: int = Field(default=64, ge=1)
    """Ends an episode whose environment never does."""

    member_retries: int = Field(default=2, ge=0)
    """How often a member that failed through no fault of the policy is played again."""
    lease_s: float = Field(default=60.0, ge=1)
    """Seconds until the ledger takes a task back from a collector that is gone."""
    wait_s: float = Field(default=5.0, gt=0)
    """Longest wait of one request for tasks."""
    patience_s: float = Field(default=120.0, gt=0)
    """How long a service may be away before the groups that need it are given back."""

    @property
    def mixture(self) -> Mixture:
        """What is offered, the main environment first."""
        first = Ingredient(environment=self.environment, split=self.train_split, weight=self.weight)
        others = (
            Ingredient(environment=one.environment, split=one.split, weight=one.weight)
            for one in self.mixed_environments
        )
        return Mixture((first, *others), self.shuffle_seed)

    def sampling_of(self, task: Task, environment_stop: tuple[str, ...]) -> SamplingParams:
        """The task's own sampling, its gaps filled from here."""
        given = task.sampling
        temperature = given.temperature
        if temperature is None and task.purpose is Purpose.TRAINING:
            temperature = self.temperature
        default_stop = environment_stop if self.stop is None else tuple(self.stop)
        return replace(
            given,
            temperature=temperature,
            max_new_tokens=given.max_new_tokens or self.max_new_tokens,
            stop=given.stop or default_stop,
        )
