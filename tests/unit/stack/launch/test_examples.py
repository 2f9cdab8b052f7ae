"""The examples for Kubernetes and SkyPilot, beside the demo's launch plan and the schemas."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from dialoop_ops.cli.main import main
from dialoop_ops.launch.compose import plan_in_containers
from dialoop_ops.launch.plan import PlannedProcess
from dialoop_ops.stack.layout import FIXED_PORTS
from dialoop_services.config.file import load_config, parse_config
from dialoop_services.config.job import JobConfig
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
    TrainerV1alpha1TrainingRuntime,
)

from tests.support.containers import targets

ROOT = Path(__file__).parents[4]
BASE = ROOT / "infra" / "k8s" / "base"
GPU = ROOT / "infra" / "k8s" / "overlays" / "gpu"
NODES = ROOT / "infra" / "k8s" / "overlays" / "nodes"
TARGETS = targets()
SKYPILOT = ROOT / "infra" / "skypilot" / "job.yaml"
CUSTOM = ("JobSet", "LeaderWorkerSet")
LEADER_WORKER_SET = ROOT / "infra" / "k8s" / "schemas" / "leaderworkerset.json"
KUBERNETES = "1.34"
SKYPILOT_PACKAGE = "skypilot==0.14.1"
VENV = "DIALOOP_TEST_SKYPILOT_VENV"
"""Names a virtual environment that has SkyPilot already."""
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def demo() -> JobConfig:
    return load_config(ROOT / "infra" / "configs" / "demo.toml", environment={})


def processes(host: Callable[[str], str]) -> dict[str, PlannedProcess]:
    return {each.name: each for each in plan_in_containers(demo(), host).processes}


def variables_of(process: PlannedProcess, job_file: str) -> dict[str, str]:
    """Those of the plan; the trainer ends with the job, since nobody else would end it."""
    own = {"DIALOOP_TRAINER_EXIT_WHEN_DONE": "true"} if process.role == "trainer" else {}
    return dict(process.variables) | own | {"DIALOOP_CONFIG": job_file}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod of each process."""
    pods = {}
    for each in objects:
        spec, name = each.get("spec", {}), each["metadata"]["name"]
        if each["kind"] == "Deployment":
            pods[name] = spec["template"]["spec"]
        elif each["kind"] == "LeaderWorkerSet":
            pods[name] = spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        elif each["kind"] == "JobSet":
            job = spec["replicatedJobs"][0]["template"]["spec"]
            pods["trainer"] = job["template"]["spec"]
    return pods


def host_in_kubernetes(name: str) -> str:
    """A LeaderWorkerSet names its pod after the set and a number, under a service of its own."""
    return f"{name}-0.{name}" if name.startswith("inference") else name


def test_the_pods_of_the_example_are_the_processes_of_the_plan() -> None:
    planned = processes(host_in_kubernetes)
    pods = pods_of(documents(BASE / "job.yaml"))
    assert pods.keys() == planned.keys()
    for name, pod in pods.items():
        [container], process = pod["containers"], planned[name]
        assert container["image"] == f"dialoop-{process.role}:latest"
        assert container["command"] == list(process.command)
        own = {"name": "DIALOOP_TOKEN", "valueFrom": {"secretKeyRef": secret("token")}}
        plain = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        assert plain == variables_of(process, "/etc/dialoop/job.toml")
        assert own in container["env"]
        ports = [each["containerPort"] for each in container["ports"]]
        assert ports == [FIXED_PORTS[process.role], FIXED_PORTS[f"{process.role}_rest"]]
        assert pod["terminationGracePeriodSeconds"] == process.stop_grace_s
        assert ("initContainers" in pod) == process.needs_model
        probe = container["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == process.hang_timeout_s
    [replay] = pods["replay"]["containers"]
    redis = {"name": "DIALOOP_REPLAY_REDIS_URL", "valueFrom": {"secretKeyRef": secret("redis_url")}}
    assert redis in replay["env"]


def secret(key: str) -> dict[str, str]:
    return {"name": "dialoop", "key": key}


def test_a_service_of_the_example_has_the_name_and_ports_at_which_others_look_for_it() -> None:
    objects = documents(BASE / "job.yaml")
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    planned = processes(host_in_kubernetes)
    assert services.keys() == planned.keys() - {"inference"}
    for name, service in services.items():
        assert planned[name].address == f"{name}:{service['spec']['ports'][0]['port']}"
        assert planned[name].rest_address == f"{name}:{service['spec']['ports'][1]['port']}"


def test_the_job_file_of_both_examples_is_the_demos() -> None:
    written_out = demo().model_copy(update={"preset": ""})
    config = documents(BASE / "job.yaml")[0]["data"]["job.toml"]
    assert parse_config(tomllib.loads(config), source="job.toml") == written_out
    for task in documents(SKYPILOT)[1:]:
        text = re.search("<<'END_OF_JOB_FILE'\n(.*)END_OF_JOB_FILE\n", task["run"], re.DOTALL)
        assert text is not None
        assert parse_config(tomllib.loads(text[1]), source="job.toml") == written_out


def test_a_wrong_setting_ends_the_job_and_an_evicted_trainer_does_not() -> None:
    job_set = next(e for e in documents(BASE / "job.yaml") if e["kind"] == "JobSet")
    rules = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    fatal = processes(host_in_kubernetes)["trainer"].restart.fatal_exit_codes
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", list(fatal)),
        ("Ignore", None),
    ]


def test_no_pod_has_privileges_and_tools_reach_the_policy_alone() -> None:
    objects = documents(BASE / "job.yaml")
    for pod in pods_of(objects).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    [sandbox] = [each for each in objects if each["metadata"]["name"] == "sandbox"]
    assert sandbox["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == (
        "environment"
    )
    first, names = sandbox["spec"]["egress"]
    assert first["to"][0]["podSelector"]["matchLabels"]["dialoop/role"] == "inference"
    assert [each["port"] for each in (*first["ports"], *names["ports"])] == [7002, 53, 53]


def render(folder: Path) -> list[dict[str, Any]]:
    words = ("kubectl", "kustomize", str(folder))
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


def require_schemas(objects: list[dict[str, Any]]) -> None:
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy", *CUSTOM} <= {
        each["kind"] for each in objects
    }
    for each in objects:
        if each["kind"] == "JobSet":
            require_job_set(each)
        elif each["kind"] == "LeaderWorkerSet":
            require_leader_worker_set(each)
        else:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def require_leader_worker_set(replica: dict[str, Any]) -> None:
    """Our schema of its own fields, and that of Kubernetes for the pods."""
    jsonschema.validate(replica, json.loads(LEADER_WORKER_SET.read_text("utf-8")))
    pods = replica["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "replica"}}
    kubernetes_validate.validate({**head, "template": pods}, KUBERNETES, strict=True)


def require_job_set(job_set: dict[str, Any]) -> None:
    """Kubeflow's models of a JobSet know every field, down to those of its pods' containers."""
    model = JobsetV1alpha2JobSet.from_dict(job_set)
    assert model is not None
    read_back, ours = model.to_dict()["spec"], job_set["spec"]
    assert read_back.keys() == ours.keys(), "an unknown field is dropped by the model"
    assert read_back["successPolicy"] == ours["successPolicy"]
    assert read_back["failurePolicy"] == ours["failurePolicy"]
    [ours], [job] = ours["replicatedJobs"], read_back["replicatedJobs"]
    assert job.keys() == ours.keys()
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "trainer"}}
    kubernetes_validate.validate(
        {**head, "spec": ours["template"]["spec"]}, KUBERNETES, strict=True
    )


def test_the_example_holds_the_schemas() -> None:
    require_schemas(documents(BASE / "job.yaml"))


@needs_kubectl
@pytest.mark.parametrize("folder", [BASE, GPU], ids=["base", "gpu"])
def test_what_kubectl_renders_holds_the_schemas(folder: Path) -> None:
    require_schemas(render(folder))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("replica",), 1),
        (("leaderWorkerTemplate", "size"), 0),
        (("leaderWorkerTemplate", "restartPolicy"), "Always"),
        (("leaderWorkerTemplate", "workerTemplates"), {}),
        (("leaderWorkerTemplate", "workerTemplate", "spec", "container"), []),
    ],
)
def test_a_mistake_in_a_leader_worker_set_would_be_found(path: tuple[str, ...], value: Any) -> None:
    replica = next(e for e in documents(BASE / "job.yaml") if e["kind"] == "LeaderWorkerSet")
    *tables, key = path
    table = replica["spec"]
    for name in tables:
        table = table[name]
    table[key] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        require_leader_worker_set(replica)


@needs_kubectl
def test_the_gpu_overlay_gives_engine_and_trainer_a_device_each() -> None:
    pods = pods_of(render(GPU))
    for name in ("inference", "trainer"):
        [container] = pods[name]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    device = {"name": "DIALOOP_TRAINER_DEVICE", "value": "cuda"}
    assert device in pods["trainer"]["containers"][0]["env"]
    assert pods["inference"]["containers"][0]["image"] == "dialoop-inference-gpu:latest"


def test_the_train_job_starts_the_plans_trainer_on_each_of_its_nodes() -> None:
    runtime, job = documents(NODES / "train.yaml")
    [nodes] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    train = {"num_nodes": 2, "num_processes": 8}
    config = demo()
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    at = f"{job['metadata']['name']}-{nodes['name']}-0-0.{job['metadata']['name']}"

    def host(name: str) -> str:
        return at if name == "trainer" else host_in_kubernetes(name)

    process = plan_in_containers(config, host).process("trainer")
    assert job["spec"]["trainer"]["numNodes"] == process.num_nodes == 2
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    pod = nodes["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    line = f'exec {shlex.join(process.command)} --node "$JOB_COMPLETION_INDEX"'
    assert container["command"] == ["sh", "-c", line]
    plain = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    on_gpus = {"DIALOOP_TRAINER_DEVICE": "cuda"}
    assert plain == variables_of(process, "/etc/dialoop/job.toml") | on_gpus
    assert container["resources"]["limits"] == {"nvidia.com/gpu": str(train["num_processes"])}
    rules = nodes["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == list(process.restart.fatal_exit_codes)
    for model, ours in ((TrainerV1alpha1TrainingRuntime, runtime), (TrainerV1alpha1TrainJob, job)):
        read_back = model.from_dict(ours)
        assert read_back is not None
        require_all_of(ours, read_back.to_dict())


def require_all_of(ours: Any, read_back: Any) -> None:
    """Kubeflow's models drop fields that they do not know."""
    if isinstance(ours, dict):
        assert ours.keys() <= read_back.keys()
        for key, value in ours.items():
            require_all_of(value, read_back[key])
    elif isinstance(ours, list):
        for one, other in zip(ours, read_back, strict=True):
            require_all_of(one, other)
    else:
        assert ours == read_back


@needs_kubectl
def test_the_overlay_of_nodes_has_a_train_job_in_place_of_the_job_set() -> None:
    objects = {(each["kind"], each["metadata"]["name"]): each for each in render(NODES)}
    kinds = {kind for kind, _ in objects}
    assert "TrainJob" in kinds
    assert "JobSet" not in kinds
    service = objects[("Service", "trainer")]["spec"]["selector"]
    assert service["batch.kubernetes.io/job-completion-index"] == "0"


def test_the_tasks_of_skypilots_example_are_the_processes_of_the_plan() -> None:
    header, *tasks = documents(SKYPILOT)
    assert (header["execution"], header["primary_tasks"]) == ("parallel", ["trainer"])
    planned = processes(lambda name: f"{name}-0.{header['name']}")
    assert {task["name"] for task in tasks} == planned.keys()
    for task in tasks:
        process = planned[task["name"]]
        assert task["envs"] == variables_of(process, "/tmp/dialoop-job.toml")
        assert f"  {' '.join(process.command)} && code=0 || code=$?\n" in task["run"]
        waits = f"until [ -f {process.variables.get('DIALOOP_INFERENCE_MODEL_DIR')}/model"
        assert (waits in task["run"]) == process.needs_model
        redis = {"DIALOOP_REPLAY_REDIS_URL": None} if process.role == "replay" else {}
        assert task["secrets"] == {"DIALOOP_TOKEN": None, **redis}


def test_a_task_of_skypilots_example_installs_what_the_image_of_its_service_has() -> None:
    of_image = TARGETS["inference"].all_of("RUN")
    locked = "pip install --no-deps --require-hashes -r "
    lists = [f"{locked}locked/torch.txt -r locked/cuda.txt", f"{locked}locked/inference.txt"]
    assert all(any(text.endswith(each) for text in of_image) for each in lists)
    for task in documents(SKYPILOT)[1:]:
        is_engine = task["name"] == "inference"
        first = [each.replace("-r ", "-r ~/") for each in lists]
        ours = f'"dialoop-services[{task["name"]}]" dialoop-extras'
        installs = [line for line in task["setup"].splitlines() if line.startswith("pip ")]
        last = f"pip install --find-links ~/wheels {ours}"
        assert installs == [*(first if is_engine else ()), last]
        copied = {"~/locked": "./infra/requirements/locked"} if is_engine else {}
        assert task["file_mounts"] == {"~/wheels": "./wheels", **copied}


@pytest.mark.parametrize(("codes", "ends_with"), [([1, 0], 0), ([-9, 2], 2)])
def test_a_task_starts_its_process_again_by_the_plans_rule(
    codes: list[int], ends_with: int, tmp_path: Path
) -> None:
    for index, code in enumerate(codes):
        text = f"exit {code}" if code >= 0 else "kill -9 $$"
        (tmp_path / f"run-{index}").write_text(text)
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/bash\ncd {tmp_path}\nfirst=$(ls run-* | head -1)\n"
        "mv $first done-$first\nbash done-$first\n"
    )
    python.chmod(0o755)
    replay = next(task for task in documents(SKYPILOT) if task["name"] == "replay")
    script = replay["run"].replace("/tmp/dialoop-job.toml", f"{tmp_path}/job.toml")
    ended = subprocess.run(
        ["bash", "-e", "-c", script],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=60,
        check=False,
    )
    assert ended.returncode == ends_with
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.heavy(reason="installs SkyPilot into an environment of its own")
@pytest.mark.timeout(1200)
def test_skypilots_own_loader_reads_the_example(tmp_path: Path) -> None:
    existing = os.environ.get(VENV)
    venv = Path(existing) if existing else tmp_path / "sky"
    python = str(venv / "bin" / "python")
    if not existing:
        subprocess.run((sys.executable, "-m", "venv", str(venv)), check=True)
        words = ("-m", "pip", "install", "--quiet", SKYPILOT_PACKAGE)
        installed = subprocess.run((python, *words), capture_output=True, text=True, check=False)
        assert installed.returncode == 0, installed.stderr[-500:]
    program = (
        "from sky.utils import dag_utils\n"
        "secrets = [('DIALOOP_TOKEN', 't'), ('DIALOOP_REPLAY_REDIS_URL', 'redis://r')]\n"
        f"dag = dag_utils.load_dag_from_yaml({str(SKYPILOT)!r}, secrets_overrides=secrets)\n"
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
        "True ['trainer'] environment inference replay scorer trainer collector"
    )


@pytest.mark.parametrize(
    ("where", "folder"), [("kubernetes", "infra/k8s"), ("skypilot", "infra/skypilot")]
)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--on", "{}"], ""),
        (["--on", "{}", "--print"], ""),
        ([], 'launch = {{ on = "{}" }}'),
        ([], "[launch.{}]\n"),
    ],
)
def test_what_dialoop_does_not_start_ends_with_one_error_that_names_the_example(
    where: str,
    folder: str,
    words: list[str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "job.toml").write_text(textwrap.dedent(text.format(where)))
    assert main(["train", str(tmp_path / "job.toml"), *(w.format(where) for w in words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{folder} in its repository" in error
    assert (ROOT / folder).is_dir()


def test_another_launcher_is_refused_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").touch()
    assert main(["train", str(tmp_path / "job.toml"), "--on", "slrum"]) == 2
    assert "'local', 'ray' or 'slurm'" in capsys.readouterr().err
