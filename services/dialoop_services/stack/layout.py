"""From a job config to processes: each service's command, variables, address and place in line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop_services.config.loss_facts import advantages_of
from dialoop_services.config.shared import (
    CollectorFields,
    InferenceFields,
    ScorerFields,
    TrainFields,
)
from dialoop_services.runtime.device_lock import DEVICE_LOCK, is_owned
from dialoop_services.stack.processes.child import ServiceSpec
from dialoop_services.stack.processes.ports import HOST, choose_ports
from dialoop_services.stack.processes.readiness import grpc_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import BaseModel

    from dialoop_services.config.job import EnvironmentSection, JobConfig
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
        service, _, index = name.partition("-")
        variables = self.environment_of(service) | {
            f"DIALOOP_{service.upper()}_PORT": str(self.ports[name]),
            f"DIALOOP_{service.upper()}_REST_PORT": str(self.ports[rest_name(name)]),
            "DIALOOP_RUN": self.run_dir.run_id,
        }
        if service == "inference":  # replicas with one seed would sample the same
            seed = self.config.seed + 7919 * int(index or 0)
            variables["DIALOOP_INFERENCE_SEED"] = str(seed)
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

    def environment_of(self, service: str) -> dict[str, str]:
        """The variables of a service, without its port."""
        values = self.values_of(service)
        return {f"DIALOOP_{service.upper()}_{k.upper()}": _text(v) for k, v in values.items()}

    def values_of(self, service: str) -> dict[str, object]:
        """The settings of a service, without its port."""
        return {
            "replay": self._replay,
            "environment": self._environment,
            "inference": self._inference,
            "trainer": self._trainer,
            "scorer": self._scorer,
            "collector": self._collector,
        }[service]()

    def _replay(self) -> dict[str, object]:
        address = {"redis_url": self.redis_url} if self.config.store == "redis" else {}
        return {"store": self.config.store, **address}

    def _environment(self) -> dict[str, object]:
        sections = self.config.all_environments
        texts = (use for section in sections for use in section.text_environments)
        return {
            "environments": [
                {"use": section.kind, "options": environment_options(section)}
                for section in sections
            ],
            "text_environments": list(dict.fromkeys(texts)),
            "inference_address": self.address("inference"),
            "model_dir": self.run_dir.model(self.config).resolve(),
        }

    def _inference(self) -> dict[str, object]:
        section = self.config.inference
        return {
            "engine": self.config.engine,
            "model_dir": self.run_dir.model(self.config).resolve(),
            **self._weights(),
            **_said(section, InferenceFields, "max_model_len", "max_num_seqs"),
            "max_new_tokens": self.config.collector.max_new_tokens,
            "dtype": section.dtype or self.config.dtype,
            **self._device_lock(),
        }

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

    def _weights(self) -> dict[str, object]:
        plane = self.config.inference.data_plane
        if plane == "shared_memory":
            return {"weights_root": self.memory or self.run_dir.policies.resolve()}
        return {"weight_transfer": plane} if plane in ("nccl", "ipc") else {}

    def _scorer(self) -> dict[str, object]:
        section = self.config.scorer
        return {
            "run": self.run_dir.run_id,
            "replay_address": self.address("replay"),
            "model_dir": Path(section.reference_model or self.run_dir.model(self.config)).resolve(),
            **advantages_of(self.config),
            **_said(section, ScorerFields, "rewards"),
            "torch_threads": section.num_threads,
        }

    def _collector(self) -> dict[str, object]:
        section, environment = self.config.collector, self.config.environment
        return {
            "run": self.run_dir.run_id,
            "run_dir": self.run_dir.path.resolve(),
            "replay_address": self.address("replay"),
            "environment_address": self.address("environment"),
            "inference_addresses": [self.address(name) for name in self.replicas],
            **self._agents(),
            "environment": environment.served_name,
            "train_split": environment.train_split,
            "weight": environment.weight,
            "mixed_environments": [
                {
                    "environment": section.served_name,
                    "split": section.train_split,
                    "weight": section.weight,
                }
                for section in self.config.environments
            ],
            **_said(section, CollectorFields, "max_new_tokens"),
            # 0 would keep the tasks in the source's order.
            "shuffle_seed": self.config.seed + 1,
        }

    def _agents(self) -> dict[str, object]:
        agents = {s.served_name: s.agent for s in self.config.all_environments if s.agent}
        if not agents:
            return {}
        return {
            "agents": agents,
            "inference_rest_addresses": [self.rest_address(name) for name in self.replicas],
        }

    def _trainer(self) -> dict[str, object]:
        environment, evaluation = self.config.environment, self.config.evaluation
        return {
            "run": self.run_dir.run_id,
            "run_dir": self.run_dir.path.resolve(),
            "model_dir": self.run_dir.model(self.config).resolve(),
            "seed": self.config.seed,
            "replay_address": self.address("replay"),
            "environment_address": self.address("environment"),
            "inference_addresses": [self.address(name) for name in self.replicas],
            "environment": environment.served_name,
            "environment_use": environment.kind,
            "environment_options": environment_options(environment),
            "heldout_split": environment.heldout_split,
            "max_new_tokens": self.config.collector.max_new_tokens,
            "evaluate_every": evaluation.every,
            "num_evaluation_tasks": evaluation.num_tasks,
            "num_running_evaluation_tasks": evaluation.num_running_tasks,
            **({} if evaluation.stop_at is None else {"stop_at": evaluation.stop_at}),
            "stop_without_gain": evaluation.stop_without_gain,
            **self._warm_start(),
            **self._train(),
        }

    def _lora(self) -> dict[str, object]:
        model = self.config.model
        return {
            "rank": model.lora_rank,
            "alpha": model.lora_alpha,
            "targets": model.lora_targets,
            "publish": model.publish,
        }

    def _warm_start(self) -> dict[str, object]:
        section = self.config.warm_start
        told = {f"warm_start_{n.removeprefix('num_')}": value for n, value in section}
        if not section.file:
            del told["warm_start_file"]
        return told | {"warm_start_split": self.config.environment.train_split}

    def _train(self) -> dict[str, object]:
        section = self.config.train
        return {
            **_said(section, TrainFields),
            "max_row_tokens": self.config.max_row_tokens,
            "sft": self.config.sft.model_dump(),
            "lora": self._lora(),
            "trackers": self.config.trackers.model_dump(),
            "num_train_steps": section.num_steps,
            "torch_threads": section.num_threads,
            "dtype": self.config.dtype,
            "max_logprob_difference": self.config.gates.logprob_difference_at_most,
            "update_mode": self.config.inference.update_mode,
            "data_plane": self.config.inference.data_plane,
            "inference_world_size": self.config.inference.tensor_parallel_size,
            **self._device_lock(),
            **({"shared_memory_dir": self.memory} if self.memory else {}),
        }


def _said(section: BaseModel, shared: type[BaseModel], *more: str) -> dict[str, object]:
    """What a table says of the settings that it shares with its service, and of `more`."""
    return section.model_dump(include={*shared.model_fields, *more})


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


def environment_options(section: EnvironmentSection) -> dict[str, object]:
    """What makes the environment: its options, and the files of a JSONL one."""
    if not section.task_file:
        return dict(section.options)
    if section.heldout_file:
        files: dict[str, object] = {"heldout_path": section.heldout_file}
    else:
        files = {"heldout_fraction": section.heldout_fraction}
    return {"path": section.task_file, **files, **section.options}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return str(value)
