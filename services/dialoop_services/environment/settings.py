"""Define the settings of the environment service, read from DIALOOP_ENVIRONMENT_* variables.

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
    """Environment to load: "arithmetic", "jsonl" or your own as "module:attribute"."""
    options: dict[str, Any] = {}
    """Arguments of the function that makes the environment."""
    tools_in_prompt: bool = True
    """Whether the chat template shows the policy the tools that it calls in its own syntax."""


class EnvironmentSettings(JobSettings):
    """Which environments to serve, and the limits of their sessions."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_ENVIRONMENT_")
    ROLE = "environment"

    environments: Annotated[tuple[EnvironmentEntry, ...], NoDecode] = (
        EnvironmentEntry(use="arithmetic"),
    )
    """Environments to serve: names separated by commas, or a JSON list of names and {"use",
    "options", "tools_in_prompt"}."""
    task_file: str = ""
    """JSONL file of tasks; the environment "jsonl" is served with them too."""
    heldout_file: str = ""
    """JSONL file of tasks for the split "heldout" of `task_file`."""
    text_environments: Annotated[tuple[EnvironmentEntry, ...], NoDecode] = (
        EnvironmentEntry(use="calculator"),
    )
    """Text environments for RunText, each a TextSetup; written as `environments` is."""
    inference_address: str = ""
    """host:port of the policy that plays RunText and RunTrial; empty: both are refused."""
    model_dir: Path | None = None
    """Model directory of the policy: its tokenizer, and the form in which it writes calls."""
    openenv: bool = False
    """Whether to serve OpenEnv's protocol too, at /openenv/{environment} of the REST server."""
    ttl_s: float = Field(default=900.0, gt=0)
    """Seconds without use after which a session expires, unless it was created with its own
    ttl_s."""
    max_ttl_s: float = Field(default=86_400.0, gt=0)
    """Longest ttl_s that a client may set, in seconds."""
    capacity: int = Field(default=4096, ge=1)
    """Largest number of sessions at one time; more are refused until some close or expire."""
    step_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds after which a step ends its episode with a failure of the environment."""
    abandon_s: float = Field(default=10.0, gt=0)
    """Seconds without a retry after which a step whose caller has gone is cancelled."""
    max_working_steps: int = Field(default=1024, ge=1)
    """Largest number of steps under way at one time; more are refused with CAPACITY."""
    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between questions to the environments whether they can work (/readyz)."""
    reap_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between searches for expired sessions."""
    max_concurrent_items: int = Field(default=256, ge=1)
    """Largest number of requests of one batch or stream that are worked on at one time."""

    @classmethod
    def derive(cls, job: JobConfig) -> dict[str, Any]:
        """Return what is served: every environment of the job, and their text environments."""
        sections = job.all_environments
        texts = [use for section in sections for use in section.text_environments]
        texts += [s.kind for s in sections if s.play == "text" and not s.arguments]
        served = [
            {
                "use": section.kind,
                "options": section.arguments,
                "tools_in_prompt": section.tools_in_prompt,
            }
            for section in sections
        ]
        model = {"model_dir": job.model.directory} if job.model.directory else {}
        return {
            "environments": served,
            "text_environments": list(dict.fromkeys(texts)),
            **model,
        }

    @field_validator("environments", "text_environments", mode="before")
    @classmethod
    def _accept_names(cls, value: Any) -> Any:
        if isinstance(value, str):
            text = value.strip()
            value = json.loads(text) if text[:1] in ("[", "{") else _names(text)
        if not isinstance(value, (list, tuple)):
            raise ValueError("write names separated by commas, or a JSON list")
        if not value:
            raise ValueError("name at least one environment")
        return tuple({"use": entry} if isinstance(entry, str) else entry for entry in value)

    @property
    def entries(self) -> tuple[EnvironmentEntry, ...]:
        """Return all environments to serve, that of `task_file` included."""
        if not self.task_file:
            return self.environments
        options = {"path": self.task_file, "heldout_path": self.heldout_file or None}
        return (*self.environments, EnvironmentEntry(use="jsonl", options=options))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
