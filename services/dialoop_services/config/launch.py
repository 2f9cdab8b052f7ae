"""Define [launch]: on what the processes of a job are started.

[launch]
on = "slurm"
[launch.slurm]
partition = "gpu"
time_limit_min = 240
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dialoop_services.config.values import Section

Target = Literal["local", "ray", "slurm", "kubernetes", "skypilot"]
TARGETS: tuple[Target, ...] = ("local", "ray", "slurm", "kubernetes", "skypilot")


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


class RaySection(Section):
    """The Ray cluster that runs the job."""

    address: str = ""
    """Address of a running cluster, as "10.0.0.1:6379", or "auto" on one of its nodes; empty: one
    is started on this machine and ends with the job."""
    place_within_s: float = Field(default=120.0, gt=0)
    """Seconds in which the cluster has to have room for all processes at once."""


class KubernetesSection(Section):
    """The manifests that `dialoop train --on kubernetes --print` writes."""

    image: str = "dialoop-{target}:latest"
    """Image of a service; {target} is its target in infra/docker/Dockerfile, as "trainer"."""
    namespace: str = Field(
        default="dialoop", max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
    )
    """Namespace of all objects."""
    queue: str = Field(default="", max_length=63, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")
    """Kueue's local queue for the job and its replicas; empty: no queue."""
    secret: str = "dialoop"
    """Secret with `token`, the services' token, and `redis_url`, the address of Redis."""
    volume_gib: int = Field(default=100, ge=1)
    """Size of the volume for runs, which all nodes share."""
    storage_class: str = ""
    """Storage class of that volume, which has to allow ReadWriteMany; empty: the default one."""
    max_scorers: int = Field(default=4, ge=1)
    """Largest number of scorers that autoscaling starts."""


class SkyPilotSection(Section):
    """The job group that `dialoop train --on skypilot --print` writes."""

    infra: str = ""
    """Where SkyPilot looks for machines, as "kubernetes" or "slurm/cluster"; empty: anywhere."""
    accelerator: str = "H100"
    """SkyPilot's name of the GPU of processes that use one."""
    volume: str = "dialoop-runs"
    """SkyPilot's volume for runs, which all tasks mount; unused with shared_folder = false."""
    setup: tuple[str, ...] = (
        'pip install "dialoop-services[environment,replay,collector,scorer,inference,trainer]"',
    )
    """Lines of shell that install what the processes need."""


class LaunchSection(Section):
    """Where the processes of `dialoop train` are started."""

    on: Target = "local"
    """What starts the processes: "local", this machine; "ray", "slurm"; "kubernetes" and
    "skypilot", for which files are written. `dialoop train --on` overrides it."""
    shared_folder: bool = True
    """Whether all machines see the run's folder. If not, replicas get weights by `data_plane`
    "chunks" or one of yours, and find the model directory on their own disk."""
    ray: RaySection = RaySection()
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    skypilot: SkyPilotSection = SkyPilotSection()
