"""Say where a stack's processes run: all on this machine, or some on others that have room.

A launcher makes a Site; the layout takes addresses and variables from it, the supervisor what
starts a process that runs elsewhere.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.config.job import JobConfig
from dialoop_services.runtime.access.principals import TOKEN

from dialoop_ops.launch.plan import Needs
from dialoop_ops.stack.devices import needs_elsewhere, plan_devices, plan_here, this_machine
from dialoop_ops.stack.layout import replica_names, service_of
from dialoop_ops.stack.processes.child import Grow, Starter


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the processes of a stack run.

    `hosts` has the address of each process's machine, where that is not this machine's loopback.
    `starters` start the processes that run elsewhere. `devices` and `needs` are each process's
    variables for its devices and what is kept for it. `grow` makes room for a process that is added
    while the job runs; None: those are added on this machine only.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    starters: Mapping[str, Starter] = field(default_factory=dict)
    devices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs: Mapping[str, Needs] = field(default_factory=dict)
    grow: Grow | None = None


def this_site(config: JobConfig) -> Site:
    """Return this machine for all processes; InvalidConfig (PLAN_TOO_LARGE) if it is too small."""
    processes = plan_here(config, os.environ).processes
    return Site(
        devices={each.name: each.variables for each in processes},
        needs={each.name: each.needs for each in processes},
    )


def spread_site(
    config: JobConfig, hosts: Mapping[str, str], starters: Mapping[str, Starter]
) -> Site:
    """Return a site whose replicas run elsewhere, and all other processes on this machine.

    The launcher that starts the replicas gives them their devices. Processes of several machines
    need a token to reach each other: without one in the environment, a new one is put there.
    """
    os.environ[TOKEN] = os.environ.get(TOKEN) or secrets.token_urlsafe(32)  # empty is none
    elsewhere = needs_elsewhere(config)
    away = ("inference", "trainer") if config.train.num_nodes > 1 else ("inference",)
    here = plan_devices(config, (this_machine(os.environ),), without=away).processes
    threads = {name: threads_on(config, name, needs) for name, needs in elsewhere.items()}
    return Site(
        hosts=hosts,
        starters=starters,
        devices=threads | {each.name: each.variables for each in here},
        needs=elsewhere | {each.name: each.needs for each in here},
    )


def threads_on(config: JobConfig, name: str, needs: Needs) -> dict[str, str]:
    """Return the variable with the threads of a process, or of each of the trainer's on a node."""
    ranks = config.train.num_processes if service_of(name) == "trainer" else 1
    if not needs.processors:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, needs.processors // ranks))}


def further_nodes(config: JobConfig) -> tuple[str, ...]:
    """Return trainer-1, trainer-2, ...: a name for each node that trains beside the head."""
    return tuple(f"trainer-{node}" for node in range(1, config.train.num_nodes))


def components_of(config: JobConfig) -> dict[str, Needs]:
    """Return what has to lie on one node each: the head, as the trainer, its nodes, each replica.

    The head needs the sum of what its processes need.
    """
    needs, nodes = needs_elsewhere(config), further_nodes(config)
    head = [n for name, n in needs.items() if service_of(name) != "inference" and name not in nodes]
    total = Needs(
        gpus=sum(each.gpus for each in head),
        processors=sum(each.processors for each in head),
        memory_gib=sum(each.memory_gib for each in head),
    )
    return {"trainer": total, **{name: needs[name] for name in (*nodes, *replica_names(config))}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node of a cluster: its processors, GiB of memory and GPUs."""

    processors: int
    memory_gib: float
    gpus: int


def require_room(components: Mapping[str, Needs], nodes: Sequence[ClusterNode]) -> None:
    """Raise InvalidConfig (PLAN_TOO_LARGE) where the cluster could never run all components."""
    for key, unit in (("gpus", "GPUs"), ("processors", "processors"), ("memory_gib", "GiB")):
        wanted = {name: getattr(needs, key) for name, needs in components.items()}
        offered = [getattr(node, key) for node in nodes]
        terms = " + ".join(f"{name} {value:g}" for name, value in wanted.items() if value)
        total = sum(wanted.values())
        if total > sum(offered) or max(wanted.values()) > max(offered):
            raise InvalidConfig(
                f"The job does not fit on the cluster's {len(nodes)} nodes. {unit}: {terms} = "
                f"{total:g} of {sum(offered):g}, {max(offered):g} at most on one node.",
                reason=Reason.PLAN_TOO_LARGE,
                remedy="Lower what [resources] asks for, num_replicas or num_processes, or take a "
                "larger cluster or partition.",
            )
