"""docker-compose.yml on a real engine, from the build to the ledger at the end.

The tests are one story in this order: what is refused before anything starts, a job that is looked
at, scaled, killed and taken down in mid-run, its end, and a user's own job.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose.real_stack import OURS, PORTS, TOKEN, Container, Stack
from tests.support.containers import ROOT

pytestmark = pytest.mark.timeout(1200)

SERVICES = tuple(name for name in OURS if name not in ("job", "redis"))
# More steps than are taken before the end of the test changes their number.
LONG, RUN = 5000, "compose-test"
JOB = """
run = "{run}"
engine = "transformers"
[inference]
max_model_len = 192
[collector]
group_size = 6
max_new_tokens = 24
[warm_start]
num_steps = 60
[train]
num_steps = {steps}
loss = "grpo"
[evaluation]
num_tasks = 16
every = 0
"""
_PROBE_CPU = (
    "import resource, subprocess, sys\n"
    "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
    "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    "print(used.ru_utime + used.ru_stime)\n"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that containers get to."""
    place = tmp_path_factory.mktemp("compose")
    for above in (place, *place.parents[:2]):
        above.chmod(0o755)
    return place


@pytest.fixture(scope="module")
def job(place: Path) -> Path:
    path = place / "job.toml"
    path.write_text(JOB.format(run=RUN, steps=LONG))
    return path


@pytest.fixture(scope="module")
def stack(job: Path) -> Iterator[Stack]:
    """The images are built, and whatever was started has gone at the end."""
    stack = Stack(variables={"DIALOOP_TOKEN": TOKEN, "JOB": str(job)})
    stack.must("down", "--volumes", "--remove-orphans")
    stack.must("build", timeout_s=1500)
    yield stack
    stack.must("down", "--volumes", "--remove-orphans")


def refusal_of(stack: Stack, **variables: str) -> str:
    """What `job` says where nothing starts; `up` fails, and no other container has run."""
    other = Stack(variables=stack.variables | variables)
    ended = other.compose("up", "--detach")
    states = other.states()
    log = other.log("job")
    other.must("down")
    assert ended.returncode != 0, ended.stderr
    assert {name: state for name, state in states.items() if name != "redis"} == {
        **{name: {"created"} for name in SERVICES},
        "job": {"exited 2"},
    }
    return log


def test_ps_logs_and_down_work_without_a_token_and_up_says_what_is_missing(stack: Stack) -> None:
    bare = Stack()
    for words in (["ps"], ["logs"], ["down"], ["config", "--quiet"]):
        bare.must(*words)
    assert "DIALOOP_TOKEN is not set" in refusal_of(stack, DIALOOP_TOKEN="")


def test_a_model_that_the_containers_may_not_read_is_said_with_the_remedy(
    stack: Stack, place: Path
) -> None:
    model = place / "closed"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    (model / "model.safetensors").chmod(0o600)
    log = refusal_of(stack, MODEL_DIR=str(model))
    assert "may not read model.safetensors" in log
    assert f"`chmod -R a+rX {model}`" in log


def test_a_folder_for_runs_of_root_is_said_with_the_remedy(stack: Stack, place: Path) -> None:
    (place / "of-root").mkdir()
    log = refusal_of(stack, RUNS_DIR=str(place / "of-root"))
    assert f"`sudo chown -R 10001:10001 {place}/of-root`" in log


def test_a_job_file_that_the_containers_may_not_read_is_said_with_the_remedy(
    stack: Stack, place: Path
) -> None:
    closed = place / "closed.toml"
    closed.write_text("")
    closed.chmod(0o600)
    assert f"`chmod -R a+rX {closed}`" in refusal_of(stack, JOB=str(closed))


@pytest.mark.parametrize(
    ("wrong", "service"),
    [
        ('[train]\nloss = "nowhere:loss"', "trainer"),
        ('[environment]\nuse = "nowhere:environment"', "environment"),
    ],
    ids=["loss", "environment"],
)
def test_a_name_that_is_not_there_ends_up_and_starts_no_scorer(
    wrong: str, service: str, stack: Stack, place: Path
) -> None:
    code = place / f"without-{service}"
    code.mkdir()
    (code / "job.toml").write_text(f'run = "nameless"\n{wrong}\n')
    variables = {"JOB": str(code / "job.toml"), "CODE_DIR": str(code)}
    other = Stack(variables=stack.variables | variables)
    ended = other.compose("up", "--detach")
    states, log = other.states(), other.log(service)
    if service == "trainer":  # whose end the job learns of
        assert other.run("docker", "wait", other.of("job").id).stdout == "2\n"
        assert "nowhere" in other.log("job")
    other.must("down", "--volumes")
    assert ended.returncode != 0
    assert f"dialoop-{service}-1" in ended.stderr
    assert "nowhere" in log
    assert states["scorer"] == states["collector"] == {"created"}
    assert states[service] == {"exited 0"}  # any other code would start it again


def test_a_redis_that_refuses_is_quoted_in_one_sentence(stack: Stack) -> None:
    other = Stack(variables=stack.variables | {"REDIS_URL": "redis://nobody:wrong@redis:6379/0"})
    other.compose("up", "--detach", "--no-deps", "redis", "replay")
    deadline = time.monotonic() + 60
    sentence = "dialoop replay: Redis refuses this service: invalid username-password pair"
    while sentence not in (log := other.log("replay")):
        assert time.monotonic() < deadline, log
        time.sleep(1)
    other.must("down")
    assert "Traceback" not in log
    assert ":wrong" not in log


def test_the_job_starts_and_everything_is_healthy(stack: Stack) -> None:
    stack.must("up", "--detach")
    stack.wait_until_healthy(*OURS)
    assert f"The job is {RUN}: transformers, grpo, {LONG} train steps." in stack.log("job")


def test_a_second_up_starts_nothing_again(stack: Stack) -> None:
    lives = stack.lives()
    stack.must("up", "--detach")
    stack.must("up", "--detach", "--build")
    assert stack.lives() == lives


def test_nobody_but_the_environment_and_the_door_is_on_the_sandbox_network(stack: Stack) -> None:
    on: dict[str, set[str]] = {}
    for container in stack.containers():
        for network in container.facts["NetworkSettings"]["Networks"]:
            on.setdefault(network.removeprefix("dialoop_"), set()).add(container.service)
    assert on == {
        "sandbox": {"environment", "door"},
        "store": {"redis", "replay"},
        "work": {*OURS} - {"environment", "redis"},
    }
    [sandbox] = json.loads(stack.run("docker", "network", "inspect", "dialoop_sandbox").stdout)
    assert sandbox["Internal"] is True


def addresses_of(container: Container) -> list[str]:
    networks = container.facts["NetworkSettings"]["Networks"].values()
    return [network["IPAddress"] for network in networks if network["IPAddress"]]


def test_the_sandbox_reaches_the_policy_at_the_door_and_nothing_else(stack: Stack) -> None:
    hosts = {name: addresses_of(stack.of(name)) for name in OURS if name != "environment"}
    program = (
        "import json, socket, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def opens(place):\n"
        "    try:\n"
        "        socket.create_connection(place[1:], timeout=3).close()\n"
        "    except OSError:\n"
        "        return False\n"
        "    return True\n"
        "firsts = (7001, 8001, 17001, 18001)\n"
        "ports = [p for first in firsts for p in range(first, first + 6)] + [6379]\n"
        "hosts = json.loads(sys.argv[1]).items()\n"
        "places = [(n, h, p) for n, each in hosts for h in each for p in ports]\n"
        "with ThreadPoolExecutor(len(places)) as pool:\n"
        "    opened = list(pool.map(opens, places))\n"
        "print(json.dumps([[n, p] for (n, _, p), is_open in zip(places, opened) if is_open]))\n"
    )
    words = ("exec", "-T", "environment", "python", "-I", "-c", program, json.dumps(hosts))
    reached = {(name, port) for name, port in json.loads(stack.must(*words))}
    assert reached == {("door", 7002)}


def test_containers_have_no_rights_and_publish_on_loopback_alone(stack: Stack) -> None:
    for container in stack.containers():
        host = container.facts["HostConfig"]
        assert host["ReadonlyRootfs"] is True
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert not host["Privileged"]
        published = [b["HostIp"] for p in (host["PortBindings"] or {}).values() for b in p]
        assert set(published) <= {"127.0.0.1"}
        status = Path(f"/proc/{container.pid}/status").read_text("utf-8")
        [uids] = re.findall(r"^Uid:\s+(.*)$", status, re.MULTILINE)
        assert "0" not in uids.split()
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)


def test_an_address_takes_its_share_at_the_door_and_the_job_goes_on(stack: Stack) -> None:
    steps = stack.wait_for_steps(1)
    with contextlib.ExitStack() as held:
        opened = []
        for number in range(2000):
            port = PORTS["environment"] + number % len(PORTS)
            one = held.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            with contextlib.suppress(ConnectionError):
                one.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: ")
            opened.append(one)
        time.sleep(1)
        assert sum(is_open(one) for one in opened) <= 256
        time.sleep(4)
    stack.wait_for_steps(steps + 1)
    assert {container.health for container in stack.containers()} == {"healthy"}


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_rest_answers_on_the_host_with_the_token_alone(stack: Stack) -> None:
    environments = stack.rest("environment", "/v1/environments")["environments"]
    assert "arithmetic" in {each["name"] for each in environments}
    assert stack.rest("trainer", "/v1/status")["max_train_steps"] == LONG
    assert stack.rest("inference", "/v1/policy")["policy_version"]
    assert stack.rest("replay", f"/v1/runs/{RUN}/stats")
    assert stack.rest("environment", "/v1/environments", token="other")["reason"]


def test_the_sdk_and_the_commands_need_no_address_but_the_machines(
    stack: Stack, place: Path
) -> None:
    host = Stack(variables=stack.variables | {"DIALOOP_SERVICES": "127.0.0.1"})
    program = (
        "import asyncio\n"
        "from dialoop import Dialoop\n"
        "async def main():\n"
        "    async with Dialoop() as dialoop:\n"
        "        played = await dialoop.play(await dialoop.task('arithmetic'))\n"
        "        print(len(played.turns), played.failures)\n"
        "asyncio.run(main())\n"
    )
    played = host.run(sys.executable, "-c", program)
    assert re.fullmatch(r"[1-9]\d* \(\)\n", played.stdout), played.stderr
    shown = host.run(dialoop(), "status", RUN)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for name in ("environment", "inference", "replay", "scorer", "trainer"):
        assert re.search(rf"^  {name}\s+127\.0\.0\.1:70\d\d\s+serving", shown.stdout, re.MULTILINE)
    assert "no answer" not in shown.stdout


def dialoop() -> str:
    return str(Path(sys.executable).with_name("dialoop"))


def test_more_collectors_in_mid_run_touch_nothing_else(stack: Stack) -> None:
    before = stack.lives()
    stack.must("up", "--detach", "--scale", "collector=3")
    after = stack.lives()
    assert len(after.pop("collector")) == 3
    del before["collector"]
    assert after == before
    stack.wait_until_healthy("collector")


def test_a_probe_costs_little_and_calls_nobody_who_serves_unhealthy(stack: Stack) -> None:
    for name in ("environment", "trainer", "inference"):
        test = stack.of(name).facts["Config"]["Healthcheck"]["Test"]
        words = ("exec", "-T", name, "python", "-I", "-c", _PROBE_CPU, *test[1:])
        assert float(stack.must(*words)) < 0.3
    for container in stack.containers():
        if container.state == "running":
            assert container.facts["State"]["Health"]["FailingStreak"] == 0, container.service


@pytest.mark.parametrize(
    "service", ["redis", "replay", "scorer", "inference", "environment", "door"]
)
def test_a_service_that_is_killed_comes_back_and_the_job_goes_on(
    service: str, stack: Stack
) -> None:
    others = stack.lives()
    killed = others.pop(service)
    steps = stack.wait_for_steps(1)
    stack.kill(service)
    stack.wait_for_steps(steps + 2)
    stack.wait_until_healthy(service)
    after = stack.lives()
    assert after.pop(service) != killed
    assert after == others  # the door stays without its environment, too


def test_a_collector_and_the_trainer_that_are_killed_come_back(stack: Stack) -> None:
    others = stack.lives()
    for service in ("collector", "trainer"):
        [victim, *_] = [each for each in stack.containers() if each.service == service]
        subprocess.run(["kill", "-9", str(victim.pid)], check=True)
        del others[service]
    stack.wait_for_steps(1)
    stack.wait_until_healthy("trainer", "collector")
    lives = stack.lives()
    assert {name: lives[name] for name in others} == others
    assert stack.of("job").state == "running"  # and so does `docker compose wait job`


def test_docker_kill_is_a_stop_until_the_next_up(stack: Stack) -> None:
    others = stack.lives()
    victim = stack.of("inference")
    stack.run("docker", "kill", victim.id)
    time.sleep(5)
    assert stack.of("inference").state == "exited"  # as docs/deploy.md says
    stack.must("up", "--detach", "--scale", "collector=3")
    stack.wait_until_healthy("inference")
    lives = stack.lives()
    assert lives.pop("inference") != others.pop("inference")
    assert lives == others


def test_a_start_that_forgets_the_job_is_refused_and_names_it(stack: Stack, job: Path) -> None:
    stack.wait_for_steps(2)
    stack.must("down")
    forgetful = Stack(variables={"DIALOOP_TOKEN": TOKEN})
    ended = forgetful.compose("up", "--detach")
    assert ended.returncode != 0
    assert f"The last start here had JOB={job}, and this one does not." in forgetful.log("job")
    forgetful.must("down")


def saved_steps(stack: Stack) -> int:
    """The train steps in the newest checkpoint."""
    program = (
        "import json, pathlib\n"
        f"saved = pathlib.Path('/var/lib/dialoop/runs/{RUN}/checkpoints')\n"
        "newest = saved / json.loads((saved / 'latest.json').read_text())['name']\n"
        "print(json.loads((newest / 'progress.json').read_text())['num_train_steps'])\n"
    )
    words = ("run", "--rm", "--no-deps", "-T", "collector", "python", "-I", "-c", program)
    return int(stack.must(*words).split()[-1])


def test_down_and_up_in_mid_run_go_on_from_the_checkpoint_to_the_end(
    stack: Stack, job: Path
) -> None:
    saved = saved_steps(stack)
    assert saved > 1
    job.write_text(JOB.format(run=RUN, steps=saved + 5))
    stack.must("up", "--detach")
    waited = stack.compose("wait", "job")
    log = stack.log("job")
    assert waited.returncode == 0, stack.tail()
    counts = [int(number) for number in re.findall(r"(\d+) of \d+ train steps", log)]
    assert min(counts[1:]) >= saved - 1, log  # the first line may be of a trainer that restores
    assert counts[-1] == saved + 5
    assert re.search(r"Held-out reward, greedy: 0\.\d+ before, [01]\.\d+ after\.", log)


def test_the_ledger_adds_up_at_the_end(stack: Stack) -> None:
    stats = stack.rest("replay", f"/v1/runs/{RUN}/stats")["stats"]

    def adds_up(counts: dict[str, Any]) -> bool:
        dropped = counts.get("num_trajectories_dropped", {}).values()
        final = int(counts.get("num_trajectories_consumed", 0)) + sum(map(int, dropped))
        return int(counts["num_trajectories_generated"]) == final + int(
            counts.get("num_trajectories_live", 0)
        )

    assert adds_up(stats["training"])
    assert adds_up(stats["evaluation"])
    shown = read_run_file(stack, "trainer.json")
    assert int(stats["training"]["num_trajectories_consumed"]) == shown["num_trajectories_trained"]


def read_run_file(stack: Stack, name: str) -> dict[str, Any]:
    """A JSON file of the run in its volume."""
    path = f"/var/lib/dialoop/runs/{RUN}/{name}"
    content: dict[str, Any] = json.loads(stack.must("exec", "-T", "collector", "cat", path))
    return content


def num_evaluations(stack: Stack) -> int:
    path = f"/var/lib/dialoop/runs/{RUN}/metrics.jsonl"
    words = ("run", "--rm", "--no-deps", "-T", "collector", "cat", path)
    return stack.must(*words).count('"kind": "evaluation"')


def test_a_later_up_ends_at_once_without_evaluating_again(stack: Stack) -> None:
    num_before = num_evaluations(stack)
    assert num_before == 4
    stack.must("down")
    ended = stack.compose("up", "--exit-code-from", "job")
    assert ended.returncode == 0, ended.stderr
    assert "The job has ended." in ended.stdout
    assert num_evaluations(stack) == num_before


def test_the_commands_read_a_run_in_its_volume(stack: Stack) -> None:
    run = f"/var/lib/dialoop/runs/{RUN}"
    inside = ("run", "--rm", "--no-deps", "-T", "collector", "dialoop")
    lines = stack.must(*inside, "show", run, "--list").splitlines()
    assert len(lines) > 10
    assert "memory" not in stack.must(*inside, "audit", run, "--json")
    port = "127.0.0.1:8010:8010"
    served = ("run", "--detach", "--rm", "--no-deps", "--publish", port, "collector")
    name = stack.must(
        *served, "dialoop", "console", run, "--host", "0.0.0.0", "--port", "8010"
    ).strip()
    try:
        deadline = time.monotonic() + 60
        while True:
            page = stack.run("curl", "-sS", "--max-time", "5", "http://127.0.0.1:8010/")
            if page.returncode == 0:
                break
            assert time.monotonic() < deadline, page.stderr
            time.sleep(1)
        assert "<html" in page.stdout.lower()
    finally:
        stack.run("docker", "rm", "--force", name)


MINE = """
run = "mine"
engine = "transformers"
[environment]
use = "trl"
[environment.options]
dataset = "prompts.jsonl"
reward_funcs = ["my_rewards.py:letters"]
heldout_fraction = 0.25
[inference]
max_model_len = 192
[collector]
group_size = 4
max_new_tokens = 16
[warm_start]
num_steps = 0
[train]
num_steps = 2
[evaluation]
num_tasks = 4
every = 0
"""
REWARDS = """
def letters(prompts, completions, **columns):
    return [sum(map(str.isalpha, text)) / (1 + len(text)) for text in completions]
"""


def test_a_users_own_job_model_reward_and_folder_train_in_the_foreground(
    stack: Stack, place: Path
) -> None:
    mine, model, runs = place / "mine", place / "model", place / "runs"
    mine.mkdir()
    (mine / "job.toml").write_text(MINE)
    (mine / "my_rewards.py").write_text(REWARDS)
    prompts = [json.dumps({"prompt": f"Say {number} in words:"}) for number in range(32)]
    (mine / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    made = stack.run(sys.executable, "-m", "dialoop_learning.model.tiny", str(model))
    assert made.returncode == 0, made.stderr
    runs.mkdir()
    shutil.chown(runs, 10001, 10001)
    variables = {
        "JOB": str(mine / "job.toml"),
        "CODE_DIR": str(mine),
        "MODEL_DIR": str(model),
        "RUNS_DIR": str(runs),
    }
    own = Stack(variables=stack.variables | variables)
    ended = own.compose("up", "--exit-code-from", "job")
    assert ended.returncode == 0, ended.stdout[-3000:] + own.tail()
    assert "done, 2 of 2 train steps" in ended.stdout
    assert not [each for each in own.containers() if each.state == "running"]
    own.must("down", "--volumes")
    result = json.loads((runs / "mine" / "trainer.json").read_text("utf-8"))
    assert result["num_train_steps"] == 2
    for words in (
        ["show", str(runs / "mine"), "--list"],
        ["audit", str(runs / "mine")],
        ["console", str(runs / "mine"), "--export", str(place / "page")],
    ):
        read = own.run(dialoop(), *words)
        assert read.returncode == 0, read.stdout + read.stderr


def test_a_changed_line_builds_its_own_layers_alone(stack: Stack, place: Path) -> None:
    copy = place / "source"
    unwanted = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "node_modules")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    changed = copy / "services" / "dialoop_services" / "trainer" / "__main__.py"
    changed.write_text(changed.read_text("utf-8") + "\n# changed\n")
    before = layers_of(stack, "dialoop-trainer")
    other = Stack(variables=stack.variables, source=copy)
    started = time.monotonic()
    other.must("build", "trainer", timeout_s=900)
    took_s = time.monotonic() - started
    after = layers_of(stack, "dialoop-trainer")
    common = [a for a, b in zip(before, after, strict=True) if a[0] == b[0]]
    new = sum(size for _, size in after[len(common) :])
    assert 0 < new < 100_000_000, after
    assert took_s < 120
    stack.must("build", "trainer", timeout_s=900)


def layers_of(stack: Stack, image: str) -> list[tuple[str, int]]:
    """Digest and bytes of each layer, the lowest first."""
    digests = stack.run("docker", "image", "inspect", "-f", "{{json .RootFS.Layers}}", image)
    words = ("history", "--no-trunc", "--human=false", "--format", "{{.Size}}", image)
    sizes = [int(size) for size in stack.run("docker", *words).stdout.split()]
    filled = [size for size in reversed(sizes) if size]
    layers = json.loads(digests.stdout)
    # Instructions that write nothing have a layer only where the builder made one.
    filled = [0] * (len(layers) - len(filled)) + filled
    return list(zip(layers, filled, strict=True))
