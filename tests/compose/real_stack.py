"""A stack of docker-compose.yml on a real engine, as a user has it: compose, curl and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.containers import ROOT

OURS = (
    *("job", "environment", "door", "replay", "inference", "trainer", "scorer", "collector"),
    "redis",
)
PORTS = {"environment": 8001, "inference": 8002, "replay": 8003, "scorer": 8004, "trainer": 8005}
TOKEN = "of-the-compose-test"
# Names that shells and continuous integration set for reasons of their own.
COMMON = {"ENVIRONMENT": "staging", "SEED": "7", "LOSS": "mse", "ENGINE": "postgres"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as the engine describes it."""

    facts: Mapping[str, Any]

    @property
    def service(self) -> str:
        return str(self.facts["Config"]["Labels"]["com.docker.compose.service"])

    @property
    def id(self) -> str:
        return str(self.facts["Id"])

    @property
    def state(self) -> str:
        return str(self.facts["State"]["Status"])

    @property
    def exit_code(self) -> int:
        return int(self.facts["State"]["ExitCode"])

    @property
    def health(self) -> str:
        return str(self.facts["State"].get("Health", {}).get("Status", ""))

    @property
    def pid(self) -> int:
        return int(self.facts["State"]["Pid"])

    @property
    def life(self) -> tuple[str, str]:
        """Another one after each start."""
        return self.id, str(self.facts["State"]["StartedAt"])


@dataclass(slots=True, kw_only=True)
class Stack:
    """One compose project, with the variables that its user has set."""

    variables: dict[str, str] = field(default_factory=dict)
    source: Path = ROOT

    @property
    def environment(self) -> dict[str, str]:
        """What its user's shell has: none of our own variables, but common ones."""
        names = {name for name in os.environ if not name.startswith(("DIALOOP_", "COMPOSE_"))}
        return {name: os.environ[name] for name in names} | COMMON | self.variables

    def run(self, *words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, from the source's folder."""
        return subprocess.run(
            words,
            cwd=self.source,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def compose(self, *words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run `docker compose` to its end."""
        return self.run("docker", "compose", *words, timeout_s=timeout_s)

    def must(self, *words: str, timeout_s: float = 600.0) -> str:
        """Run `docker compose`; return what it printed, and fail where it fails."""
        ended = self.compose(*words, timeout_s=timeout_s)
        assert ended.returncode == 0, f"{words}: {ended.stderr[-3000:]}\n{self.tail()}"
        return ended.stdout

    def tail(self) -> str:
        """The newest lines of every container."""
        return self.compose("logs", "--tail", "8").stdout[-6000:]

    def log(self, service: str) -> str:
        """Everything that a service has said."""
        ended = self.compose("logs", "--no-log-prefix", service)
        return ended.stdout

    def containers(self) -> tuple[Container, ...]:
        """All of the project's containers, those that have ended too."""
        ids = self.must("ps", "--all", "--quiet").split()
        if not ids:
            return ()
        described = json.loads(self.run("docker", "inspect", *ids).stdout)
        return tuple(Container(facts=each) for each in described)

    def of(self, service: str) -> Container:
        """The one container of a service."""
        [container] = [each for each in self.containers() if each.service == service]
        return container

    def lives(self) -> dict[str, list[tuple[str, str]]]:
        """The lives of all containers by service: a container or start more is another one."""
        lives: dict[str, list[tuple[str, str]]] = {}
        for each in self.containers():
            lives.setdefault(each.service, []).append(each.life)
        return {service: sorted(all_of_it) for service, all_of_it in lives.items()}

    def states(self) -> dict[str, set[str]]:
        """What the containers of each service are: healthy, running, exited 2, ..."""
        states: dict[str, set[str]] = {}
        for each in self.containers():
            text = each.health if each.state == "running" and each.health else each.state
            text = f"exited {each.exit_code}" if each.state == "exited" else text
            states.setdefault(each.service, set()).add(text)
        return states

    def wait_until_healthy(self, *services: str, within_s: float = 240.0) -> None:
        """Wait until every container of the services is healthy."""
        deadline = time.monotonic() + within_s
        while True:
            states = self.states()
            if all(states.get(service) == {"healthy"} for service in services):
                return
            assert time.monotonic() < deadline, f"{states}\n{self.tail()}"
            time.sleep(1)

    def kill(self, service: str) -> None:
        """Kill all of a container at once, as nobody asked for: the kernel, or an operator."""
        os.kill(self.of(service).pid, signal.SIGKILL)

    def rest(self, service: str, path: str, *, token: str = TOKEN) -> dict[str, Any]:
        """GET from the host, with curl."""
        url = f"http://127.0.0.1:{PORTS[service]}{path}"
        header = f"Authorization: Bearer {token}"
        ended = self.run("curl", "-sS", "--max-time", "10", "-H", header, url)
        assert ended.returncode == 0, ended.stderr
        answer: dict[str, Any] = json.loads(ended.stdout)
        return answer

    def steps(self) -> int:
        """How many train steps the trainer says it has taken; -1 while it does not answer."""
        url = f"http://127.0.0.1:{PORTS['trainer']}/v1/status"
        header = f"Authorization: Bearer {TOKEN}"
        ended = self.run("curl", "-sS", "--max-time", "10", "-H", header, url)
        try:
            return int(json.loads(ended.stdout).get("num_train_steps", -1))
        except ValueError:
            return -1

    def wait_for_steps(self, number: int, *, within_s: float = 300.0) -> int:
        """Wait until so many train steps were taken; return how many they are then."""
        deadline = time.monotonic() + within_s
        while (steps := self.steps()) < number:
            assert time.monotonic() < deadline, f"{steps} of {number}\n{self.tail()}"
            time.sleep(1)
        return steps
