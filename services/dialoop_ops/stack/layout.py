"""Turn a job config into the launch plan: each process's command, variables, address and order."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.config.file import Override, toml_of
from dialoop_services.config.settings import CONFIG_VARIABLE, JobSettings, keys_in, overrides_of
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.runtime.access.principals import TICKET
from dialoop_services.runtime.device_lock import DEVICE_LOCK, is_owned
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.trainer.settings import TrainerSettings

from dialoop_ops.launch.plan import (
    LaunchPlan,
    Needs,
    PlannedProcess,
)
from dialoop_ops.stack.processes.child import Grow, ServiceSpec, Starter
from dialoop_ops.stack.processes.ports import HOST, choose_ports
from dialoop_ops.stack.processes.readiness import answers, is_serving
from dialoop_ops.stack.processes.redis_server import redis_command, redis_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    from dialoop_services.config.job import JobConfig
    from dialoop_services.runtime.access.tickets import Authority

    from dialoop_ops.stack.run_dir import RunDir

STOP_ORDER = (
    "collector",
    "trainer",
    "scorer",
    "inference",
    "environment",
    "replay",
    "redis",
)
"""Order in which services stop: producers of work first, the queue's store last."""

SETTINGS: Mapping[str, type[JobSettings]] = MappingProxyType(
    {
        "environment": EnvironmentSettings,
        "inference": InferenceSettings,
        "replay": ReplaySettings,
        "scorer": ScorerSettings,
        "trainer": TrainerSettings,
        "collector": CollectorSettings,
    }
)
"""The settings of each service."""

FIXED_PORTS = MappingProxyType(
    {
        name + suffix: first + number
        for suffix, first in (("", 7000), ("_rest", 8000))
        for number, name in enumerate(SETTINGS, start=1)
    }
)
"""Ports of a stack without a config, and in containers: gRPC from 7001 on, REST from 8001 on."""

RENDEZVOUS, RENDEZVOUS_PORT = "rendezvous", 29400
"""Where the trainer's nodes meet, among the ports of the processes; the port in containers."""

_SEED_STRIDE = 7919
_EVERYWHERE = "0.0.0.0"
_READY_TIMEOUT_S = {"inference": 300.0}
_STOP_GRACE_S = {"trainer": 45.0, "inference": 30.0, "replay": 75.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The processes of a stack: the address of each, and the settings that it gets."""

    config: JobConfig
    run_dir: RunDir
    ports: Mapping[str, int]
    redis_url: str = ""
    authority: Authority | None = None
    """Who signs the tickets of the processes; None where the job has no token."""
    memory: Path | None = None
    devices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Variables of each process that the plan of the devices gives it."""
    needs: Mapping[str, Needs] = field(default_factory=dict)
    """What the plan of the devices keeps for each process."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Address of each process's machine, where others than this one have to reach it."""
    starters: Mapping[str, Starter] = field(default_factory=dict)
    """What starts the processes that run elsewhere."""
    grow: Grow | None = None
    """What makes room elsewhere for a process that is added; None: it is added here."""
    config_file: str = ""
    """Job file that the processes read; empty: that in the run's folder."""
    redis_program: str = ""
    """The Redis that the stack starts itself; empty: none."""
    folder: Path | None = None
    """Where the services work, so where relative paths and modules of the config are; None: here.
    """

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return the names of the inference processes."""
        return replica_names(self.config)

    def model_to_make(self) -> Path | None:
        """Return where to make the tiny model; None if it is there, or the config names another."""
        directory = self.run_dir.model(self.config)
        is_there = self.config.model.directory or (directory / "model.safetensors").is_file()
        return None if is_there else directory

    def address(self, name: str) -> str:
        """Return host:port of a process."""
        return f"{self._host(name)}:{self.ports[name]}"

    def rest_address(self, name: str) -> str:
        """Return host:port of the REST server of a process."""
        return f"{self._host(name)}:{self.ports[rest_name(name)]}"

    def _host(self, name: str) -> str:
        return self.hosts.get(name, HOST)

    @property
    def services(self) -> tuple[str, ...]:
        """Return the names of the processes that are Dialoop's services, in any order."""
        return tuple(name for name in self.ports if rest_name(name) in self.ports)

    def launch_plan(self) -> LaunchPlan:
        """Return the plan of all processes, which every launcher starts them from."""
        first = ("redis",) if self.redis_program else ()
        processes = (self.process(name) for name in (*first, *self.services))
        return LaunchPlan(run=self.config.run, processes=tuple(processes))

    def process(self, name: str) -> PlannedProcess:
        """Return the plan of the process `name` (`inference-1` is the second replica)."""
        if name == "redis":
            return self._redis()
        service = service_of(name)
        return PlannedProcess(
            name=name,
            role=service,
            command=(sys.executable, "-m", *self._program(service)),
            variables=self._variables_of(name),
            address=self.address(name),
            rest_address=self.rest_address(name),
            needs=self.needs.get(name, Needs()),
            num_nodes=self.config.train.num_nodes if service == "trainer" else 1,
            after=self._after(service),
            needs_model=service == "inference",
            ready_timeout_s=_READY_TIMEOUT_S.get(service, 120.0),
            hang_timeout_s=self.config.hang_timeout_s,
            stop_grace_s=_STOP_GRACE_S.get(service, 20.0),
            stop_rank=STOP_ORDER.index(service),
        )

    def _redis(self) -> PlannedProcess:
        return PlannedProcess(
            name="redis",
            role="redis",
            command=redis_command(self.redis_program, **self._redis_place),
            address=self.address("redis"),
            ready_timeout_s=30.0,
            hang_timeout_s=self.config.hang_timeout_s,
            stop_rank=STOP_ORDER.index("redis"),
        )

    @property
    def _redis_place(self) -> dict[str, Any]:
        return {"port": self.ports["redis"], "directory": self.run_dir.path / "redis"}

    def _after(self, service: str) -> tuple[str, ...]:
        """Return the processes that must be ready before one of the service starts.

        Each starts as early as it can: vLLM takes half a minute, and the trainer warms up.
        """
        if service == "replay" and self.redis_program:
            return ("redis",)
        if service == "scorer":
            return ("replay", "environment", "trainer", *self.replicas)
        return ("scorer",) if service == "collector" else ()

    def _variables_of(self, name: str) -> dict[str, str]:
        """Return all variables that a process gets beside those of its machine."""
        service, places = service_of(name), self.places_of(name)
        variables = (
            {f"DIALOOP_{service.upper()}_{k.upper()}": _text(v) for k, v in places.items()}
            | dict(self.devices.get(name, {}))
            | {
                f"DIALOOP_{service.upper()}_PORT": str(self.ports[name]),
                f"DIALOOP_{service.upper()}_REST_PORT": str(self.ports[rest_name(name)]),
                "DIALOOP_RUN": self.run_dir.run_id,
                CONFIG_VARIABLE: self._job_of(name),
            }
        )
        if name in self.hosts:  # of several machines, so it listens to all; a token is required
            variables[f"DIALOOP_{service.upper()}_HOST"] = _EVERYWHERE
        if self.folder is not None:
            # Modules are looked up in the config's folder first, then where the command started.
            path = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # noqa: PTH109
            variables["PYTHONPATH"] = os.pathsep.join(str(Path(p).resolve()) for p in path if p)
        if service == "trainer":  # replace the variables of a torchrun that may run this stack
            variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        return variables

    def spec(self, name: str) -> ServiceSpec:
        """Return how the supervisor starts the process `name` and tells that it is well."""
        process = self.process(name)
        if name == "redis":
            password = urlsplit(self.redis_url).password or ""
            spec = redis_service(self.redis_program, **self._redis_place, password=password)
        else:
            spec = ServiceSpec(
                name=name,
                command=process.command,
                environment={**process.variables, **self._ticket_of(name)},
                folder=self.folder,
                address=process.address,
                rest_address=process.rest_address,
                is_ready=partial(is_serving, process.address),
                is_held_up=self._held_up(process.role),
                starter=self.starters.get(name),
                is_alive=partial(answers, process.address),
            )
        return replace(
            spec,
            ready_timeout_s=process.ready_timeout_s,
            hang_timeout_s=process.hang_timeout_s,
            stop_grace_s=process.stop_grace_s,
            stop_rank=process.stop_rank,
            restart=process.restart,
        )

    def _ticket_of(self, name: str) -> dict[str, str]:
        """Return the variable with the ticket of a process; none where the job has no token."""
        if self.authority is None:
            return {}
        role = service_of(name)
        # Collectors choose their names themselves, a new one at each start.
        own = "" if role == "collector" else name
        ticket = self.authority.issue(run=self.run_dir.run_id, role=role, name=own)
        return {TICKET: ticket.text()}

    def _program(self, service: str) -> tuple[str, ...]:
        """Return the module to run, with its arguments."""
        train = self.config.train
        if service != "trainer" or train.num_ranks == 1:
            return (f"dialoop_services.{service}",)
        meeting: tuple[str, ...] = ()
        if train.num_nodes > 1:
            place = f"{self._host('trainer')}:{self.ports[RENDEZVOUS]}"
            meeting = ("--num-nodes", str(train.num_nodes), "--rendezvous", place)
        return ("dialoop_services.trainer.learner.launch", str(train.num_processes), *meeting)

    def write_job(self) -> None:
        """Write the job file of the run's folder, which each process reads when it starts."""
        self.run_dir.job_file.write_text(toml_of(self.config, whole=False), encoding="utf-8")

    def _job_of(self, name: str) -> str:
        """Return the job file of a process; its text where its machine does not see the file."""
        if self._is_apart(name):
            return toml_of(self.config, whole=False)
        return self.config_file or str(self.run_dir.job_file)

    def _is_apart(self, name: str) -> bool:
        """Return whether a process does not see the run's folder."""
        is_replica = service_of(name) == "inference"
        return is_replica and name in self.hosts and not self.config.launch.shared_folder

    def values_of(self, name: str) -> dict[str, object]:
        """Return the settings of a service in this process: the job's, and its places."""
        values = SETTINGS[service_of(name)].of_job(self.config) | self.places_of(name)
        return {key: value for key, value in values.items() if value is not None}

    def places_of(self, name: str) -> dict[str, object]:
        """Return the addresses, files and names that a process needs beside the job file."""
        of_run = {"run": self.run_dir.run_id, "replay_address": self.address("replay")}
        model: dict[str, object] = {"model_dir": self.run_dir.model(self.config).resolve()}
        service = service_of(name)
        if service == "replay":
            return model | self._store
        if service == "environment":
            return {**model, "inference_address": self.address("inference")}
        if service == "inference":
            # Whatever brings the policies, a replica that starts reads the newest one from here.
            weights: dict[str, object] = {
                "weights_root": self.memory or self.run_dir.policies.resolve()
            }
            if self._is_apart(name):
                weights = {"awaits_policy": True}
            own = {**of_run, "name": name, "seed": self._seed_of(name)}
            if name in self.hosts:
                own["advertised_address"] = self.address(name)
            return {**model, **weights, **self._device_lock(), **own}
        if service == "scorer":
            reference = self.config.scorer.reference_model
            return {**of_run, **({"model_dir": Path(reference).resolve()} if reference else model)}
        common: dict[str, object] = {
            **of_run,
            "run_dir": self.run_dir.path.resolve(),
            "environment_address": self.address("environment"),
            "inference_addresses": [self.address(replica) for replica in self.replicas],
        }
        if service == "trainer":
            memory = {"shared_memory_dir": self.memory} if self.memory else {}
            made = {} if self.config.model.directory else {"tiny_model_seed": self.config.seed}
            return {**common, **model, **made, **self._device_lock(), **memory}
        sections = self.config.all_environments
        if any(section.play != "chat" for section in sections):
            common |= model
        if any(section.agent for section in sections):
            common["inference_rest_addresses"] = [self.rest_address(r) for r in self.replicas]
        return common

    @property
    def _store(self) -> dict[str, object]:
        """Return where the queue is kept; empty where the process finds that out itself."""
        if self.config.store == "memory":
            return {"run_dir": self.run_dir.path.resolve()}
        return {"redis_url": self.redis_url} if self.redis_url else {}

    def _seed_of(self, replica: str) -> int:
        """Return a seed for the replica: replicas with one seed would sample the same."""
        return self.config.seed + _SEED_STRIDE * int(replica.partition("-")[2] or 0)

    def _held_up(self, service: str) -> Callable[[], bool] | None:
        """Return whether a starting replica must wait because the trainer has the device."""
        lock = self._device_lock().get("device_lock")
        if service != "inference" or not isinstance(lock, Path):
            return None
        return partial(is_owned, lock)

    def _device_lock(self) -> dict[str, object]:
        """Return the lock file by which trainer and replicas share a device."""
        if self.config.placement == "split":
            return {}
        return {"device_lock": self.run_dir.path.resolve() / DEVICE_LOCK}


def variables_of_tables(environment: Mapping[str, str]) -> list[Override]:
    """Return the keys of the job file that variables of its services override."""
    return overrides_of(environment, SETTINGS.values())


@contextmanager
def without_keys(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Take out the variables that say keys of the job file, which has had its say by now.

    A service that inherited one would prefer it to what --set says.
    """
    names = [name for kind in SETTINGS.values() for name in keys_in(environment, kind)]
    kept = {name: environment.pop(name) for name in names}
    try:
        yield
    finally:
        environment.update(kept)


def service_of(name: str) -> str:
    """Return the service of a process: `inference` of `inference-1`."""
    return name.partition("-")[0]


def replica_names(config: JobConfig) -> tuple[str, ...]:
    """Return inference, inference-1, inference-2, ...: a name for each replica."""
    more = (f"inference-{index}" for index in range(1, config.inference.num_replicas))
    return ("inference", *more)


def rest_name(name: str) -> str:
    """Return the name under which the REST port of a process is kept: `inference-1_rest`."""
    return f"{name}_rest"


def ports_of(config: JobConfig, *, with_redis: bool) -> dict[str, int]:
    """Choose every port before anything starts; InvalidConfig when a fixed one is taken."""
    wanted = config.ports.model_dump()
    for port_name in (str, rest_name):
        first = wanted[port_name("inference")]
        for index, name in enumerate(replica_names(config)):
            wanted[port_name(name)] = first + index if first else 0
    if not with_redis:
        del wanted["redis"]
    if not config.console:
        del wanted["console"]
    if config.train.num_nodes == 1:
        del wanted[RENDEZVOUS]
    return choose_ports(wanted)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return str(value)
