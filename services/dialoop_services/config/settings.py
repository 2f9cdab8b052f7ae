"""Define the settings of services that read the job file.

class TrainerSettings(JobSettings, TrainFields):
    model_config = SettingsConfigDict(env_prefix="DIALOOP_TRAINER_")
    TABLE = "train"
    evaluation: EvaluationSection = EvaluationSection()      # the file's table of that name
    max_new_tokens: int = job_key("collector.max_new_tokens")

A value is taken from an argument, else from a variable, else from the job file that DIALOOP_CONFIG
names, else it is the default. Every process of a stack is started so, on whatever machine.
"""

from __future__ import annotations

import json
import os
import socket
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from dialoop_services.config.derived import AUTO, device_here
from dialoop_services.config.file import Override, load_config, parse_config, values_in
from dialoop_services.config.job import JobConfig
from dialoop_services.config.values import table_of
from dialoop_services.runtime.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic.fields import FieldInfo

CONFIG_VARIABLE = "DIALOOP_CONFIG"


def field_at(path: str) -> FieldInfo:
    """Return the field of a key of the job file, as `collector.max_new_tokens`."""
    *tables, key = path.split(".")
    model: type[BaseModel] = JobConfig
    for table in tables:
        inner = table_of(model.model_fields[table])
        assert inner is not None
        model = inner
    return model.model_fields[key]


def is_table(path: str) -> bool:
    """Return whether a key of the job file is a table, or an array of tables."""
    return table_of(field_at(path)) is not None


def job_key(path: str) -> Any:
    """Return the field of a key that a service reads from the table of another service."""
    field = copy(field_at(path))
    field.json_schema_extra = {"job_key": path}
    return field


class JobSettings(ServerSettings):
    """Settings whose fields are keys of the job file, besides addresses and folders."""

    TABLE: ClassVar[str] = ""
    """Name of the service's own table in the job file; its keys are fields here."""

    @field_validator("device", mode="after", check_fields=False)
    @classmethod
    def choose_device(cls, device: str) -> str:
        """Return a device also where a process is started by itself and told none."""
        return device_here() if device == AUTO else device

    @property
    def joined_run(self) -> str:
        """Return the run whose registry names the replicas; empty where none does."""
        is_in_registry = getattr(self, "discovery", "") == "registry"
        return str(getattr(self, "run", "")) if is_in_registry else ""

    @classmethod
    def job_paths(cls) -> dict[str, str]:
        """Return the path in the job file of each field that is a key or a table there."""
        own = field_at(cls.TABLE).annotation if cls.TABLE else None
        keys = own.model_fields if isinstance(own, type) and issubclass(own, BaseModel) else {}
        paths: dict[str, str] = {}
        for name, field in cls.model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and "job_key" in extra:
                paths[name] = str(extra["job_key"])
            elif name in keys:
                paths[name] = f"{cls.TABLE}.{name}"
            elif name in JobConfig.model_fields:
                paths[name] = name
        derived = cls.derive(JobConfig())
        return {name: path for name, path in paths.items() if name not in derived}

    @classmethod
    def derive(cls, job: JobConfig) -> dict[str, Any]:
        """Return the fields whose values follow from several keys of the job file."""
        return {}

    @classmethod
    def of_job(cls, job: JobConfig) -> dict[str, Any]:
        """Return the values that a job file gives to these settings."""
        values = {name: _value_at(job, path) for name, path in cls.job_paths().items()}
        return values | cls.derive(job)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments first, then the environment, then the job file."""
        before = super().settings_customise_sources(settings_cls, *sources, **named)
        return (*before, InitSettingsSource(settings_cls, cls._values_of_file()))

    @classmethod
    def _values_of_file(cls) -> dict[str, Any]:
        """Return the values of the file that DIALOOP_CONFIG names, or whose lines it has."""
        job = os.environ.get(CONFIG_VARIABLE, "")
        if not job:
            return {}
        if "\n" in job:
            values = values_in(job, CONFIG_VARIABLE)
            return cls.of_job(parse_config(values, source=CONFIG_VARIABLE))
        return cls.of_job(load_config(Path(job), environment={}))


def this_worker() -> str:
    """Return a name for this process in leases and files."""
    return f"{socket.gethostname()}-{os.getpid()}"


def overrides_of(
    environment: Mapping[str, str], kinds: Iterable[type[JobSettings]]
) -> list[Override]:
    """Return the job file's keys that variables of services override.

    A variable can override keys of the service's own table, and tables that the service reads. It
    cannot override a key of the whole job, as `seed`.
    """
    overrides = []
    for kind in kinds:
        for variable, (key, *inner) in keys_in(environment, kind).items():
            if key.startswith(f"{kind.TABLE}.") or is_table(key):
                path, value = ".".join((key, *inner)), _parse(environment[variable])
                overrides.append(Override(path=path, value=value, origin=variable))
    return overrides


def keys_in(environment: Mapping[str, str], kind: type[JobSettings]) -> dict[str, list[str]]:
    """Return the service's variables that say a key of the job file, with key and inner names."""
    prefix, paths = str(kind.model_config.get("env_prefix")), kind.job_paths()
    keys = {}
    for variable in (name for name in environment if name.startswith(prefix)):
        field, *inner = variable.removeprefix(prefix).lower().split("__")
        if field in paths:
            keys[variable] = [paths[field], *inner]
    return keys


def _parse(text: str) -> Any:
    """Return the value in a variable's text: JSON where it looks like JSON, else the text."""
    try:
        return json.loads(text) if text[:1] in ("[", "{") else text
    except ValueError:
        return text


def _value_at(job: JobConfig, path: str) -> Any:
    value: Any = job
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, tuple):
        return tuple(item.model_dump() if isinstance(item, BaseModel) else item for item in value)
    return value
