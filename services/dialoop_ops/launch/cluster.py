"""Compare a job with a cluster: what has to lie on one node, and whether the nodes have room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

from dialoop_ops.launch.plan import Needs
from dialoop_ops.stack.devices import needs_elsewhere
from dialoop_ops.stack.layout import replica_names, service_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop_services.config.job import JobConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What has to lie on one node: the head, or a replica."""

    name: str
    needs: Needs


def components_of(config: JobConfig) -> tuple[Component, ...]:
    """Return the head, with the sum of what its processes need, and each replica."""
    needs = needs_elsewhere(config)
    head = [each for name, each in needs.items() if service_of(name) != "inference"]
    total = Needs(
        gpus=sum(each.gpus for each in head),
        processors=sum(each.processors for each in head),
        memory_gib=sum(each.memory_gib for each in head),
    )
    replicas = (Component(name=name, needs=needs[name]) for name in replica_names(config))
    return (Component(name="trainer", needs=total), *replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node of the cluster: its processors, GiB of memory and GPUs."""

    processors: int
    memory_gib: float
    gpus: int


def require_room(components: Sequence[Component], nodes: Sequence[ClusterNode]) -> None:
    """Raise InvalidConfig (PLAN_TOO_LARGE) where the cluster could never run all components."""
    for key, unit in (("gpus", "GPUs"), ("processors", "processors"), ("memory_gib", "GiB")):
        wanted = [(each.name, getattr(each.needs, key)) for each in components]
        offered = [getattr(node, key) for node in nodes]
        terms = " + ".join(f"{name} {value:g}" for name, value in wanted if value)
        total = sum(value for _, value in wanted)
        largest = max(value for _, value in wanted)
        if total > sum(offered) or largest > max(offered):
            raise InvalidConfig(
                f"The job does not fit on the cluster's {len(nodes)} nodes. {unit}: {terms} = "
                f"{total:g} of {sum(offered):g}, {max(offered):g} at most on one node.",
                reason=Reason.PLAN_TOO_LARGE,
                remedy="Lower what [resources] asks for, num_replicas or num_processes, or take a "
                "larger cluster or partition.",
            )
