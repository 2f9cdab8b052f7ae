"""Define the settings of the collector; `__main__` reads them once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dialoop.trajectory import Purpose, SamplingParams, Task
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dialoop_services.collector.mixture import Mixture, TaskStream
from dialoop_services.config.job import JobConfig
from dialoop_services.config.settings import JobSettings, job_key, this_worker
from dialoop_services.config.tables import CollectorSection, EnvironmentSection


class CollectorSettings(JobSettings, CollectorSection):
    """Which tasks to play, with which services, how many at a time. `port` serves health."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_COLLECTOR_")
    ROLE = "collector"
    TABLE = "collector"
    SUCCESSORS = MappingProxyType(
        {
            "agents": "environment__agent",
            "train_split": "environment__train_split",
            "weight": "environment__weight",
            "mixed_environments": "environments",
        }
    )

    run: str = "default"
    """Run id, which is part of the queue's keys."""
    run_dir: Path | None = None
    """Folder for collector-<worker>.json; absent: the file is not written. A process that is
    started again under the same name writes collector-<worker>-2.json."""
    worker: str = Field(default_factory=this_worker, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of this collector in leases and files."""

    replay_address: str = "127.0.0.1:7003"
    """host:port of the replay service."""
    environment_address: str = "127.0.0.1:7001"
    """host:port of the environment service."""
    discovery: Literal["addresses", "registry"] = job_key("discovery")
    """Whether replicas are those of inference_addresses, or those in the registry."""
    inference_addresses: list[str] = Field(default=["127.0.0.1:7002"], min_length=1)
    """host:port of every inference replica; each group goes to one of them."""
    inference_rest_addresses: list[str] = Field(default_factory=list)
    """host:port of every replica's REST server, in the same order; agents call these."""

    model_dir: Path | None = None
    """Model directory with the policy's tokenizer; trials and text episodes need it."""

    environment: EnvironmentSection = EnvironmentSection()
    """Environment whose tasks are offered for training, and the agent that plays them."""
    environments: tuple[EnvironmentSection, ...] = ()
    """Further environments whose tasks are offered, by weight."""
    shuffle_seed: int = 0
    """Seed of the order of tasks in each epoch; 0 keeps the order of the source."""

    @classmethod
    def derive(cls, job: JobConfig) -> dict[str, Any]:
        """Return the model, and the seed of the order of tasks: 0 would not shuffle."""
        model = {"model_dir": Path(job.model.directory)} if job.model.directory else {}
        return {"shuffle_seed": job.seed + 1, **model}

    @property
    def sections(self) -> tuple[EnvironmentSection, ...]:
        """Return the environments whose tasks are offered, the main one first."""
        return (self.environment, *self.environments)

    @property
    def agents(self) -> dict[str, str]:
        """Return the agent, as module:function, of each environment that has one."""
        return {s.served_name: s.agent for s in self.sections if s.agent}

    @property
    def mixture(self) -> Mixture:
        """Return the mixture of tasks that is offered, the main environment first."""
        streams = (
            TaskStream(
                environment=section.served_name, split=section.train_split, weight=section.weight
            )
            for section in self.sections
        )
        return Mixture(tuple(streams), self.shuffle_seed)

    def sampling_of(self, task: Task, environment_stop: tuple[str, ...]) -> SamplingParams:
        """Return the task's own sampling; these settings fill its gaps."""
        sampling = task.sampling
        temperature = sampling.temperature
        if temperature is None and task.purpose is Purpose.TRAINING:
            temperature = self.temperature
        default_stop = environment_stop if self.stop is None else self.stop
        return replace(
            sampling,
            temperature=temperature,
            max_new_tokens=sampling.max_new_tokens or self.max_new_tokens,
            stop=sampling.stop or default_stop,
        )
