"""The launch plan of a job: every process's command and variables, and what waits for what."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialoop_ops.launch.plan import LaunchPlan, Needs
from dialoop_ops.stack.devices import Node, plan_devices
from dialoop_ops.stack.layout import (
    SETTINGS,
    STOP_ORDER,
    Layout,
    replica_names,
    rest_name,
)
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.config.file import load_config, parse_config
from dialoop_services.runtime.exit_reason import CONFIG_ERROR

ROOT = Path(__file__).parents[4]
CASES: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "goldens" / "local_processes.json").read_text("utf-8")
)
SERVICES = ("environment", "inference", "replay", "scorer", "trainer", "collector")
PORTS = {name: 7001 + index for index, name in enumerate(SERVICES)} | {"inference": 7010}
PORTS |= {rest_name(name): port + 1000 for name, port in PORTS.items()}
PORTS |= {"redis": 7000, "console": 7099}


def layout_of(case: dict[str, Any]) -> Layout:
    if "file" in case:
        config = load_config(ROOT / case["file"], environment={})
    else:
        config = parse_config(case["config"], source="job.toml")
    node = Node(gpus=tuple(map(str, range(case.get("gpus", 0)))))
    devices = plan_devices(config, (node,)).processes
    replicas = {name: 7010 + index for index, name in enumerate(replica_names(config))}
    return Layout(
        config=config,
        run_dir=RunDir(path=Path("/runs/golden"), run_id="golden-1"),
        ports=PORTS | replicas | {rest_name(name): port + 1000 for name, port in replicas.items()},
        redis_url="redis://127.0.0.1:7000/0" if config.store == "redis" else "",
        redis_program="/usr/bin/redis-server" if config.store == "redis" else "",
        devices={each.name: each.variables for each in devices},
        needs={each.name: each.needs for each in devices},
    )


def plan_of(case: dict[str, Any]) -> LaunchPlan:
    return layout_of(case).launch_plan()


@pytest.mark.parametrize("name", CASES)
def test_every_process_of_the_local_stack_gets_the_variables_that_it_always_got(name: str) -> None:
    layout = layout_of(CASES[name])
    specs = {service: layout.spec(service) for service in layout.services}
    started = {
        service: {
            "command": ["python", *spec.command[1:]],
            "variables": dict(spec.environment),
            "address": spec.address,
            "rest_address": spec.rest_address,
            "ready_timeout_s": spec.ready_timeout_s,
            "hang_timeout_s": spec.hang_timeout_s,
            "stop_grace_s": spec.stop_grace_s,
            "stop_rank": spec.stop_rank,
        }
        for service, spec in specs.items()
    }
    assert started == CASES[name]["processes"]


@pytest.mark.parametrize("name", CASES)
def test_a_process_reads_the_very_job_from_the_file_of_its_run(name: str, tmp_path: Path) -> None:
    layout = layout_of(CASES[name])
    layout = replace(layout, run_dir=RunDir(path=tmp_path, run_id="golden-1"))
    layout.write_job()
    file = str(tmp_path / "job.toml")
    plain = layout.config.model_copy(update={"preset": ""})  # whose values the file has
    assert load_config(Path(file), environment={}) == plain
    for process in layout.launch_plan().processes[layout.redis_program != "" :]:
        assert process.variables["DIALOOP_CONFIG"] == file
        prefix = f"DIALOOP_{process.role.upper()}_"
        keys = {name.removeprefix(prefix).lower() for name in process.variables}
        # What a replica has of its own, beside what it is to make of the job.
        assert keys & SETTINGS[process.role].job_paths().keys() <= {"run", "seed"}


@pytest.mark.parametrize("name", CASES)
def test_what_the_supervisor_starts_is_what_the_plan_says(name: str) -> None:
    layout = layout_of(CASES[name])
    for process in layout.launch_plan().processes:
        if process.role == "redis":
            continue  # its spec makes a folder; the next test has its command
        spec = layout.spec(process.name)
        assert (spec.command, dict(spec.environment)) == (process.command, dict(process.variables))
        assert (spec.restart, spec.stop_rank) == (process.restart, process.stop_rank)


def test_redis_is_the_first_process_of_the_plan_and_reaches_no_further_than_its_machine() -> None:
    redis = plan_of(CASES["demo"]).processes[0]
    assert redis.command[:5] == ("/usr/bin/redis-server", "--bind", "127.0.0.1", "--port", "7000")
    assert redis.stop_rank == len(STOP_ORDER) - 1
    assert "redis" not in {each.name for each in plan_of({"config": {"store": "memory"}}).processes}


def test_processes_wait_for_those_that_they_call_when_they_start() -> None:
    plan = plan_of(CASES["two replicas of a registry"])
    after = {process.name: process.after for process in plan.processes}
    assert after == {
        "redis": (),
        "environment": (),
        "inference": (),
        "inference-1": (),
        "replay": ("redis",),
        "scorer": ("replay", "environment", "trainer", "inference", "inference-1"),
        "trainer": (),
        "collector": ("scorer",),
    }
    assert {each.name for each in plan.processes if each.needs_model} == {
        "inference",
        "inference-1",
    }


def test_the_plan_says_what_each_process_needs() -> None:
    plan = plan_of(CASES["eight GPUs, four ranks"])
    assert plan.process("trainer").needs == Needs(gpus=4)
    assert plan.process("inference-1").needs == Needs(gpus=2, processors=8, memory_gib=32)
    assert plan.process("replay").needs == Needs()


def test_a_mistake_in_the_settings_ends_a_job_and_anything_else_is_tried_again() -> None:
    for process in plan_of(CASES["demo"]).processes:
        assert process.restart.fatal_exit_codes == (CONFIG_ERROR,)
        assert process.restart.max_failures_to_start == 2


def test_commands_run_the_python_of_the_stack() -> None:
    for process in plan_of(CASES["demo"]).processes[1:]:
        assert process.command[:2] == (sys.executable, "-m")
