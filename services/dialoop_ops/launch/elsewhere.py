"""Make the launch plan of machines that this process does not see: in containers, or of a cloud.

Every process has a name under which the others reach it, the same ports everywhere, and reads the
job file that is mounted into it. The job is over when the trainer ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.config.file import toml_value
from pydantic import BaseModel

from dialoop_ops.launch.plan import LaunchPlan, PlannedProcess
from dialoop_ops.stack.devices import needs_elsewhere
from dialoop_ops.stack.layout import FIXED_PORTS, Layout, replica_names, rest_name
from dialoop_ops.stack.run_dir import RunDir

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig

FOLDER = Path("/var/lib/dialoop")
"""Where the containers have the runs: infra/docker/Dockerfile makes it."""
CONFIG_FILE = "/etc/dialoop/job.toml"


def plan_elsewhere(
    config: JobConfig,
    host: Callable[[str], str],
    *,
    config_file: str = CONFIG_FILE,
    folder: Path = FOLDER,
) -> LaunchPlan:
    """Return the plan whose processes reach each other at `host(name)` and read `config_file`.

    Runs are in `folder`/runs. Raises InvalidConfig for a job whose queue would be lost with a
    process's memory, or that needs files of this machine.
    """
    if config.store != "redis":
        raise InvalidConfig(
            'store is "memory", and such a queue is lost with its container.',
            reason=Reason.NO_REDIS,
            remedy='Set store = "redis", and give the address of a Redis that you run.',
        )
    replicas = replica_names(config)
    names = ("environment", *replicas, "replay", "scorer", "trainer", "collector")
    ports = {name: FIXED_PORTS["inference" if name in replicas else name] for name in names}
    rest = {
        rest_name(name): FIXED_PORTS[rest_name("inference" if name in replicas else name)]
        for name in names
    }
    layout = Layout(
        config=config,
        run_dir=RunDir(path=folder / "runs" / config.run, run_id=config.run),
        ports=ports | rest,
        hosts={name: host(name) for name in names},
        needs=needs_elsewhere(config),
        config_file=config_file,
        redis_url="from the secret",
    )
    plan = layout.launch_plan()
    return replace(plan, processes=tuple(map(_for_containers, plan.processes)))


def _for_containers(process: PlannedProcess) -> PlannedProcess:
    """Return the process as a container starts it: its Python, and a trainer that ends."""
    variables = dict(process.variables)
    variables.pop("DIALOOP_REPLAY_REDIS_URL", None)
    if process.role == "trainer":
        variables["DIALOOP_TRAINER_EXIT_WHEN_DONE"] = "true"
    return replace(process, command=("python", *process.command[1:]), variables=variables)


def job_file(config: JobConfig) -> str:
    """Return a job file with what differs from the defaults; values of a preset are written out."""
    plain = config.model_copy(update={"preset": ""})
    return "\n".join(_lines(plain, "")).strip() + "\n"


def _lines(section: BaseModel, path: str) -> list[str]:
    """Return the section's keys, then the sections inside it, in the order that TOML needs."""
    lines, inside = [], []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value == field.get_default(call_default_factory=True):
            continue
        if isinstance(value, BaseModel):
            table = f"{path}.{name}" if path else name
            below = _lines(value, table)
            inside += (["", f"[{table}]"] if below[0][:1] not in ("", "[") else []) + below
        else:
            plain = section.model_dump(mode="json", include={name}, exclude_defaults=True)[name]
            lines.append(f"{name} = {toml_value(plain)}")
    return lines + inside
