"""Start a service of docker-compose.yml with the settings that the job file gives it.

python -m dialoop_ops.launch.compose check       # refuse a job before anything starts
python -m dialoop_ops.launch.compose job         # the same, then follow it to its end
python -m dialoop_ops.launch.compose trainer     # what the trainer's container runs

The job file is mounted into every container. This reads it, takes the variables of the service from
the launch plan, and becomes the service. A variable that the container has already stays.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.config.file import Override, load_with_origins, toml_of
from dialoop_services.config.job import JobConfig
from dialoop_services.config.settings import CONFIG_VARIABLE
from dialoop_services.config.tables import DEVICE_PLANES
from dialoop_services.config.values import paths_in
from dialoop_services.runtime.access.principals import (
    TICKET,
    TOKEN,
    without_tokens,
)
from dialoop_services.runtime.access.tickets import Proofs, authority_of
from dialoop_services.runtime.exit_reason import (
    ENDS_FOR_GOOD_VARIABLE,
    EXIT_REASON_VARIABLE,
    ExitReason,
)
from dialoop_services.runtime.process import end_command
from dialoop_services.runtime.settings import StrictSettings, load
from pydantic_settings import SettingsConfigDict

from dialoop_ops.launch.compose_job import (
    files_in,
    follow,
    remember_start,
    require_readable,
    require_writable,
    trainer_end,
)
from dialoop_ops.launch.plan import LaunchPlan, PlannedProcess
from dialoop_ops.stack.devices import needs_elsewhere
from dialoop_ops.stack.layout import (
    FIXED_PORTS,
    RENDEZVOUS,
    RENDEZVOUS_PORT,
    SETTINGS,
    Layout,
    replica_names,
    rest_name,
    service_of,
)
from dialoop_ops.stack.run_dir import RunDir, mark_run

FOLDER = Path("/var/lib/dialoop")
"""Where the containers have the runs: infra/docker/Dockerfile makes it."""
CONFIG_FILE = "/etc/dialoop/job.toml"
CHECK = "check"
JOB = "job"
SERVICES = ("environment", "inference", "replay", "scorer", "trainer", "collector")
DOOR = "door"
"""The relay between the environment service, in a network of its own, and all others."""
_CHECKED = "dialoop-checked"
"""A file for temporary files, once the job is checked: the services start then."""
_JOINS = ("inference", "scorer", "collector")
"""Services that a second machine adds to a job."""
_DEMO = "infra/configs/demo.toml"
_GPU_FILE = "infra/docker/gpu.yml"


class ComposeSettings(StrictSettings):
    """What docker-compose.yml says of a container, beside the job file."""

    model_config = SettingsConfigDict(env_prefix="DIALOOP_COMPOSE_")

    folder: Path = FOLDER
    """Folder with runs, code and model."""
    job: str = ""
    """JOB as the user set it; empty: the demo's job."""
    model: str = ""
    """MODEL_DIR as the user set it, mounted at `folder`/model; empty: the job file's model."""
    code: str = ""
    """CODE_DIR as the user set it, mounted at `folder`/code; empty: an empty volume."""
    runs: str = ""
    """RUNS_DIR as the user set it, mounted at `folder`/runs; empty: a volume."""
    gpu: bool = False
    """Whether the container has a GPU."""
    head: str = ""
    """Address of the machine that runs the rest of the job; empty: this one."""
    address: str = ""
    """Address of this machine, at which others reach its replica; empty: none but containers."""

    @property
    def code_folder(self) -> Path:
        """Return the folder of the user's code, where relative paths of the job file begin."""
        return self.folder / "code"

    @property
    def runs_folder(self) -> Path:
        """Return the folder that holds the runs."""
        return self.folder / "runs"

    def as_given(self, path: Path) -> str:
        """Return a path of the containers as the user knows it, where it is in CODE_DIR."""
        if self.code and path.is_relative_to(self.code_folder):
            return str(Path(self.code, path.relative_to(self.code_folder)))
        return str(path)


def read_job(path: Path, settings: ComposeSettings) -> JobConfig:
    """Return the job as these containers run it; InvalidConfig for one that they cannot run."""
    require_readable(path, "JOB", settings.job or _DEMO)
    require_readable(
        settings.code_folder, "CODE_DIR", settings.as_given(settings.code_folder), whole=False
    )
    overrides = []
    if settings.model:
        _require_model(settings)
        directory = str(settings.folder / "model")
        overrides.append(Override(path="model.directory", value=directory, origin="MODEL_DIR"))
    if settings.gpu:
        overrides.append(Override(path="train.device", value="cuda", origin=_GPU_FILE))
    loaded = load_with_origins(
        path, environment={}, overrides=overrides, folder=settings.code_folder
    )
    _require_what_compose_has(loaded.config)
    _require_files(loaded.config, settings)
    return loaded.config


def _require_model(settings: ComposeSettings) -> None:
    if not settings.job:
        raise InvalidConfig(
            "MODEL_DIR is set, and JOB is not: the demo's job is meant for its tiny model.",
            remedy="Set JOB to a job file for your model.",
        )
    require_readable(settings.folder / "model", "MODEL_DIR", settings.model)
    if not (settings.folder / "model" / "config.json").is_file():
        raise InvalidConfig(
            f"MODEL_DIR={settings.model} holds no config.json.",
            reason=Reason.MODEL_INCOMPLETE,
            remedy="Give a folder with a Hugging Face model.",
        )


def _require_what_compose_has(config: JobConfig) -> None:
    """Raise InvalidConfig for a job that needs more than one container of a kind, or other GPUs."""
    elsewhere = "Start it with `dialoop train`, here or --on a cluster."
    if config.placement == "shared":
        raise InvalidConfig(
            'placement is "shared", and containers do not take turns on a device.',
            remedy=f'Set placement = "split". {elsewhere}',
        )
    if config.inference.data_plane in DEVICE_PLANES:
        raise InvalidConfig(
            f'data_plane is "{config.inference.data_plane}" in [inference], which does not pass '
            "from container to container.",
            remedy='Leave data_plane out, or set it to "chunks".',
        )
    if config.inference.num_replicas > 1:
        raise InvalidConfig(
            f"num_replicas is {config.inference.num_replicas} in [inference], and compose starts "
            "one replica on a machine.",
            reason=Reason.PLAN_TOO_LARGE,
            remedy=f"Set it to 1; docs/deploy.md says how another machine adds one. {elsewhere}",
        )
    if config.train.num_nodes > 1:
        raise InvalidConfig(
            f"num_nodes is {config.train.num_nodes} in [train], and compose starts one trainer.",
            reason=Reason.PLAN_TOO_LARGE,
            remedy=f"Set it to 1. {elsewhere}",
        )
    for name, needs in needs_elsewhere(config).items():
        most = int(name in ("trainer", "inference"))
        if needs.gpus > most:
            raise InvalidConfig(
                f"{name} needs {needs.gpus} GPU{'s' * (needs.gpus > 1)}, and its container has "
                f"{'one at most' if most else 'none'}.",
                reason=Reason.PLAN_TOO_LARGE,
                remedy=f"Change its keys in the job file. {elsewhere}",
            )


def _require_files(config: JobConfig, settings: ComposeSettings) -> None:
    """Raise InvalidConfig for a file or folder of the job that is in no container."""
    for key, path in paths_in(config).items():
        if not os.path.exists(path):  # noqa: PTH110, of a folder that is closed to us too
            raise InvalidConfig(
                f"{key} names {path}, which is not in the containers, or closed to them.",
                remedy="Set CODE_DIR to the folder that has it: they see it as "
                f"{settings.code_folder}, and relative paths in the job file begin there. "
                "MODEL_DIR names a model.",
            )
        require_readable(path, key, settings.as_given(path))
    for name, path in files_in(config, settings.code_folder):
        require_readable(path, name, settings.as_given(path))


def plan_in_containers(
    config: JobConfig, host: Callable[[str], str], *, folder: Path = FOLDER
) -> LaunchPlan:
    """Return the plan of processes on machines of their own, which this one does not see.

    They reach each other at `host(name)`, with the same ports everywhere, and read CONFIG_FILE.
    Raises InvalidConfig for a job whose queue would be lost with a process's memory.
    """
    if config.store != "redis":
        raise InvalidConfig(
            'store is "memory", and such a queue is lost with its container.',
            reason=Reason.NO_REDIS,
            remedy='Set store = "redis", and give the address of a Redis that you run.',
        )
    names = [*replica_names(config), *(name for name in SETTINGS if name != "inference")]
    ports = {
        port_of(name): FIXED_PORTS[port_of(service_of(name))]
        for name in names
        for port_of in (str, rest_name)
    } | {RENDEZVOUS: RENDEZVOUS_PORT}
    layout = Layout(
        config=config,
        run_dir=RunDir(path=folder / "runs" / config.run, run_id=config.run),
        ports=ports,
        hosts={name: host(name) for name in names},
        needs=needs_elsewhere(config),
        config_file=CONFIG_FILE,
    )
    plan = layout.launch_plan()
    processes = (replace(each, command=("python", *each.command[1:])) for each in plan.processes)
    return replace(plan, processes=tuple(processes))


def plan_service(role: str, config: JobConfig, settings: ComposeSettings) -> PlannedProcess:
    """Return how the container of a service starts it; InvalidConfig where it cannot run there."""
    tables = {"train": config.train.device, "inference": config.inference.device}
    table = next((name for name, device in tables.items() if device == "cuda"), "")
    if table and not settings.gpu and role in ("trainer", "inference"):
        raise InvalidConfig(
            f'device is "cuda" in [{table}], and the container of {role} has no GPU.',
            reason=Reason.NEEDS_CUDA,
            remedy=f"Start with `docker compose -f docker-compose.yml -f {_GPU_FILE} up`, or leave "
            "device out.",
        )

    def host(name: str) -> str:
        if name == role:
            return name
        if settings.head:
            return settings.head
        return DOOR if "environment" in (role, name) else name

    process = plan_in_containers(config, host, folder=settings.folder).process(role)
    variables = dict(process.variables)
    if role == "inference" and settings.address:
        address = f"{settings.address}:{FIXED_PORTS[role]}"
        variables["DIALOOP_INFERENCE_ADVERTISED_ADDRESS"] = address
    process = replace(process, variables=variables)
    return _joining(process, config, settings) if settings.head else process


def _joining(
    process: PlannedProcess, config: JobConfig, settings: ComposeSettings
) -> PlannedProcess:
    """Return a service of a second machine, which has neither the run's folder nor its names."""
    if process.role not in _JOINS:
        raise InvalidConfig(
            f"HEAD is set, and {process.role} does not join a job that runs on another machine.",
            remedy=f"Start one of {', '.join(_JOINS)} here, with `docker compose up --no-deps`.",
        )
    if process.role == "inference":
        _require_joinable(config, settings)
    if process.role == "scorer":
        _require_reference(config)
    variables = dict(process.variables)
    variables.pop("DIALOOP_COLLECTOR_RUN_DIR", None)
    variables.pop("DIALOOP_INFERENCE_NAME", None)  # its machine and port name it then
    return replace(process, variables=variables, needs_model=False)


def _require_reference(config: JobConfig) -> None:
    """Raise InvalidConfig where a scorer would look for the tiny model of the first machine."""
    scorer = config.scorer
    loads = scorer.needs_reference and scorer.reference_server is None
    if loads and not (config.model.directory or scorer.reference_model):
        raise InvalidConfig(
            "[scorer] needs a reference model, and this machine has none.",
            remedy="Set directory in [model] to a model that both machines have, or MODEL_DIR.",
        )


def _require_joinable(config: JobConfig, settings: ComposeSettings) -> None:
    """Raise InvalidConfig where a replica would find neither the job nor its weights."""
    wanted = {
        'discovery = "registry"': config.discovery == "registry",
        'data_plane = "chunks" in [inference]': config.inference.data_plane != "shared_memory",
        "shared_folder = false in [launch]": not config.launch.shared_folder,
        "directory in [model], or MODEL_DIR": bool(config.model.directory),
        "ADDRESS, at which others reach this machine": bool(settings.address),
    }
    missing = [name for name, is_there in wanted.items() if not is_there]
    if missing:
        raise InvalidConfig(
            f"A replica that joins from another machine needs {'; '.join(missing)}.",
            remedy="Set that in the job file of both machines, or in the environment.",
        )


def become(process: PlannedProcess, config: JobConfig, environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the service, once the model that it loads is there."""
    handle, path = tempfile.mkstemp(prefix="dialoop-job-", suffix=".toml")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(toml_of(config, whole=False))
    own = {CONFIG_VARIABLE: path, **_ticket_of(process, config, environment)}
    variables = {**process.variables, **without_tokens(environment), **own}
    if process.needs_model and not config.model.directory:
        model = Path(process.variables["DIALOOP_INFERENCE_MODEL_DIR"]) / "model.safetensors"
        _wait_for(model)
    os.execvpe(process.command[0], process.command, variables)


def _ticket_of(
    process: PlannedProcess, config: JobConfig, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable with the service's ticket: that of its machine, or one signed here.

    Then the service needs no token, and has none. Only a replica has its name from the plan.
    """
    authority = authority_of(environment)
    if environment.get(TICKET) or authority is None:
        return {}
    name = process.variables.get("DIALOOP_INFERENCE_NAME", "")
    return {TICKET: authority.issue(run=config.run, role=process.role, name=name).text()}


def _wait_for(model: Path) -> None:
    """Wait until the trainer has made the tiny model, and say every half minute what for."""
    for second in itertools.count():
        if model.is_file():
            return
        if second % 30 == 0:
            sys.stdout.write(
                f"Waiting for {second} s until the trainer has made {model}. Its log says more.\n"
            )
            sys.stdout.flush()
        time.sleep(1)


def require_startable(config: JobConfig, settings: ComposeSettings) -> None:
    """Raise InvalidConfig for a job whose services could not start, or not write their files."""
    if not os.environ.get(TOKEN):
        raise InvalidConfig(
            "DIALOOP_TOKEN is not set, and the containers call each other over a network.",
            reason=Reason.TOKEN_REQUIRED,
            remedy="Set it to a long random string, in .env or with "
            "`export DIALOOP_TOKEN=$(openssl rand -hex 16)`, and start again.",
        )
    require_writable(settings.runs_folder, config.run, settings.runs)
    # Each container looks whether it has a GPU, and which machine it is on.
    anywhere = settings.model_copy(update={"gpu": True, "head": ""})
    for role in SERVICES:
        plan_service(role, config, anywhere)


def run_job(config: JobConfig, settings: ComposeSettings) -> int:
    """Let the services start, and return the job's exit code once it has ended."""
    start = {"JOB": settings.job, "CODE_DIR": settings.code, "MODEL_DIR": settings.model}
    remember_start(settings.runs_folder, start)
    mark_run(settings.runs_folder, config, run_id=config.run)
    end = trainer_end(settings.runs_folder / config.run)
    end.unlink(missing_ok=True)
    Path(tempfile.gettempdir(), _CHECKED).touch()
    trainer, collector = (f"{name}:{FIXED_PORTS[name]}" for name in ("trainer", "collector"))
    authority = authority_of(os.environ)
    assert authority is not None  # `require_startable` asks for a token
    token = partial(Proofs(authority.issue(run=config.run, role="stack")).to, "trainer")
    run_dir = settings.runs_folder / config.run
    return asyncio.run(follow(trainer, run_dir, last=collector, token=token))


def start_service(role: str, config: JobConfig, settings: ComposeSettings) -> NoReturn:
    """Become the service. The compose file starts a container again unless it ends with 0."""
    os.environ[ENDS_FOR_GOOD_VARIABLE] = "true"
    if role == "trainer":
        end = trainer_end(settings.runs_folder / config.run)
        end.unlink(missing_ok=True)
        os.environ[EXIT_REASON_VARIABLE] = str(end)
    become(plan_service(role, config, settings), config, os.environ)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the job, follow it, or become a service; 2 for a job that containers cannot run."""
    parser = argparse.ArgumentParser(description="Start a service of docker-compose.yml.")
    parser.add_argument("service", choices=(CHECK, JOB, *SERVICES))
    parser.add_argument("--print", action="store_true", help="print what would be started, and end")
    options = parser.parse_args(arguments)
    try:
        settings = load(ComposeSettings)
        config = read_job(Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_FILE), settings)
        if options.service not in (CHECK, JOB):
            if options.print:
                sys.stdout.write(plan_service(options.service, config, settings).as_shell())
                return 0
            start_service(options.service, config, settings)
        require_startable(config, settings)
        runs = settings.runs_folder / config.run
        sys.stdout.write(
            f"The job is {config.run}: {config.engine}, {config.train.loss}, "
            f"{config.train.num_steps} train steps. Its files are in {runs}.\n"
        )
        sys.stdout.flush()
        return run_job(config, settings) if options.service == JOB else 0
    except DialoopError as error:
        reason = ExitReason.of(error)
        reason.write()
        sys.stderr.write(f"dialoop compose: {reason.message}\n")
        if options.service in SERVICES and not options.print:
            reason.end()
        return reason.exit_code


if __name__ == "__main__":
    end_command(main)
