"""From a job config to processes: each service's command, variables, address and place in line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop_services.config.settings import CONFIG_VARIABLE, overrides_of
from dialoop_services.runtime.device_lock import DEVICE_LOCK, is_owned
from dialoop_services.stack.processes.child import ServiceSpec
from dialoop_services.stack.processes.ports import HOST, choose_ports
from dialoop_services.stack.processes.readiness import grpc_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dialoop_services.config.file import Override
    from dialoop_services.config.job import JobConfig
    from dialoop_services.config.settings import JobSettings
    from dialoop_services.stack.run_dir import RunDir

STOP_ORDER = (
    "collector",
    "trainer",
    "scorer",
    "inference",
    "environment",
    "replay",
    "redis",
)
"""Who works for whom: producers of work first, the queue's store last."""

_SEED_STRIDE = 7919
_READY_TIMEOUT_S = {"inference": 300.0}
_STOP_GRACE_S = {"trainer": 45.0, "inference": 30.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A stack on this machine: who listens where, and what each process is told."""

    config: JobConfig
    run_dir: RunDir
    ports: Mapping[str, int]
    redis_url: str = ""
    token: str = ""
    memory: Path | None = None

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the inference processes."""
        return replica_names(self.config)

    def address(self, name: str) -> str:
        """host:port of a process."""
        return f"{HOST}:{self.ports[name]}"

    def rest_address(self, name: str) -> str:
        """host:port of a process' REST door."""
        return f"{HOST}:{self.ports[rest_name(name)]}"

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the processes that are services of ours, in no order that matters."""
        return tuple(name for name in self.ports if rest_name(name) in self.ports)

    def spec(self, name: str) -> ServiceSpec:
        """How to start the process `name` (`inference-1` is the second replica)."""
        service = service_of(name)
        variables = self.environment_of(name) | {
            f"DIALOOP_{service.upper()}_PORT": str(self.ports[name]),
            f"DIALOOP_{service.upper()}_REST_PORT": str(self.ports[rest_name(name)]),
            "DIALOOP_RUN": self.run_dir.run_id,
            CONFIG_VARIABLE: "",  # all that a file says stands in variables already
        }
        if service == "trainer":  # whatever a job of torchrun's, which may be around us, says
            variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        return ServiceSpec(
            name=name,
            command=(sys.executable, "-m", *self._program(service)),
            environment=variables,
            address=self.address(name),
            rest_address=self.rest_address(name),
            is_ready=grpc_ready(self.address(name)),
            ready_timeout_s=_READY_TIMEOUT_S.get(service, 120.0),
            is_held_up=self._held_up(service),
            stop_grace_s=_STOP_GRACE_S.get(service, 20.0),
            stop_rank=STOP_ORDER.index(service),
        )

    def _program(self, service: str) -> tuple[str, ...]:
        """The module that is run, with its arguments."""
        num_processes = self.config.train.num_processes
        if service == "trainer" and num_processes > 1:
            return ("dialoop_services.trainer.learner.launch", str(num_processes))
        return (f"dialoop_services.{service}",)

    def environment_of(self, name: str) -> dict[str, str]:
        """Return the variables of a process, without its ports."""
        prefix = f"DIALOOP_{service_of(name).upper()}_"
        return {f"{prefix}{key.upper()}": _text(v) for key, v in self.values_of(name).items()}

    def values_of(self, name: str) -> dict[str, object]:
        """Return the settings of a process, without its ports: what the job says, and its places.

        What has no value, as `stop_at`, is left out.
        """
        said = settings_of(service_of(name)).of_job(self.config) | self._places_of(name)
        return {key: value for key, value in said.items() if value is not None}

    def _places_of(self, name: str) -> dict[str, object]:
        """Where a process finds the others and its files, and what it is called."""
        of_run = {"run": self.run_dir.run_id, "replay_address": self.address("replay")}
        model = {"model_dir": self.run_dir.model(self.config).resolve()}
        service = service_of(name)
        if service == "replay":
            return {"redis_url": self.redis_url} if self.config.store == "redis" else {}
        if service == "environment":
            return {**model, "inference_address": self.address("inference")}
        if service == "inference":
            return {**model, **self._weights(), **self._device_lock(), "seed": self._seed_of(name)}
        if service == "scorer":
            reference = self.config.scorer.reference_model
            return {**of_run, **({"model_dir": Path(reference).resolve()} if reference else model)}
        common = {
            **of_run,
            "run_dir": self.run_dir.path.resolve(),
            "environment_address": self.address("environment"),
            "inference_addresses": [self.address(replica) for replica in self.replicas],
        }
        if service == "trainer":
            memory = {"shared_memory_dir": self.memory} if self.memory else {}
            return {**common, **model, **self._device_lock(), **memory}
        if any(section.agent for section in self.config.all_environments):
            rest = [self.rest_address(replica) for replica in self.replicas]
            return {**common, "inference_rest_addresses": rest}
        return common

    def _seed_of(self, replica: str) -> int:
        """Replicas with one seed would sample the same."""
        return self.config.seed + _SEED_STRIDE * self.replicas.index(replica)

    def _weights(self) -> dict[str, object]:
        if self.config.inference.data_plane != "shared_memory":
            return {}
        return {"weights_root": self.memory or self.run_dir.policies.resolve()}

    def _held_up(self, service: str) -> Callable[[], bool] | None:
        """A replica that starts waits while the trainer has the device, however long."""
        lock = self._device_lock().get("device_lock")
        if service != "inference" or not isinstance(lock, Path):
            return None
        return partial(is_owned, lock)

    def _device_lock(self) -> dict[str, object]:
        """What trainer and replicas share a device by."""
        if self.config.placement == "split":
            return {}
        return {"device_lock": self.run_dir.path.resolve() / DEVICE_LOCK}


def settings_of(service: str) -> type[JobSettings]:
    """Return the settings of a service: by name, since a stack of processes imports no service."""
    module = import_module(f"dialoop_services.{service}.settings")
    found: type[JobSettings] = getattr(module, f"{service.title()}Settings")
    return found


def variables_of_tables(environment: Mapping[str, str]) -> list[Override]:
    """Return the keys of the job file that variables of its services say."""
    services = {name.split("_")[1].lower() for name in environment if name.startswith("DIALOOP_")}
    return overrides_of(environment, [settings_of(one) for one in STOP_ORDER if one in services])


def service_of(name: str) -> str:
    """Return the service of a process: `inference` of `inference-1`."""
    return name.partition("-")[0]


def replica_names(config: JobConfig) -> tuple[str, ...]:
    """inference, inference-1, inference-2, ..."""
    more = (f"inference-{index}" for index in range(1, config.inference.num_replicas))
    return ("inference", *more)


def rest_name(name: str) -> str:
    """What the REST port of a process goes by: `inference-1_rest`."""
    return f"{name}_rest"


def ports_of(config: JobConfig, *, with_redis: bool) -> dict[str, int]:
    """Choose every port before anything starts; InvalidConfig when a fixed one is taken."""
    wanted = config.ports.model_dump()
    for door in (str, rest_name):
        first = wanted[door("inference")]
        for index, name in enumerate(replica_names(config)):
            wanted[door(name)] = first + index if first else 0
    if not with_redis:
        del wanted["redis"]
    return choose_ports(wanted)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return str(value)
