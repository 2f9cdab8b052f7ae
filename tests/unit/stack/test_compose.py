from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.config.file import load_config
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.runtime.logs import LogSettings
from dialoop_services.runtime.relay import Passage
from dialoop_services.runtime.settings import ServerSettings, load
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.stack.layout import Layout, rest_name
from dialoop_services.stack.processes.child import ServiceSpec
from dialoop_services.stack.run_dir import RunDir
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.containers import ROOT, MissingVariable, compose_file, interpolate, targets

SETTINGS: dict[str, type[ServerSettings]] = {
    "environment": EnvironmentSettings,
    "inference": InferenceSettings,
    "inference-gpu": InferenceSettings,
    "replay": ReplaySettings,
    "scorer": ScorerSettings,
    "trainer": TrainerSettings,
    "collector": CollectorSettings,
}
OURS = [*SETTINGS, "door", "model"]
COMPOSE = compose_file(DIALOOP_TOKEN="secret")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
TARGETS = targets()

# What containers have of their own: where they listen, find each other and keep files.
PLACES = {"host", "port", "rest_port", "token", "run", "run_dir", "model_dir", "weights_root"}
PLACES |= {"worker", "redis_url", "replay_address", "environment_address"}
PLACES |= {"inference_address", "inference_addresses", "name"}
PLACES |= {"tiny_model_seed"}  # the service `model` makes it, before the others


def settings_in(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], kind: type[ServerSettings]
) -> ServerSettings:
    for name in [name for name in os.environ if name.startswith("DIALOOP_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load(kind)


def spec_of(service: str) -> ServiceSpec:
    config = load_config(ROOT / "infra" / "configs" / "demo.toml", environment={})
    run_dir = RunDir(path=Path("runs/demo"), run_id="demo")
    ports = {name: 1 for service in SETTINGS for name in (service, rest_name(service))}
    layout = Layout(config=config, run_dir=run_dir, ports=ports, redis_url="redis://127.0.0.1:1/0")
    return layout.spec(service.partition("-")[0])


def listens(service: str, door: str = "PORT") -> int:
    variables = SERVICES[service]["environment"]
    return int(variables[f"DIALOOP_{service.partition('-')[0].upper()}_{door}"])


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_of_a_container_is_a_setting(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(monkeypatch, SERVICES[service]["environment"], SETTINGS[service])
    prefix = SETTINGS[service].model_config["env_prefix"]
    tokens = {"DIALOOP_TOKEN", "DIALOOP_ADMIN_TOKEN"}
    shared = {*tokens, *(f"DIALOOP_{name.upper()}" for name in LogSettings.model_fields)}
    others = {n for n in SERVICES[service]["environment"] if not n.startswith(prefix)}
    assert others <= shared
    assert settings.token.get_secret_value() == "secret"


def test_a_misspelt_variable_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SERVICES["replay"]["environment"] | {"DIALOOP_REPLAY_STOR": "redis"}
    with pytest.raises(InvalidConfig, match="did you mean DIALOOP_REPLAY_STORE"):
        settings_in(monkeypatch, wrong, ReplaySettings)


@pytest.mark.parametrize("service", [name for name in SETTINGS if name != "inference-gpu"])
def test_a_container_is_told_what_the_demo_tells_the_embedded_service(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = settings_in(monkeypatch, SERVICES[service]["environment"], SETTINGS[service])
    variables = spec_of(service).environment
    theirs = settings_in(monkeypatch, variables, SETTINGS[service])
    assert ours.model_dump(exclude=PLACES) == theirs.model_dump(exclude=PLACES)


def test_without_a_token_nothing_starts() -> None:
    with pytest.raises(MissingVariable, match="DIALOOP_TOKEN"):
        compose_file()


@pytest.mark.parametrize("service", [*OURS, "redis"])
def test_containers_have_no_privileges(service: str) -> None:
    container = SERVICES[service]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert container["user"] not in ("", "root", "0", "0:0")
    assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & container.keys()


def test_ports_are_published_on_loopback_only() -> None:
    published = {p for c in SERVICES.values() for p in c.get("ports", [])}
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in published)
    grpc = {"environment": 7001, "inference": 7002, "replay": 7003, "scorer": 7004, "trainer": 7005}
    assert {name: listens(name) for name in grpc} == grpc
    rest = {name: port + 1000 for name, port in grpc.items()}
    assert {name: listens(name, "REST_PORT") for name in grpc} == rest
    both = {*grpc.values(), *rest.values()}
    assert published == {f"127.0.0.1:{port}:{port}" for port in both}
    assert "ports" not in SERVICES["redis"]


@pytest.mark.parametrize("service", SETTINGS)
def test_published_ports_are_those_the_service_listens_on(service: str) -> None:
    variables = SERVICES[service]["environment"]
    open_ports = {value for name, value in variables.items() if name.endswith("_PORT")}
    published = {port.rpartition(":")[2] for port in SERVICES[service].get("ports", [])}
    assert published <= open_ports


def passages() -> dict[int, tuple[str, int]]:
    """Where each port of the door leads."""
    words = SERVICES["door"]["command"]
    assert words[:3] == ["python", "-m", "dialoop_services.runtime.relay"]
    passages = [Passage.parse(word) for word in words[3:]]
    return {passage.port: (passage.target_host, passage.target_port) for passage in passages}


def test_the_sandbox_has_no_way_out_but_the_door_and_that_to_the_policy_alone() -> None:
    assert SERVICES["environment"]["networks"] == ["sandbox"]
    assert "ports" not in SERVICES["environment"]  # they would not be published from there
    assert COMPOSE["networks"]["sandbox"]["internal"] is True
    environment = SERVICES["environment"]["environment"]
    doors = {int(v) for name, v in environment.items() if name.endswith("_PORT")}
    assert SERVICES["door"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in sorted(doors)]
    policy = listens("inference")
    into = {port: ("environment", port) for port in doors}
    assert passages() == {**into, policy: ("inference", policy)}


def test_only_replay_reaches_redis() -> None:
    assert COMPOSE["networks"]["store"]["internal"] is True
    assert [n for n, c in SERVICES.items() if "store" in c.get("networks", [])] == [
        "redis",
        "replay",
    ]


def addresses() -> list[tuple[str, str]]:
    addresses = []
    for name in SETTINGS:
        for variable, value in SERVICES[name]["environment"].items():
            if variable.endswith("_ADDRESS"):
                addresses.append((name, value))
            if variable.endswith("_ADDRESSES"):
                addresses.extend((name, address) for address in json.loads(value))
    return addresses


@pytest.mark.parametrize(("service", "address"), addresses())
def test_an_address_is_a_service_on_a_common_network(service: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    assert (passages()[int(port)][1] if host == "door" else listens(host)) == int(port)
    assert set(SERVICES[service]["networks"]) & set(SERVICES[host]["networks"])


@pytest.mark.parametrize("service", ["environment", "scorer", "trainer", "inference"])
def test_whoever_has_a_model_dir_has_the_model_that_is_served(service: str) -> None:
    model_dir = SERVICES[service]["environment"][f"DIALOOP_{service.upper()}_MODEL_DIR"]
    assert model_dir == SERVICES["inference"]["environment"]["DIALOOP_INFERENCE_MODEL_DIR"]
    assert f"model:{model_dir}:ro" in SERVICES[service]["volumes"]


def test_inference_reads_the_policies_where_the_trainer_writes_them() -> None:
    trainer, inference = SERVICES["trainer"], SERVICES["inference"]
    run_dir = trainer["environment"]["DIALOOP_TRAINER_RUN_DIR"]
    policies = inference["environment"]["DIALOOP_INFERENCE_WEIGHTS_ROOT"]
    assert policies == f"{run_dir}/policies"
    volume = "runs:/var/lib/dialoop/runs"
    assert run_dir.startswith(volume.partition(":")[2])
    assert volume in trainer["volumes"]
    assert f"{volume}:ro" in inference["volumes"]


def test_the_gpu_replica_takes_the_place_of_the_other() -> None:
    gpu, cpu = SERVICES["inference-gpu"], SERVICES["inference"]
    assert gpu["profiles"] == ["gpu"]
    assert gpu["networks"]["work"]["aliases"] == ["inference"]
    assert gpu["ports"] == cpu["ports"]  # both at once would fail, not be chosen from by chance
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("service", SERVICES)
def test_whatever_is_waited_for_can_become_ready(service: str) -> None:
    for name, wait in SERVICES[service].get("depends_on", {}).items():
        other = SERVICES[name]
        if wait["condition"] == "service_completed_successfully":
            assert other["restart"] == "no"
        else:
            assert "healthcheck" in other or TARGETS[other["build"]["target"]].probe
        assert not other.get("profiles") or wait["required"] is False


@pytest.mark.parametrize("service", SETTINGS)
def test_an_image_runs_the_embedded_command_and_probes_its_port(service: str) -> None:
    target = TARGETS[SERVICES[service]["build"]["target"]]
    assert target.command == ["python", *spec_of(service).command[1:]]
    assert target.probe[:4] == [
        "python",
        "-m",
        "dialoop_services.runtime.probe",
        f"127.0.0.1:{listens(service)}",
    ]
    assert target.probe[-2:] == ["--kill-after", "60"]  # as long as the embedded stack waits
    assert SERVICES[service]["restart"] == "on-failure"
    assert target.last("EXPOSE") == f"{listens(service)} {listens(service, 'REST_PORT')}"


@pytest.mark.parametrize("service", SETTINGS)
def test_an_image_installs_its_own_extra_and_drops_root_last(service: str) -> None:
    target = TARGETS[SERVICES[service]["build"]["target"]]
    kinds = [kind for kind, _ in target.instructions]
    assert target.extras == [service.partition("-")[0]]
    assert target.last("USER") == SERVICES[service]["user"]
    assert "RUN" not in kinds[kinds.index("USER") :]


@pytest.mark.parametrize("service", SETTINGS)
def test_a_container_has_as_long_to_end_as_the_embedded_service(service: str) -> None:
    grace_s = float(SERVICES[service]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= spec_of(service).stop_grace_s


@pytest.mark.parametrize(
    ("variables", "files", "code", "says"),
    [
        ({}, ["model.safetensors"], 0, ""),
        ({}, [], 0, "made: -m dialoop_services.learning.model.tiny"),
        ({"MODEL_DIR": "./mine"}, [], 2, "holds no config.json"),
        ({"MODEL_DIR": "./mine"}, ["config.json"], 2, "Set WARM_START_STEPS"),
        ({"MODEL_DIR": "./mine", "WARM_START_STEPS": "0"}, ["config.json"], 0, ""),
    ],
)
def test_the_tiny_model_is_made_only_where_none_is_given(
    tmp_path: Path, variables: dict[str, str], files: list[str], code: int, says: str
) -> None:
    model = compose_file(DIALOOP_TOKEN="x", **variables)["services"]["model"]
    (tmp_path / "model").mkdir()
    for name in files:
        (tmp_path / "model" / name).touch()
    stand_in = tmp_path / "python"  # tells what it was asked, instead of loading torch
    stand_in.write_text('#!/bin/sh\necho "made: $*"\n')
    stand_in.chmod(0o755)
    variables = model["environment"] | {"TARGET": str(tmp_path / "model")}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run(
        model["command"], env=variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode == code
    assert says in ended.stdout + ended.stderr
    assert bool(ended.stdout + ended.stderr) == bool(says)


def test_variables_are_read_as_compose_reads_them() -> None:
    assert interpolate("${A:-x}/$${A}", {}) == "x/${A}"
    assert interpolate("${A:-${B:-x}}", {"B": "b"}) == "b"
    assert interpolate("${A:-${B:-x}}", {"A": "a"}) == "a"
    with pytest.raises(MissingVariable, match="A: say it"):
        interpolate("${A:?say it}", {"A": ""})
