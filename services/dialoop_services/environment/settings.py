"""Settings of the environment service, from DIALOOP_ENVIRONMENT_* variables.

DIALOOP_ENVIRONMENT_ENVIRONMENTS=arithmetic,my_folder.capitals:environment
DIALOOP_ENVIRONMENT_ENVIRONMENTS='[{"use": "jsonl", "options": {"path": "train.jsonl"}}]'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from dialoop_services.config.job import JobConfig
from dialoop_services.config.settings import JobSettings


class EnvironmentEntry(BaseModel):
    """One environment to serve."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: str
    """`arithmetic`, `jsonl` or `module:attribute`."""
    options: dict[str, Any] = {}
    """Arguments of the function that makes it."""


class EnvironmentSettings(JobSettings):
    """What is served, and the limits of sessions."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_ENVIRONMENT_")

    environments: Annotated[tuple[EnvironmentEntry, ...], NoDecode] = (
        EnvironmentEntry(use="arithmetic"),
    )
    """Names separated by commas, or a JSON list of names and {"use", "options"}."""
    task_file: str = ""
    """Serve `jsonl` with the tasks of this file too."""
    heldout_file: str = ""
    """Tasks for the "heldout" split of `task_file`."""
    text_environments: Annotated[tuple[EnvironmentEntry, ...], NoDecode] = (
        EnvironmentEntry(use="calculator"),
    )
    """Text environments for RunText, given as `environments`; each names a TextSetup."""
    inference_address: str = ""
    """host:port of the policy that RunText and RunTrial play; empty: both are refused."""
    model_dir: Path | None = None
    """Model directory whose tokenizer that policy has."""
    openenv: bool = False
    """Serve OpenEnv's protocol too, at /openenv/{environment} of the REST door."""
    ttl_s: float = Field(default=900.0, gt=0)
    """A session that nobody uses for so long expires, unless it was created with its own ttl_s."""
    max_ttl_s: float = Field(default=86_400.0, gt=0)
    """Longest ttl_s a client may ask for."""
    capacity: int = Field(default=4096, ge=1)
    """Sessions at one time; more are refused until some close or expire."""
    step_timeout_s: float = Field(default=120.0, gt=0)
    """A step that takes longer ends its episode with a failure of the environment."""
    abandon_s: float = Field(default=10.0, gt=0)
    """A step that nobody waits for any more is cancelled after so long without a retry."""
    max_working_steps: int = Field(default=1024, ge=1)
    """Steps under way at one time; more are refused with CAPACITY until some end."""
    health_interval_s: float = Field(default=2.0, gt=0)
    """How often environments are asked whether they can work (/readyz)."""
    reap_interval_s: float = Field(default=1.0, gt=0)
    """How often expired sessions are collected."""
    max_concurrent_items: int = Field(default=256, ge=1)
    """Requests of one batch or stream that are worked on at one time."""

    @classmethod
    def derived(cls, job: JobConfig) -> dict[str, Any]:
        """Return what is served: every environment of the job, and their text environments."""
        sections = job.all_environments
        texts = (use for section in sections for use in section.text_environments)
        served = [{"use": one.kind, "options": one.arguments} for one in sections]
        model = {"model_dir": job.model.directory} if job.model.directory else {}
        return {
            "environments": served,
            "text_environments": list(dict.fromkeys(texts)),
            **model,
        }

    @field_validator("environments", "text_environments", mode="before")
    @classmethod
    def _accept_names(cls, given: Any) -> Any:
        if isinstance(given, str):
            text = given.strip()
            given = json.loads(text) if text[:1] in ("[", "{") else _names(text)
        if not isinstance(given, (list, tuple)):
            raise ValueError("give names separated by commas, or a JSON list")
        if not given:
            raise ValueError("name at least one environment")
        return tuple({"use": entry} if isinstance(entry, str) else entry for entry in given)

    @property
    def entries(self) -> tuple[EnvironmentEntry, ...]:
        """All environments to serve, that of `task_file` included."""
        if not self.task_file:
            return self.environments
        options = {"path": self.task_file, "heldout_path": self.heldout_file or None}
        return (*self.environments, EnvironmentEntry(use="jsonl", options=options))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
