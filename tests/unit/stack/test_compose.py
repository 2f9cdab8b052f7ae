from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop_ops.launch.compose import ComposeSettings, plan_service, read_job
from dialoop_ops.launch.plan import PlannedProcess
from dialoop_ops.stack.layout import Layout, rest_name
from dialoop_ops.stack.processes.child import ServiceSpec
from dialoop_ops.stack.run_dir import RunDir
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.config.file import load_config
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.runtime.logs import LogSettings
from dialoop_services.runtime.settings import ServerSettings, load
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.containers import GPU, ROOT, compose_file, interpolate, targets

SETTINGS: dict[str, type[ServerSettings]] = {
    "environment": EnvironmentSettings,
    "inference": InferenceSettings,
    "replay": ReplaySettings,
    "scorer": ScorerSettings,
    "trainer": TrainerSettings,
    "collector": CollectorSettings,
}
OURS = [*SETTINGS, "door", "job"]
COMPOSE = compose_file(DIALOOP_TOKEN="secret")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
TARGETS = targets()

DEMO = ROOT / "infra" / "configs" / "demo.toml"
DOOR = ROOT / "infra" / "docker" / "door.cfg"
_SERVER = re.compile(
    r"(?:backend|listen) (?P<section>\w+)\n.*^  server \w+ (?P<host>\w+)(?::(?P<shift>-\d+))?",
    re.DOTALL | re.MULTILINE,
)

# What containers have of their own: where they listen, find each other and keep files.
PLACES = {"host", "port", "rest_port", "token", "run", "run_dir", "model_dir", "weights_root"}
PLACES |= {"worker", "redis_url", "replay_address", "environment_address"}
PLACES |= {"inference_address", "inference_addresses", "name", "advertised_address"}


def compose_settings(service: str) -> ComposeSettings:
    """What the container's own variables say, without a process."""
    own = {
        name.removeprefix("DIALOOP_COMPOSE_").lower(): value
        for name, value in SERVICES[service]["environment"].items()
        if name.startswith("DIALOOP_COMPOSE_")
    }
    return ComposeSettings(**own)


def plan_of(service: str) -> PlannedProcess:
    settings = compose_settings(service)
    return plan_service(service, read_job(DEMO, settings), settings)


PLANS = {service: plan_of(service) for service in SETTINGS}


def settings_in(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], kind: type[ServerSettings]
) -> ServerSettings:
    for name in [name for name in os.environ if name.startswith("DIALOOP_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load(kind)


def settings_of(service: str, monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    """The settings with which the container's service starts, for the demo's job."""
    variables = dict(PLANS[service].variables) | SERVICES[service]["environment"]
    return settings_in(monkeypatch, variables | {"DIALOOP_CONFIG": str(DEMO)}, SETTINGS[service])


def spec_of(service: str, folder: Path) -> ServiceSpec:
    config = load_config(DEMO, environment={})
    run_dir = RunDir(path=folder, run_id="demo")
    ports = {name: 1 for service in SETTINGS for name in (service, rest_name(service))}
    layout = Layout(config=config, run_dir=run_dir, ports=ports, redis_url="redis://127.0.0.1:1/0")
    layout.write_job()
    return layout.spec(service)


def listens(service: str, door: str = "PORT") -> int:
    return int(PLANS[service].variables[f"DIALOOP_{service.upper()}_{door}"])


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_of_a_container_is_a_setting(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(service, monkeypatch)
    container = SERVICES[service]["environment"]
    prefix = SETTINGS[service].model_config["env_prefix"]
    shared = {"DIALOOP_TOKEN", "DIALOOP_ADMIN_TOKEN", "DIALOOP_TICKET", "DIALOOP_CONFIG"}
    shared |= {f"DIALOOP_{name.upper()}" for name in LogSettings.model_fields}
    prefixes = (str(prefix), "DIALOOP_COMPOSE_")
    assert {name for name in container if not name.startswith(prefixes)} <= shared
    assert settings.token.get_secret_value() == "secret"


def test_a_misspelt_variable_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SERVICES["replay"]["environment"] | {"DIALOOP_REPLAY_STOR": "redis"}
    with pytest.raises(InvalidConfig, match="did you mean DIALOOP_REPLAY_STORE"):
        settings_in(monkeypatch, wrong | {"DIALOOP_CONFIG": str(DEMO)}, ReplaySettings)
    monkeypatch.setenv("DIALOOP_COMPOSE_HAED", "10.0.0.5")
    with pytest.raises(InvalidConfig, match="did you mean DIALOOP_COMPOSE_HEAD"):
        load(ComposeSettings)


@pytest.mark.parametrize("service", SETTINGS)
def test_a_container_is_told_what_the_demo_tells_the_embedded_service(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = settings_of(service, monkeypatch)
    variables = spec_of(service, tmp_path).environment
    theirs = settings_in(monkeypatch, variables, SETTINGS[service])
    assert ours.model_dump(exclude=PLACES) == theirs.model_dump(exclude=PLACES)


@pytest.mark.parametrize("service", [*OURS, "redis"])
def test_containers_have_no_privileges(service: str) -> None:
    container = SERVICES[service]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert container["user"] not in ("", "root", "0", "0:0")
    assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & container.keys()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_without_capabilities_the_sandbox_still_denies_everything() -> None:
    program = (
        "import json\n"
        "from dialoop.sandbox.levels import Level\n"
        "from dialoop.sandbox.self_test import ATTEMPTS, assess, effective_isolation\n"
        "isolation = effective_isolation()\n"
        "assert isolation.denies == ATTEMPTS, isolation\n"
        "print(json.dumps([isolation.level, assess(Level.BUBBLEWRAP).missing]))\n"
    )
    # What cap_drop and no-new-privileges leave, and an image without bwrap.
    dropped = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
    command = [shutil.which("setpriv") or "", *dropped, sys.executable, "-c", program]
    ended = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    level, missing = json.loads(ended.stdout)
    assert level in ("landlock", "rlimits")
    assert missing == "there is no bwrap on PATH"


def test_ports_are_published_on_loopback_only() -> None:
    published = SERVICES["door"]["ports"]
    other = compose_file(DIALOOP_TOKEN="x", ADDRESS="10.0.0.5")["services"]["door"]["ports"]
    assert other == [p.replace("127.0.0.1", "10.0.0.5") for p in published]
    grpc = {"environment": 7001, "inference": 7002, "replay": 7003, "scorer": 7004, "trainer": 7005}
    assert {name: listens(name) for name in grpc} == grpc
    rest = {name: port + 1000 for name, port in grpc.items()}
    assert {name: listens(name, "REST_PORT") for name in grpc} == rest
    assert published == ["127.0.0.1:7001-7005:17001-17005", "127.0.0.1:8001-8005:18001-18005"]
    assert {*grpc.values(), *rest.values()} == {*range(7001, 7006), *range(8001, 8006)}


def test_strangers_get_to_every_service_at_the_door_alone() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["door"]
    ways = passages()
    for name in {*SETTINGS} - {"collector"}:
        for port in (listens(name), listens(name, "REST_PORT")):
            assert ways["work", port + 10_000] == (name, port)
    strangers = {port for network, port in ways if network == "work" and port > 10_000}
    assert strangers == {*range(17001, 17006), *range(18001, 18006)}


def passages() -> dict[tuple[str, int], tuple[str, int]]:
    """Where each port of the door leads, by the network in which it listens."""
    sections = re.split(r"^(?=\w)", DOOR.read_text("utf-8"), flags=re.MULTILINE)
    names = SERVICES["door"]["networks"]
    assert {name: own["aliases"] for name, own in names.items()} == {
        n: [f"door.{n}"] for n in names
    }
    servers = {
        match["section"]: (match["host"], int(match["shift"] or 0))
        for section in sections
        if (match := _SERVER.match(section))
    }
    ways: dict[tuple[str, int], tuple[str, int]] = {}
    for section in sections:
        chosen = {
            int(port): backend
            for backend, ports in re.findall(r"use_backend (\w+) if { dst_port ([\d ]+) }", section)
            for port in ports.split()
        }
        own = section.split(maxsplit=2)[1] if section.startswith("listen") else ""
        for network, first, last in re.findall(r"door\.(\w+):(\d+)(?:-(\d+))?", section):
            for port in range(int(first), int(last or first) + 1):
                host, shift = servers[chosen.get(port, own)]
                ways[network, port] = (host, port + shift)
    return ways


def members(network: str) -> set[str]:
    return {name for name, service in SERVICES.items() if network in service.get("networks", ())}


def test_each_network_has_those_alone_who_need_each_other() -> None:
    assert members("sandbox") == {"environment", "door"}
    assert members("store") == {"redis", "replay"}
    assert members("work") == {*SERVICES} - {"environment", "redis"}
    assert COMPOSE["networks"].keys() == {"work", "sandbox", "store"}
    assert all("networks" in service for service in SERVICES.values())  # else they are on a fourth


def test_the_sandbox_has_no_way_out_but_the_door_and_that_to_the_policy_alone() -> None:
    assert "ports" not in SERVICES["environment"]  # they would not be published from there
    assert COMPOSE["networks"]["sandbox"]["internal"] is True
    environment = PLANS["environment"].variables
    doors = {int(v) for name, v in environment.items() if name.endswith("_PORT")}
    policy = listens("inference")
    ways = passages()
    assert {way: end for way, end in ways.items() if way[1] < 10_000} == {
        **{("work", port): ("environment", port) for port in doors},
        ("sandbox", policy): ("inference", policy),
    }
    assert [way for way in ways if way[0] == "sandbox"] == [("sandbox", policy)]


def test_only_replay_reaches_redis() -> None:
    assert COMPOSE["networks"]["store"]["internal"] is True


def addresses() -> list[tuple[str, str]]:
    addresses = []
    for name in SETTINGS:
        for variable, value in PLANS[name].variables.items():
            if variable.endswith("_ADDRESS"):
                addresses.append((name, value))
            if variable.endswith("_ADDRESSES"):
                addresses.extend((name, address) for address in json.loads(value))
    return addresses


@pytest.mark.parametrize(("service", "address"), addresses())
def test_an_address_is_a_service_on_a_common_network(service: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    common = set(SERVICES[service]["networks"]) & set(SERVICES[host]["networks"])
    assert common
    if host == "door":
        assert {passages()[network, int(port)][1] for network in common} == {int(port)}
    else:
        assert listens(host) == int(port)


@pytest.mark.parametrize("service", SETTINGS)
def test_every_service_sees_model_runs_and_code_and_writes_runs_alone(service: str) -> None:
    mounts = [mount.split(":") for mount in SERVICES[service]["volumes"]]
    writes = {target for _, target, *mode in mounts if mode != ["ro"]}
    assert {target for _, target, *_ in mounts} == {
        f"/var/lib/dialoop/{name}" for name in ("model", "code", "runs")
    }
    may_write = service in ("trainer", "collector")
    assert writes == ({"/var/lib/dialoop/runs"} if may_write else set())
    assert SERVICES[service]["working_dir"] == "/var/lib/dialoop/code"


def test_inference_reads_the_policies_where_the_trainer_writes_them() -> None:
    trainer, inference = PLANS["trainer"].variables, PLANS["inference"].variables
    run_dir = trainer["DIALOOP_TRAINER_RUN_DIR"]
    assert inference["DIALOOP_INFERENCE_WEIGHTS_ROOT"] == f"{run_dir}/policies"
    assert inference["DIALOOP_INFERENCE_MODEL_DIR"] == trainer["DIALOOP_TRAINER_MODEL_DIR"]
    assert run_dir == "/var/lib/dialoop/runs/demo"


@pytest.mark.parametrize("service", [*SETTINGS, "job"])
def test_every_container_reads_the_one_job_file(service: str) -> None:
    command = ["python", "-m", "dialoop_ops.launch.compose", service]
    assert SERVICES[service]["command"] == command
    [mount] = SERVICES[service]["configs"]
    assert mount == {"source": "job", "target": SERVICES[service]["environment"]["DIALOOP_CONFIG"]}
    assert COMPOSE["configs"]["job"]["file"] == "infra/configs/demo.toml"
    mine = compose_file(DIALOOP_TOKEN="x", JOB="./job.toml")
    assert mine["configs"]["job"]["file"] == "./job.toml"


def test_a_redis_of_the_users_takes_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "rediss://redis.internal:6379/0"
    replay = compose_file(DIALOOP_TOKEN="x", REDIS_URL=url)["services"]["replay"]
    variables = dict(PLANS["replay"].variables) | replay["environment"]
    settings = settings_in(monkeypatch, variables | {"DIALOOP_CONFIG": str(DEMO)}, ReplaySettings)
    assert isinstance(settings, ReplaySettings)
    assert settings.redis_url == url
    assert replay["depends_on"]["redis"]["required"] is False  # it may be scaled to 0


@pytest.mark.parametrize("role", ["inference", "trainer"])
def test_a_gpu_is_added_to_the_two_services_that_use_one(role: str) -> None:
    file = compose_file(GPU)
    assert file["services"].keys() == {"inference", "trainer"}
    gpu = file["services"][role]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["device_ids"] == ["0"]
    other = compose_file(GPU, TRAINER_GPU="1")["services"]["trainer"]
    (device,) = other["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["1"]
    assert gpu["image"] not in {service["image"] for service in SERVICES.values()}
    assert gpu["build"].get("target", SERVICES[role]["build"]["target"]) in TARGETS


def test_the_gpu_file_trains_on_the_gpu() -> None:
    settings = compose_settings("trainer").model_copy(update={"gpu": True})
    assert compose_file(GPU)["services"]["trainer"]["environment"]["DIALOOP_COMPOSE_GPU"] == "true"
    config = read_job(DEMO, settings)
    assert (config.train.device, config.engine) == ("cuda", "vllm")
    for role in ("trainer", "inference"):
        assert plan_service(role, config, settings).needs.gpus == 1
    assert read_job(DEMO, compose_settings("trainer")).train.device == "cpu"


def builder_of(service: str) -> str:
    """The service that builds the image of another, which is built by one alone."""
    [builder] = [
        name
        for name, each in SERVICES.items()
        if each["image"] == SERVICES[service]["image"] and "build" in each
    ]
    return builder


def test_each_image_is_built_by_one_service() -> None:
    assert {name: builder_of(name) for name in OURS} == {
        **{name: name for name in SETTINGS},
        "door": "door",
        "job": "environment",
    }


def test_up_shows_the_job_alone_so_that_it_ends_with_it_and_with_no_other_container() -> None:
    assert {name for name, service in SERVICES.items() if service.get("attach", True)} == {"job"}
    assert SERVICES["job"]["restart"] == "no"


def test_variables_that_shells_have_anyway_change_nothing() -> None:
    names = ("ENVIRONMENT", "SEED", "LOSS", "ENGINE", "LEARNING_RATE")
    assert compose_file(**dict.fromkeys(names, "1")) == compose_file()


@pytest.mark.parametrize("service", SERVICES)
def test_whatever_is_waited_for_can_become_ready(service: str) -> None:
    for name, wait in SERVICES[service].get("depends_on", {}).items():
        other = SERVICES[name]
        assert wait["condition"] == "service_healthy"
        assert "healthcheck" in other or TARGETS[other["build"]["target"]].probe
        assert wait.get("required", True) or name == "redis"  # or it would start after a failure


@pytest.mark.parametrize("service", SETTINGS)
def test_an_image_runs_the_embedded_command_and_probes_its_port(
    service: str, tmp_path: Path
) -> None:
    target = TARGETS[SERVICES[service]["build"]["target"]]
    assert target.command == ["python", *spec_of(service, tmp_path).command[1:]]
    assert tuple(target.command) == PLANS[service].command
    assert target.probe == [
        *("python", "-I", "-S"),
        "/opt/dialoop/services/dialoop_services/runtime/probe.py",
        f"127.0.0.1:{listens(service, 'REST_PORT')}",
        "60",  # as long as the embedded stack waits
    ]
    assert ("services services") in target.all_of("COPY")  # the probe is in the image
    assert SERVICES[service]["restart"] == "on-failure"
    assert target.last("EXPOSE") == f"{listens(service)} {listens(service, 'REST_PORT')}"


def test_the_door_probes_itself_and_runs_its_configuration_without_root() -> None:
    door = TARGETS[SERVICES["door"]["build"]["target"]]
    [health] = re.findall(r"^  bind (127\.0\.0\.1:\d+)$", DOOR.read_text("utf-8"), re.MULTILINE)
    assert door.probe == [*TARGETS["environment"].probe[:-2], health, "60"]
    probe = door.probe[3].removeprefix("/opt/dialoop/")
    assert door.all_of("COPY") == [f"{probe} {probe}", "infra/docker/door.cfg door.cfg"]
    assert door.command == ["haproxy", "-db", "-f", "door.cfg"]
    assert "command" not in SERVICES["door"]
    assert "healthcheck" not in SERVICES["door"]
    assert door.last("USER") == SERVICES["door"]["user"]


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy")
def test_haproxy_takes_the_doors_configuration(tmp_path: Path) -> None:
    # Its names are those of the containers' networks.
    text = re.sub(r"door\.\w+", "127.0.0.1", DOOR.read_text("utf-8"))
    (tmp_path / "door.cfg").write_text(text)
    variables = TARGETS["door"].variables
    assert {"ADDRESS_CONNECTIONS", "ADDRESS_NEW_CONNECTIONS"} <= variables.keys()
    command = [shutil.which("haproxy") or "", "-c", "-f", str(tmp_path / "door.cfg")]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr


@pytest.mark.parametrize("service", SETTINGS)
def test_an_image_installs_the_packages_of_others_before_our_source(service: str) -> None:
    target = TARGETS[SERVICES[service]["build"]["target"]]
    texts = [text for kind, text in target.instructions if kind in ("COPY", "RUN")]
    assert (
        texts[-1]
        == "pip install --no-deps --no-build-isolation ./client/dialoop* ./services/dialoop*"
    )
    source = texts.index("client client")
    assert texts[source:-1] == ["client client", "services services"]
    of_others = [text for text in texts if "pip install" in text and "own.txt" not in text]
    assert all("pip install --no-deps" in text for text in of_others)
    assert all("--require-hashes" in text for text in of_others[:-1])


def test_whatever_an_image_copies_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    sent = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = {
        text.replace("${REQUIREMENTS}", "infra/requirements/own.txt").split()[0]
        for target in TARGETS.values()
        for text in target.all_of("COPY")
    }
    assert "infra/docker/door.cfg" in copied
    assert not [c for c in copied if not any(Path(c).is_relative_to(each) for each in sent)]


@pytest.mark.parametrize("service", SETTINGS)
def test_an_image_installs_its_own_list_and_drops_root_last(service: str) -> None:
    target = TARGETS[SERVICES[service]["build"]["target"]]
    kinds = [kind for kind, _ in target.instructions]
    loads_torch = ["torch-cpu", "torch", "cuda", "models"]
    lists = {
        "trainer": loads_torch,
        "scorer": loads_torch,
        "inference": [*loads_torch, "inference"],
    }
    assert target.lists == lists.get(service, ["services"])
    assert target.last("USER") == SERVICES[service]["user"]
    assert "RUN" not in kinds[kinds.index("USER") :]


@pytest.mark.parametrize("service", SETTINGS)
def test_a_container_has_as_long_to_end_as_the_embedded_service(
    service: str, tmp_path: Path
) -> None:
    grace_s = float(SERVICES[service]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= spec_of(service, tmp_path).stop_grace_s


@pytest.mark.parametrize("service", [*SETTINGS, "redis"])
def test_a_model_that_loads_for_minutes_fails_no_health_check(service: str) -> None:
    if service == "redis":  # reads its file first
        assert SERVICES[service]["healthcheck"]["start_period"] == "600s"
        return
    check = TARGETS[SERVICES[service]["build"]["target"]].last("HEALTHCHECK")
    start = re.search(r"--start-period=(\d+)s", check)
    assert start
    loads = service in ("inference", "trainer", "scorer")
    assert int(start[1]) >= (1800 if loads else 60)


def test_packages_of_the_users_code_may_not_change_ours() -> None:
    args = compose_file(DIALOOP_TOKEN="x", REQUIREMENTS="infra/requirements/mine.txt")
    for service in SETTINGS:
        build = args["services"][service]["build"]
        assert build["args"]["REQUIREMENTS"] == "infra/requirements/mine.txt"
        target = TARGETS[build["target"]]
        assert "${REQUIREMENTS} own.txt" in target.all_of("COPY")
        assert target.all_of("RUN")[-2] == (
            "pip list --format=freeze > ours.txt && pip install -r own.txt -c ours.txt"
        )


def test_variables_are_read_as_compose_reads_them() -> None:
    assert interpolate("${A:-x}/$${A}", {}) == "x/${A}"
    assert interpolate("[${A:+x}]", {}) == "[]"
    assert interpolate("[${A:+x}]", {"A": "a"}) == "[x]"
    assert interpolate("${A:-${B:-x}}", {"B": "b"}) == "b"
    assert interpolate("${A:-${B:-x}}", {"A": "a"}) == "a"
