"""Define [launch]: on what the processes of a job are started.

[launch]
on = "slurm"
[launch.slurm]
partition = "gpu"
time_limit_min = 240
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dialoop_services.config.values import Section

_EXAMPLES = {"kubernetes": "infra/k8s", "skypilot": "infra/skypilot"}


class SlurmSection(Section):
    """The Slurm job: one component for the trainer and what stays with it, one for each replica."""

    partition: str = ""
    """Partition of the job; empty: the cluster's default."""
    account: str = ""
    """Account that is charged; empty: your default."""
    time_limit_min: int = Field(default=0, ge=0)
    """Minutes that the job may run before it saves and goes back in the queue; 0: the
    partition's limit."""
    save_before_s: int = Field(default=120, ge=15)
    """Seconds before the time limit at which the job saves a checkpoint and goes back in the
    queue. A started train step has to end in them."""
    options: tuple[str, ...] = ()
    """Further options of sbatch for every component, as ["--constraint=h100"]."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the job starts, as ["module load cuda"]."""

    @model_validator(mode="after")
    def _require_time_to_train(self) -> Self:
        if self.time_limit_min and self.save_before_s >= 60 * self.time_limit_min:
            raise ValueError(
                f"save_before_s is {self.save_before_s} and time_limit_min {self.time_limit_min}, "
                "so the job would go back in the queue as it starts: set save_before_s below "
                f"{60 * self.time_limit_min}, or a longer time limit"
            )
        return self


class RaySection(Section):
    """The Ray cluster that runs the job."""

    address: str = ""
    """Address of a running cluster, as "10.0.0.1:6379", or "auto" on one of its nodes; empty: one
    is started on this machine and ends with the job."""
    place_within_s: float = Field(default=120.0, gt=0)
    """Seconds in which the cluster has to have room for all processes at once."""


class LaunchSection(Section):
    """Where the processes of `dialoop train` are started."""

    on: Literal["local", "ray", "slurm"] = "local"
    """What starts the processes: "local", this machine; "ray" or "slurm". `dialoop train --on`
    overrides it."""
    shared_folder: bool = True
    """Whether all machines see the run's folder. If not, replicas get weights by `data_plane`
    "chunks" or one of yours, and find the model directory on their own disk."""
    ray: RaySection = RaySection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="before")
    @classmethod
    def _name_examples(cls, values: Any) -> Any:
        named = {values.get("on"), *values} if isinstance(values, dict) else {}
        for other, folder in _EXAMPLES.items():
            if other in named:
                raise ValueError(
                    f"Dialoop starts nothing on {other}: {folder} in its repository has a whole "
                    "job as an example, to change and apply"
                )
        return values
