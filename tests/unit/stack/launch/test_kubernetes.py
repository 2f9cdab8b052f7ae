"""Manifests: what kubectl renders, what the schemas say, and what they take from the plan."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from dialoop.errors import InvalidConfig
from dialoop_ops.launch import kubernetes
from dialoop_ops.stack.__main__ import main
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.config.file import parse_config
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.runtime.settings import ServerSettings, load
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.trainer.settings import TrainerSettings
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

ROOT = Path(__file__).parents[4]
BASE = ROOT / "infra" / "k8s" / "base"
GPU = ROOT / "infra" / "k8s" / "overlays" / "gpu"
CUSTOM = ("JobSet", "LeaderWorkerSet")
LEADER_WORKER_SET = ROOT / "infra" / "k8s" / "schemas" / "leaderworkerset.json"
KUBERNETES = "1.34"
SETTINGS: dict[str, type[ServerSettings]] = {
    "environment": EnvironmentSettings,
    "inference": InferenceSettings,
    "replay": ReplaySettings,
    "scorer": ScorerSettings,
    "trainer": TrainerSettings,
    "collector": CollectorSettings,
}
LARGE: dict[str, Any] = {
    "run": "large",
    "train": {"device": "cuda", "num_processes": 4},
    "inference": {"num_replicas": 2, "tensor_parallel_size": 2},
    "resources": {"gpus_per_node": 8, "inference": {"processors": 8, "memory_gib": 32}},
    "launch": {"on": "kubernetes", "kubernetes": {"queue": "team", "storage_class": "nfs"}},
}
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def manifests(values: dict[str, Any]) -> list[dict[str, Any]]:
    return kubernetes.manifests_of(parse_config(values, source="job.toml"))


def render(folder: Path) -> list[dict[str, Any]]:
    words = ("kubectl", "kustomize", str(folder))
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


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


def test_the_base_is_the_demo_as_the_command_prints_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEED", raising=False)
    demo = str(ROOT / "infra" / "configs" / "demo.toml")
    assert main(["train", demo, "--on", "kubernetes", "--print"]) == 0
    assert capsys.readouterr().out == (BASE / "job.yaml").read_text("utf-8")


def require_core_schemas(objects: list[dict[str, Any]]) -> None:
    kinds = {each["kind"] for each in objects} - set(CUSTOM)
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy"} <= kinds
    for each in objects:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def require_custom_schemas(objects: list[dict[str, Any]]) -> None:
    [job_set] = [each for each in objects if each["kind"] == "JobSet"]
    require_job_set(job_set)
    replicas = [each for each in objects if each["kind"] == "LeaderWorkerSet"]
    assert replicas
    for each in replicas:
        require_leader_worker_set(each)


@needs_kubectl
@pytest.mark.parametrize("folder", [BASE, GPU], ids=["base", "gpu"])
def test_what_kubectl_renders_holds_the_schemas(folder: Path) -> None:
    objects = render(folder)
    require_core_schemas(objects)
    require_custom_schemas(objects)


def test_a_large_job_holds_the_schemas_too() -> None:
    objects = manifests(LARGE)
    require_core_schemas(objects)
    require_custom_schemas(objects)


def test_a_misspelt_field_would_be_found() -> None:
    [deployment] = [e for e in manifests(LARGE) if e["metadata"]["name"] == "replay"][1:]
    deployment["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    job_set = next(each for each in manifests(LARGE) if each["kind"] == "JobSet")
    job_set["spec"]["successPolicies"] = {}
    with pytest.raises(AssertionError):
        require_job_set(job_set)


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
    replica = next(each for each in manifests(LARGE) if each["kind"] == "LeaderWorkerSet")
    require_leader_worker_set(replica)
    *tables, key = path
    table = replica["spec"]
    for name in tables:
        table = table[name]
    table[key] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        require_leader_worker_set(replica)


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


def test_every_process_reads_the_mounted_file_and_its_variables_are_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = manifests(LARGE)
    (tmp_path / "job.toml").write_text(objects[0]["data"]["job.toml"])
    config = parse_config(tomllib.loads(objects[0]["data"]["job.toml"]), source="job.toml")
    assert config == parse_config(LARGE, source="job.toml")
    for name, pod in pods_of(objects).items():
        variables = {each["name"]: each.get("value", "a") for each in pod["containers"][0]["env"]}
        assert variables.pop("DIALOOP_CONFIG") == "/etc/dialoop/job.toml"
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            patch.setenv("DIALOOP_CONFIG", str(tmp_path / "job.toml"))
            role = name.partition("-")[0]
            settings = load(SETTINGS[role])
        assert settings.token.get_secret_value() == "a"
        if isinstance(settings, TrainerSettings):
            assert settings.exit_when_done
            assert settings.inference_addresses == [
                "inference-0.inference:7002",
                "inference-1-0.inference-1:7002",
            ]


def test_devices_memory_and_queue_are_those_of_the_plan() -> None:
    objects = manifests(LARGE)
    pods = pods_of(objects)
    assert pods["trainer"]["containers"][0]["command"][-1] == "4"
    assert pods["trainer"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    inference = pods["inference-1"]["containers"][0]
    assert inference["image"] == "dialoop-inference-gpu:latest"
    assert inference["resources"] == {
        "requests": {"cpu": "8", "memory": "32768Mi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "32768Mi", "nvidia.com/gpu": "2"},
    }
    queued = {
        each["metadata"]["name"]
        for each in objects
        if each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == "team"
    }
    assert queued == {"train", "inference", "inference-1"}


@pytest.mark.parametrize("queue", ["Team", "team_a", "-team", "a" * 64])
def test_a_queue_that_kueue_would_refuse_is_refused_at_once(queue: str) -> None:
    options = {"on": "kubernetes", "kubernetes": {"queue": queue}}
    with pytest.raises(InvalidConfig, match=r"launch\.kubernetes\.queue"):
        manifests({**LARGE, "launch": options})


@pytest.mark.parametrize("run", ["demo-", "a" * 64])
def test_a_run_that_no_label_can_carry_is_refused(run: str) -> None:
    with pytest.raises(InvalidConfig, match="no label of Kubernetes"):
        manifests({**LARGE, "run": run})


def test_no_pod_has_privileges_and_tools_reach_the_policy_alone() -> None:
    objects = manifests(LARGE)
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


def test_a_wrong_setting_ends_the_job_and_an_evicted_trainer_does_not() -> None:
    job_set = next(each for each in manifests(LARGE) if each["kind"] == "JobSet")
    rules = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2]),
        ("Ignore", None),
    ]


@needs_kubectl
def test_the_gpu_overlay_gives_engine_and_trainer_a_device_each() -> None:
    pods = pods_of(render(GPU))
    for name in ("inference", "trainer"):
        [container] = pods[name]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    device = {"name": "DIALOOP_TRAINER_DEVICE", "value": "cuda"}
    assert device in pods["trainer"]["containers"][0]["env"]
    assert pods["inference"]["containers"][0]["image"] == "dialoop-inference-gpu:latest"


def test_a_queue_in_memory_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="lost with its container"):
        manifests({**LARGE, "store": "memory"})


def test_print_writes_yaml_and_without_it_nothing_is_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text('engine = "transformers"\n')
    words = ["train", str(tmp_path / "job.toml"), "--on", "kubernetes"]
    assert main([*words, "--print"]) == 0
    kinds = [each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)]
    assert (kinds.count("Deployment"), kinds.count("LeaderWorkerSet"), kinds.count("JobSet")) == (
        4,
        1,
        1,
    )
    assert main(words) == 2
    assert "--print | kubectl apply -f -" in capsys.readouterr().err
