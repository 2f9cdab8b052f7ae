"""Plan which process of a job gets which GPUs: a function of the config and of the machines.

`plan_devices` gets a config and what `this_machine` found. The plan's `variables` of a process are
{"CUDA_VISIBLE_DEVICES": "2,3"}, say. Its `lines` are what `dialoop config check` prints.

The largest processes are placed first, each on the first machine with room, so that the devices of
a replica are next to each other. With placement = "shared" the trainer gets the replicas' devices.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.config.derived import VISIBLE, visible_gpus
from dialoop_services.config.engines import facts_of_engine
from dialoop_services.config.job import JobConfig
from dialoop_services.config.resources import ROLES

from dialoop_ops.launch.plan import Needs
from dialoop_ops.stack.gpus import driver_lists
from dialoop_ops.stack.layout import replica_names, service_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine: its GPUs by the names that CUDA_VISIBLE_DEVICES takes, processors, memory.

    processors and memory_gib are None where they are unknown; nothing is then compared with them.
    """

    gpus: tuple[str, ...] = ()
    processors: int | None = None
    memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedProcess:
    """A process with its machine (from 0), its GPUs there and the variables that it gets."""

    name: str
    node: int
    gpus: tuple[str, ...]
    needs: Needs
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Where each process of a job computes."""

    nodes: tuple[Node, ...]
    processes: tuple[PlacedProcess, ...]

    @property
    def has_gpus(self) -> bool:
        """Return whether any machine has GPUs."""
        return any(node.gpus for node in self.nodes)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return every GPU that a process gets, in their order."""
        return tuple(dict.fromkeys(gpu for each in self.processes for gpu in each.gpus))

    def variables(self, name: str) -> Mapping[str, str]:
        """Return the variables of a process; none for one that the plan does not place."""
        return next((each.variables for each in self.processes if each.name == name), {})

    def lines(self) -> list[str]:
        """Return a line for each process, as people read it; none where no machine has a GPU."""
        if not self.has_gpus:
            return []
        counts = ", ".join(str(len(node.gpus)) for node in self.nodes)
        width = max(len(each.name) for each in self.processes)
        head = f"Devices: {len(self.nodes)} node{'s'[: len(self.nodes) > 1]} with {counts} GPUs."
        return [head, *(f"  {_line(each, width)}" for each in self.processes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand(Needs):
    """What one process asks for."""

    name: str
    ranks: int = 1

    @property
    def needs(self) -> Needs:
        """Return the same of a process without a name."""
        return Needs(gpus=self.gpus, processors=self.processors, memory_gib=self.memory_gib)


@dataclass(slots=True, kw_only=True)
class _Room:
    """What is left of a machine: how many processes use each GPU, processors, memory."""

    node: Node
    users: list[int] = field(default_factory=list)
    processors: int = 0
    memory_gib: float = 0.0

    def holds(self, demand: _Demand, *, overlap: bool) -> bool:
        """Return whether the process fits beside those that are placed already."""
        node = self.node
        gpus = len(self.users) if overlap else self.users.count(0)
        return (
            demand.gpus <= gpus
            and (node.processors is None or demand.processors + self.processors <= node.processors)
            and (node.memory_gib is None or demand.memory_gib + self.memory_gib <= node.memory_gib)
        )

    def take(self, demand: _Demand) -> tuple[str, ...]:
        """Book the process and return its GPUs: the first that the fewest processes use."""
        order = sorted(range(len(self.users)), key=lambda index: (self.users[index], index))
        indices = sorted(order[: demand.gpus])
        self.reserve(demand, indices)
        return tuple(self.node.gpus[index] for index in indices)

    def reserve(self, demand: _Demand, indices: Iterable[int]) -> None:
        """Count the process as a user of GPUs, processors and memory."""
        for index in indices:
            self.users[index] += 1
        self.processors += demand.processors
        self.memory_gib += demand.memory_gib


def plan_devices(
    config: JobConfig, nodes: Sequence[Node], *, without: Collection[str] = ()
) -> DevicePlan:
    """Return the plan of a job on these machines; InvalidConfig (PLAN_TOO_LARGE) if none fits.

    Services in `without` run elsewhere.
    """
    has_gpus = any(node.gpus for node in nodes)
    demands = _demands(config, has_gpus=has_gpus)
    demands = [each for each in demands if service_of(each.name) not in without]
    rooms = [_Room(node=node, users=[0] * len(node.gpus)) for node in nodes]
    together = _shares_devices(config) and has_gpus
    places: dict[str, tuple[int, tuple[str, ...]]] = {}
    for demand in sorted(demands, key=lambda each: -each.gpus):
        if not (together and service_of(demand.name) == "trainer"):
            places[demand.name] = _place(
                demand, demands, rooms, places, overlap=config.resources.overlap
            )
    for demand in demands:  # after the replicas, whose devices it takes
        if demand.name not in places:
            places[demand.name] = _place_on_replicas(demand, demands, rooms, places)
    placed = [_with_variables(each, *places[each.name], has_gpus=has_gpus) for each in demands]
    return DevicePlan(nodes=tuple(nodes), processes=tuple(placed))


def with_data_plane(config: JobConfig, devices: Mapping[str, Mapping[str, str]]) -> JobConfig:
    """Return the config with data_plane "ipc", if it names none and one GPU has both sides.

    devices: the variables of each process. A LoRA adapter alone goes as a file: it is small.
    """
    trainer, replica = (devices.get(name, {}).get(VISIBLE, "") for name in ("trainer", "inference"))
    is_possible = (
        trainer == replica != ""
        and config.engine == "vllm"
        and config.is_one_device_each
        and (config.placement, config.discovery) == ("split", "addresses")
        and config.launch.on == "local"
        and not config.model.publishes_adapters(config.inference.data_plane)
    )
    if not is_possible or "data_plane" in config.inference.model_fields_set:
        return config
    inference = config.inference.model_copy(update={"data_plane": "ipc"})
    return config.model_copy(update={"inference": inference})


def this_machine(environment: Mapping[str, str]) -> Node:
    """Return this machine: the GPUs that its processes see, its processors and its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Node(
        gpus=_visible_gpus(environment),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        memory_gib=memory,
    )


def nodes_of(config: JobConfig, environment: Mapping[str, str]) -> tuple[Node, ...]:
    """Return the machines that a config describes; this one where it describes none."""
    wanted, here = config.resources, this_machine(environment)
    is_other = wanted.is_for_other_machines or config.launch.on != "local"
    count = wanted.gpus_per_node
    node = Node(
        gpus=here.gpus if count is None else tuple(str(index) for index in range(count)),
        processors=wanted.processors_per_node or (None if is_other else here.processors),
        memory_gib=wanted.memory_gib_per_node or (None if is_other else here.memory_gib),
    )
    return (node,) * max(wanted.num_nodes, config.train.num_nodes)


def warnings_for_devices(config: JobConfig) -> Iterator[str]:
    """Yield a sentence where GPUs of the machines would be idle."""
    nodes = nodes_of(config, os.environ)
    with suppress(InvalidConfig):  # the job's check says why there is no plan
        plan = plan_devices(config, nodes)
        used = {(each.node, gpu) for each in plan.processes for gpu in each.gpus}
        count = sum(len(node.gpus) for node in nodes)
        idle = count - len(used)
        trains = config.train.num_steps or config.train.mode == "sft"
        if idle and trains and config.train.device == "cpu":
            yield (
                f"the trainer computes on the CPU, and {idle} of {count} GPUs are idle: set "
                'device = "cuda" in [train]'
            )
        elif idle:
            yield (
                f"{idle} of {count} GPUs are idle: raise num_processes in [train] or num_replicas "
                "in [inference], or name fewer GPUs in CUDA_VISIBLE_DEVICES"
            )


def plan_here(config: JobConfig, environment: Mapping[str, str]) -> DevicePlan:
    """Return the plan for this machine; InvalidConfig (PLAN_TOO_LARGE) where it is too small.

    A config may describe less than this machine, and then uses that much of it.
    """
    wanted, here = config.resources, this_machine(environment)
    count = len(here.gpus) if wanted.gpus_per_node is None else wanted.gpus_per_node
    if config.train.num_nodes > 1:
        raise _too_large(
            f"The trainer is for {config.train.num_nodes} machines (num_nodes in [train]), and "
            "this is one.",
            remedy="Run it with --on slurm or --on ray, or start what --print shows for each "
            "machine.",
        )
    if wanted.num_nodes > 1 or count > len(here.gpus):
        raise _too_large(
            f"[resources] describes {wanted.num_nodes} x {count} GPUs, and this is one machine "
            f"with {len(here.gpus) or 'none'}.",
            remedy="Leave num_nodes and gpus_per_node out to plan for this machine; `dialoop "
            "config check` shows plans for others.",
        )
    node = Node(
        gpus=here.gpus[:count],
        processors=wanted.processors_per_node or here.processors,
        memory_gib=wanted.memory_gib_per_node or here.memory_gib,
    )
    return plan_devices(config, (node,))


def needs_elsewhere(config: JobConfig) -> dict[str, Needs]:
    """Return what each process needs of machines that are not known yet, as those of a cluster.

    They have GPUs where [resources] says so, or the trainer computes on one.
    """
    per_node = config.resources.gpus_per_node
    has_gpus = config.train.device == "cuda" if per_node is None else per_node > 0
    demands = _demands(config, has_gpus=has_gpus)
    for demand in demands:
        if per_node is not None and demand.gpus > per_node:
            name = service_of(demand.name)
            raise _too_large(
                f"A process has to lie on one node. GPUs: {name} {demand.gpus} of {per_node}.",
                remedy="Lower tensor_parallel_size, or num_processes in [train] and raise its "
                "num_nodes, or take nodes with more GPUs.",
            )
    return {each.name: each.needs for each in demands}


def _demands(config: JobConfig, *, has_gpus: bool) -> list[_Demand]:
    """Return what each process asks for; a trainer of several nodes in one part for each."""
    demands = []
    for role in ROLES:
        needs, uses = config.resources.of(role), _gpus_used(config, role, has_gpus=has_gpus)
        gpus = uses if needs.devices is None else needs.devices
        _require_what_is_used(config, role, gpus, uses)
        names: tuple[str, ...] = (role,)
        if role == "inference":
            names = replica_names(config)
        elif role == "trainer":
            names += tuple(f"{role}-{node}" for node in range(1, config.train.num_nodes))
        demands += [
            _Demand(
                name=name,
                gpus=gpus,
                processors=needs.processors,
                memory_gib=needs.memory_gib,
                ranks=config.train.num_processes if role == "trainer" else 1,
            )
            for name in names
        ]
    return demands


def _gpus_used(config: JobConfig, role: str, *, has_gpus: bool) -> int:
    """Return how many GPUs a process of the role uses by its own settings, on its node."""
    if role == "trainer":
        return config.train.num_processes if config.train.device == "cuda" else 0
    if role == "scorer":
        _, _, index = config.scorer.device.partition(":")
        return 0 if config.scorer.device == "cpu" else int(index or 0) + 1
    if role == "inference" and facts_of_engine(config.engine).takes_device:
        return int(config.inference.device == "cuda")
    return config.inference.num_devices if role == "inference" and has_gpus else 0


def _require_what_is_used(config: JobConfig, role: str, gpus: int, uses: int) -> None:
    """Raise InvalidConfig where [resources] names another number than the role's settings use."""
    is_fixed = role == "trainer" or (role == "inference" and gpus > 0) or gpus < uses
    if role == "inference" and gpus == 0 and config.inference.device == "cpu":
        return  # the engine computes on the CPU
    if is_fixed and gpus != uses:
        keys = {
            "trainer": "device and num_processes in [train]",
            "inference": "engine, device and tensor_parallel_size in [inference]",
        }
        raise InvalidConfig(
            f"[resources.{role}] devices is {gpus}, and {keys.get(role, f'device in [{role}]')} "
            f"use {uses} on these machines.",
            remedy="Leave devices out, or make the two the same number.",
        )


def _shares_devices(config: JobConfig) -> bool:
    """Return whether the trainer computes on the replicas' devices: by turns, or over CUDA IPC."""
    if config.train.device != "cuda" or config.resources.inference.devices == 0:
        return False
    is_shared = config.placement == "shared" or config.inference.data_plane == "ipc"
    has_device = not facts_of_engine(config.engine).takes_device
    return is_shared and (has_device or config.inference.device == "cuda")


def _place(
    demand: _Demand,
    demands: Sequence[_Demand],
    rooms: list[_Room],
    places: Mapping[str, tuple[int, tuple[str, ...]]],
    *,
    overlap: bool,
) -> tuple[int, tuple[str, ...]]:
    """Return machine and GPUs of a process, on the first machine with room.

    The trainer's nodes are different machines.
    """
    is_trainer = service_of(demand.name) == "trainer"
    taken = {at for name, (at, _) in places.items() if service_of(name) == "trainer"}
    for may_overlap in (False, True)[: 1 + overlap]:
        for index, room in enumerate(rooms):
            if room.holds(demand, overlap=may_overlap) and not (is_trainer and index in taken):
                return index, room.take(demand)
    raise _no_room(demand, demands, rooms)


def _place_on_replicas(
    demand: _Demand,
    demands: Sequence[_Demand],
    rooms: list[_Room],
    places: Mapping[str, tuple[int, tuple[str, ...]]],
) -> tuple[int, tuple[str, ...]]:
    """Return machine and GPUs of a trainer that shares those of the replicas."""
    for index, room in enumerate(rooms):
        names = [n for n, (at, _) in places.items() if at == index and service_of(n) == "inference"]
        theirs = {gpu for name in names for gpu in places[name][1]}
        gpus = [position for position, gpu in enumerate(room.node.gpus) if gpu in theirs]
        rest = replace(demand, gpus=0)
        is_free = not any(
            at == index for n, (at, _) in places.items() if service_of(n) == "trainer"
        )
        if is_free and len(gpus) >= demand.gpus and room.holds(rest, overlap=False):
            chosen = gpus[: demand.gpus]
            room.reserve(demand, chosen)
            return index, tuple(room.node.gpus[position] for position in chosen)
    raise _no_room(demand, demands, rooms)


def _with_variables(
    demand: _Demand, node: int, gpus: tuple[str, ...], *, has_gpus: bool
) -> PlacedProcess:
    """Return a placed process. Without GPUs anywhere, its variables are those it had before."""
    variables = {VISIBLE: ",".join(gpus)} if has_gpus else {}
    if demand.processors:
        variables["OMP_NUM_THREADS"] = str(max(1, demand.processors // demand.ranks))
    return PlacedProcess(
        name=demand.name, node=node, gpus=gpus, needs=demand.needs, variables=variables
    )


def _no_room(demand: _Demand, demands: Sequence[_Demand], rooms: Sequence[_Room]) -> InvalidConfig:
    """Return the error of a plan that does not fit, with its arithmetic."""
    parts = []
    for key, unit in (("gpus", "GPUs"), ("processors", "processors"), ("memory_gib", "GiB")):
        demanded = [(each.name, getattr(each, key)) for each in demands if getattr(each, key)]
        offered = [getattr(room.node, key) for room in rooms]
        if not demanded or None in offered:
            continue
        counts = [len(each) if isinstance(each, tuple) else each for each in offered]
        terms = " + ".join(f"{name} {value:g}" for name, value in demanded)
        nodes = " + ".join(f"{count:g}" for count in counts)
        parts.append(f"{unit}: {terms} = {sum(value for _, value in demanded):g} of {nodes}")
    training = sum(service_of(each.name) == "trainer" for each in demands)
    if training > len(rooms):
        parts.append(f"machines that train: {training} of {len(rooms)}")
    remedy = "Lower processors or memory_gib in [resources], or take larger machines."
    if service_of(demand.name) == "trainer" and (len(rooms) > 1 or demand.name != "trainer"):
        remedy = (
            "num_processes in [train] are those of one machine, and num_nodes says how many "
            "machines train: let both fit num_nodes and gpus_per_node in [resources]."
        )
    elif demand.gpus > max(room.users.count(0) for room in rooms):
        remedy = (
            'Lower num_replicas, num_processes or tensor_parallel_size, set placement = "shared", '
            "or let processes share GPUs with overlap = true in [resources]."
        )
    message = f"{demand.name} has no room on any node. {'; '.join(parts)}."
    return _too_large(message, remedy=remedy)


def _too_large(message: str, *, remedy: str) -> InvalidConfig:
    return InvalidConfig(message, reason=Reason.PLAN_TOO_LARGE, remedy=remedy)


def _line(process: PlacedProcess, width: int) -> str:
    """Return name, machine, variables and reservations of a process."""
    variables = " ".join(f"{name}={value}" for name, value in process.variables.items())
    memory = f" memory {process.needs.memory_gib:g} GiB" if process.needs.memory_gib else ""
    return f"{process.name:<{width}}  node {process.node}  {variables}{memory}"


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs that a process with these variables sees."""
    gpus = visible_gpus(environment)
    if not gpus and VISIBLE not in environment:
        with suppress(InvalidConfig):  # the job's check says what is wrong with the driver
            return tuple(str(index) for index, _ in enumerate(driver_lists() or ()))
    return gpus
