"""The job group for SkyPilot: what its tasks run, and what its own loader says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dialoop.errors import InvalidConfig
from dialoop_ops.launch import skypilot
from dialoop_ops.stack.__main__ import main
from dialoop_services.config.file import parse_config

SKYPILOT = "skypilot==0.14.1"
VENV = "DIALOOP_TEST_SKYPILOT_VENV"
"""Names a virtual environment that has SkyPilot already."""
CONFIG: dict[str, Any] = {
    "run": "large_1.0",
    "train": {"device": "cuda", "num_processes": 4},
    "inference": {"num_replicas": 2, "tensor_parallel_size": 2, "data_plane": "chunks"},
    "model": {"directory": "/models/base"},
    "resources": {
        "gpus_per_node": 8,
        "trainer": {"processors": 16, "memory_gib": 64},
    },
    "launch": {
        "on": "skypilot",
        "shared_folder": False,
        "skypilot": {"infra": "kubernetes", "accelerator": "A100"},
    },
}


def group_of(**values: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    header, *tasks = skypilot.job_group_of(parse_config({**CONFIG, **values}, source="job.toml"))
    return header, {task["name"]: task for task in tasks}


def test_each_process_is_a_task_with_its_resources_and_the_group_ends_with_the_trainer() -> None:
    header, tasks = group_of()
    assert header == {
        "name": "dialoop-large-1-0",
        "execution": "parallel",
        "primary_tasks": ["trainer"],
    }
    assert tasks.keys() == {
        *("environment", "inference", "inference-1", "replay", "scorer", "trainer", "collector")
    }
    resources = tasks["trainer"]["resources"]
    assert (resources["cpus"], resources["memory"]) == ("16+", "64+")
    assert (resources["accelerators"], resources["infra"]) == ("A100:4", "kubernetes")
    assert tasks["inference-1"]["resources"]["accelerators"] == "A100:2"
    assert "accelerators" not in tasks["collector"]["resources"]


def test_tasks_find_each_other_by_the_names_that_skypilot_gives() -> None:
    _, tasks = group_of()
    envs = tasks["trainer"]["envs"]
    assert envs["DIALOOP_TRAINER_REPLAY_ADDRESS"] == "replay-0.dialoop-large-1-0:7003"
    assert "inference-1-0.dialoop-large-1-0:7002" in envs["DIALOOP_TRAINER_INFERENCE_ADDRESSES"]
    assert envs["DIALOOP_TRAINER_EXIT_WHEN_DONE"] == "true"
    assert "DIALOOP_TOKEN" not in envs, "it is a secret"
    assert tasks["replay"]["secrets"] == {"DIALOOP_TOKEN": None, "DIALOOP_REPLAY_REDIS_URL": None}


def test_without_a_shared_folder_replicas_wait_for_the_trainers_weights() -> None:
    _, tasks = group_of()
    assert tasks["inference"]["envs"]["DIALOOP_INFERENCE_AWAITS_POLICY"] == "true"
    assert not any("volumes" in task for task in tasks.values())
    _, tasks = group_of(launch={"on": "skypilot"})
    assert tasks["inference"]["volumes"] == {"/var/lib/dialoop/runs": "dialoop-runs"}


@pytest.mark.parametrize(("codes", "ends_with"), [([1, 0], 0), ([-9, 2], 2)])
def test_a_task_starts_its_process_again_by_the_plans_rule(
    codes: list[int], ends_with: int, tmp_path: Path
) -> None:
    _, tasks = group_of()
    for index, code in enumerate(codes):
        text = f"exit {code}" if code >= 0 else "kill -9 $$"
        (tmp_path / f"run-{index}").write_text(text)
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/bash\ncd {tmp_path}\nfirst=$(ls run-* | head -1)\n"
        "mv $first done-$first\nbash done-$first\n"
    )
    python.chmod(0o755)
    script = tasks["replay"]["run"].replace("/tmp/dialoop-job.toml", f"{tmp_path}/job.toml")
    ended = subprocess.run(
        ["bash", "-e", "-c", script],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=60,
        check=False,
    )
    assert ended.returncode == ends_with
    assert not list(tmp_path.glob("run-*"))
    assert 'run = "large_1.0"' in (tmp_path / "job.toml").read_text()


def test_print_writes_the_group_and_without_it_the_next_command_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text('engine = "transformers"\n')
    words = ["train", str(tmp_path / "job.toml"), "--on", "skypilot"]
    assert main([*words, "--print"]) == 0
    header, *tasks = yaml.safe_load_all(capsys.readouterr().out)
    assert (header["execution"], len(tasks)) == ("parallel", 6)
    assert main(words) == 2
    assert "sky jobs launch job.yaml" in capsys.readouterr().err


def test_a_queue_in_memory_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="lost with its container"):
        group_of(store="memory")


@pytest.mark.heavy(reason="installs SkyPilot into an environment of its own")
@pytest.mark.timeout(1200)
def test_skypilots_own_loader_reads_the_group(tmp_path: Path) -> None:
    existing = os.environ.get(VENV)
    venv = Path(existing) if existing else tmp_path / "sky"
    python = str(venv / "bin" / "python")
    if not existing:
        subprocess.run((sys.executable, "-m", "venv", str(venv)), check=True)
        words = ("-m", "pip", "install", "--quiet", SKYPILOT)
        installed = subprocess.run((python, *words), capture_output=True, text=True, check=False)
        assert installed.returncode == 0, installed.stderr[-500:]
    (tmp_path / "job.yaml").write_text(skypilot.text_of(parse_config(CONFIG, source="job.toml")))
    program = (
        "from sky.utils import dag_utils\n"
        "secrets = [('DIALOOP_TOKEN', 't'), ('DIALOOP_REPLAY_REDIS_URL', 'redis://r')]\n"
        "dag = dag_utils.load_dag_from_yaml('job.yaml', secrets_overrides=secrets)\n"
        "print(dag.is_job_group(), dag.primary_tasks, *(task.name for task in dag.tasks))\n"
    )
    answer = subprocess.run(
        (python, "-c", program),
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout.splitlines()[-1] == (
        "True ['trainer'] environment inference inference-1 replay scorer trainer collector"
    )
