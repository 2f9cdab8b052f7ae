"""Write a job as SkyPilot's job group, from the launch plan: one task for each process.

The group ends with the trainer. Tasks find each other by the names that SkyPilot gives them.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from dialoop_ops.launch.elsewhere import FOLDER, job_file, plan_elsewhere
from dialoop_ops.launch.yaml_text import yaml_of

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig

    from dialoop_ops.launch.plan import PlannedProcess

_CONFIG_FILE = "/tmp/dialoop-job.toml"
_END = "END_OF_JOB_FILE"


def job_group_of(config: JobConfig) -> list[dict[str, Any]]:
    """Return the header and the tasks."""
    name = re.sub(r"[^A-Za-z0-9-]", "-", f"dialoop-{config.run}").lower()
    plan = plan_elsewhere(config, lambda task: f"{task}-0.{name}", config_file=_CONFIG_FILE)
    header = {"name": name, "execution": "parallel", "primary_tasks": ["trainer"]}
    return [header, *(_task(config, process) for process in plan.processes)]


def text_of(config: JobConfig) -> str:
    """Return the file for `sky jobs launch`."""
    return yaml_of(job_group_of(config))


def _task(config: JobConfig, process: PlannedProcess) -> dict[str, Any]:
    options, needs = config.launch.skypilot, process.needs
    resources: dict[str, Any] = {
        "cpus": f"{needs.processors or 1}+",
        **({"memory": f"{needs.memory_gib:g}+"} if needs.memory_gib else {}),
        **({"accelerators": f"{options.accelerator}:{needs.gpus}"} if needs.gpus else {}),
        **({"infra": options.infra} if options.infra else {}),
        # Only a lost machine, and not a wrong setting, is worth another one.
        "job_recovery": {"max_restarts_on_errors": 0},
    }
    secrets = {"DIALOOP_TOKEN": None}
    if process.role == "replay":
        secrets["DIALOOP_REPLAY_REDIS_URL"] = None
    volumes = {str(FOLDER / "runs"): options.volume} if config.launch.shared_folder else {}
    return {
        "name": process.name,
        "resources": resources,
        **({"volumes": volumes} if volumes else {}),
        "envs": dict(process.variables),
        "secrets": secrets,
        "setup": "\n".join(options.setup) + "\n",
        "run": _script(config, process),
    }


def _script(config: JobConfig, process: PlannedProcess) -> str:
    """Return what runs the process by its restart rule, once the model is there."""
    rule = process.restart
    model = FOLDER / "runs" / config.run / "model" / "model.safetensors"
    is_made = process.needs_model and not config.model.directory
    fatal = " || ".join(f"[ $code -eq {code} ]" for code in (0, *rule.fatal_exit_codes))
    return "\n".join(
        (
            f"cat > {_CONFIG_FILE} <<'{_END}'",
            f"{job_file(config)}{_END}",
            *((f"until [ -f {model} ]; do sleep 1; done",) if is_made else ()),
            f"wait_s={max(1, round(rule.first_wait_s))}",
            "while true; do",
            f"  {shlex.join(process.command)} && code=0 || code=$?",
            f"  if {fatal}; then exit $code; fi",
            "  sleep $wait_s",
            f"  wait_s=$((wait_s * 2 < {rule.max_wait_s:g} ? wait_s * 2 : {rule.max_wait_s:g}))",
            "done",
            "",
        )
    )
