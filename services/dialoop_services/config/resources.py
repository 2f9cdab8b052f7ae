"""Define [resources]: what the processes of a job need, and the machines that it is planned for.

[resources]
num_nodes = 2
gpus_per_node = 8
[resources.inference]
processors = 8
memory_gib = 64
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dialoop_services.config.values import Section

ROLES = ("trainer", "inference", "scorer", "collector", "environment", "replay")
"""The services that a plan places."""


class RoleResources(Section):
    """What each process of a service needs."""

    devices: int | None = Field(default=None, ge=0)
    """Number of GPUs of the process; absent: as many as its settings use, and 0 on a CPU."""
    processors: int = Field(default=0, ge=0)
    """Number of processors that it computes on; 0: no limit, and nothing is reserved."""
    memory_gib: float = Field(default=0.0, ge=0)
    """Memory of the host that is kept for it, in GiB; 0: nothing is reserved."""


class TrainerResources(RoleResources):
    """What the trainer needs on each of its machines, all its processes there together."""


class InferenceResources(RoleResources):
    """What each inference replica needs."""


class ScorerResources(RoleResources):
    """What the scorer needs."""


class CollectorResources(RoleResources):
    """What the collector needs."""


class EnvironmentResources(RoleResources):
    """What the environment service needs."""


class ReplayResources(RoleResources):
    """What the replay service needs."""


class ResourcesSection(Section):
    """What each service needs of the machines, and which machines the job is planned for."""

    num_nodes: int = Field(default=1, ge=1)
    """Number of machines, all alike. `dialoop train` itself uses one."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """Number of GPUs of a machine; absent: those of this one."""
    processors_per_node: int | None = Field(default=None, ge=1)
    """Number of processors of a machine. Absent: those of this one, or unknown where gpus_per_node
    or num_nodes plans for others."""
    memory_gib_per_node: float | None = Field(default=None, gt=0)
    """Memory of a machine in GiB. Absent: that of this one, or unknown where gpus_per_node or
    num_nodes plans for others."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of a GPU in GiB, where gpus_per_node or num_nodes plans for others. Absent: unknown,
    and nothing is compared with it."""
    gpu_tflops: float | None = Field(default=None, gt=0)
    """10^12 floating-point operations that a GPU does in a second of a train step, as you measured
    them or expect them; `dialoop config check` then says the time of a step. Absent: no time."""
    overlap: bool = False
    """Whether processes share GPUs where there are too few, all of them at once. Their memory is
    then yours to divide."""
    trainer: TrainerResources = TrainerResources()
    inference: InferenceResources = InferenceResources()
    scorer: ScorerResources = ScorerResources()
    collector: CollectorResources = CollectorResources()
    environment: EnvironmentResources = EnvironmentResources()
    replay: ReplayResources = ReplayResources()

    @property
    def is_for_other_machines(self) -> bool:
        """Return whether the file describes the machines itself."""
        return self.num_nodes > 1 or self.gpus_per_node is not None

    def of(self, role: str) -> RoleResources:
        """Return what a process of the service needs."""
        needs: RoleResources = getattr(self, role)
        return needs

    @model_validator(mode="after")
    def _require_one_process_on_a_node(self) -> Self:
        for role in ROLES:
            for key, most in (
                ("processors", self.processors_per_node),
                ("memory_gib", self.memory_gib_per_node),
            ):
                value = getattr(self.of(role), key)
                if most is not None and value > most:
                    raise ValueError(
                        f"{role}.{key} is {value:g}, and {key}_per_node is {most:g}: a process "
                        "cannot be spread over machines, so lower the first or raise the second"
                    )
        return self
