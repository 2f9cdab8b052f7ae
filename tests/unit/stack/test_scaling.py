"""`dialoop scale` starts and stops processes of a running stack, one at a time and by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.running_stacks import SCALE_FILE
from dialoop_ops.cli.scale import wanted_counts
from dialoop_ops.launch.plan import Needs
from dialoop_ops.stack import scaling
from dialoop_ops.stack.devices import Node, plan_devices
from dialoop_ops.stack.layout import Layout, rest_name
from dialoop_ops.stack.processes.child import Grow, Room, ServiceSpec, Starter
from dialoop_ops.stack.run_dir import RunDir
from dialoop_ops.stack.scaling import Scaling
from dialoop_services.config.file import parse_config

from tests.support.waiting import until

NAMES = ("redis", "replay", "environment", "inference", "scorer", "trainer", "collector")


@dataclass
class Service:
    spec: ServiceSpec
    is_stopping: bool = False


@dataclass
class FakeSupervisor:
    """Notes what is started and stopped."""

    started: list[ServiceSpec] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    tasks: list[asyncio.Future[None]] = field(default_factory=list)

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def start(self, spec: ServiceSpec) -> None:
        self.started.append(spec)
        self.services = [s for s in self.services if s.spec.name != spec.name]
        self.services.append(Service(spec))

    async def stop(self, name: str) -> None:
        next(s for s in self.services if s.spec.name == name).is_stopping = True

    def names(self) -> set[str]:
        return {s.spec.name for s in self.services if not s.is_stopping}


class FakeLog:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, service: str, text: str, **_: str) -> None:
        self.lines.append(text)


class Stack:
    """A running stack as the scaling sees it."""

    def __init__(
        self,
        directory: Path,
        *,
        gpus: int = 0,
        starters: Mapping[str, Starter] | None = None,
        grow: Grow | None = None,
        **config: Any,
    ) -> None:
        job = {"engine": "transformers", "discovery": "registry", **config}
        parsed = parse_config(job, source="job.toml")
        node = Node(gpus=tuple(map(str, range(gpus))))
        ports = {name: 7000 + index for index, name in enumerate(NAMES)}
        self.layout = Layout(
            config=parsed,
            run_dir=RunDir(path=directory, run_id="r-1"),
            ports=ports | {rest_name(name): port + 100 for name, port in ports.items()},
            devices={e.name: e.variables for e in plan_devices(parsed, (node,)).processes},
            starters=starters or {},
            grow=grow,
        )
        self.supervisor, self.log = FakeSupervisor(), FakeLog()
        self.supervisor.services = [
            Service(self.layout.spec(name)) for name in NAMES if name != "redis"
        ]
        scaled = Scaling(self.layout, cast("Any", self.supervisor), cast("Any", self.log))
        self.path = directory / SCALE_FILE
        self.running = asyncio.create_task(scaled.follow())

    def ask(self, **wanted: int) -> None:
        self.path.write_text(json.dumps({"wanted": wanted}))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_POLL_S", 0.01)


async def test_processes_are_started_and_stopped_until_there_are_as_many(tmp_path: Path) -> None:
    (tmp_path / SCALE_FILE).write_text('{"wanted": {"collector": 9}}')  # of an earlier stack
    stack = Stack(tmp_path)
    names = stack.supervisor.names
    assert not stack.path.exists()
    first = names()
    stack.ask(collector=3, inference=2)
    await until(lambda: names() - first == {"collector-1", "collector-2", "inference-1"})
    added = {spec.name: spec for spec in stack.supervisor.started}
    replica = added["inference-1"].environment
    assert replica["DIALOOP_INFERENCE_NAME"] == "inference-1"
    assert replica["DIALOOP_CONFIG"] == str(stack.layout.run_dir.job_file)
    assert replica["DIALOOP_INFERENCE_PORT"] not in {"0", "7003"}
    assert (
        replica["DIALOOP_INFERENCE_SEED"]
        != stack.layout.spec("inference").environment["DIALOOP_INFERENCE_SEED"]
    )
    stack.ask(collector=1, inference=2)
    await until(lambda: names() - first == {"inference-1"})
    stack.ask(collector=2, inference=1)
    await until(lambda: names() - first == {"collector-1"})
    assert not stack.running.done()
    stack.running.cancel()


async def test_a_job_with_fixed_addresses_says_why_it_cannot_grow(tmp_path: Path) -> None:
    stack = Stack(tmp_path, discovery="addresses")
    stack.ask(inference=2)
    await until(lambda: "error" in stack.path.read_text())
    assert (
        'Start the job with discovery = "registry"' in json.loads(stack.path.read_text())["error"]
    )
    assert not stack.supervisor.started
    stack.running.cancel()


async def test_what_a_launcher_placed_elsewhere_does_not_grow_on_this_machine(
    tmp_path: Path,
) -> None:
    async def start(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing starts")

    stack = Stack(tmp_path, starters={"inference": start})
    stack.ask(inference=2)
    await until(lambda: "error" in stack.path.read_text())
    assert "would start on this machine" in json.loads(stack.path.read_text())["error"]
    stack.ask(collector=2)  # which stays with the command
    await until(lambda: "collector-1" in stack.supervisor.names())
    assert {spec.name for spec in stack.supervisor.started} == {"collector-1"}
    stack.running.cancel()


class Cluster:
    """Rooms as a launcher makes them; they are only noted."""

    def __init__(self, *, most: int = 9) -> None:
        self.most = most
        self.taken: list[str] = []
        self.given_back: list[str] = []
        self.moved: dict[str, Callable[[], None]] = {}

    async def start(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the supervisor of this test starts nothing")

    async def grow(self, name: str, on_moved: Callable[[], None]) -> Room:
        if len(self.taken) - len(self.given_back) >= self.most:
            raise Unavailable("Ray had no room.", remedy="Ask for fewer.")
        self.taken.append(name)
        self.moved[name] = on_moved
        host = f"10.0.0.{len(self.taken)}"
        return Room(
            host=host,
            starter=self.start,
            variables={},
            needs=Needs(),
            give_back=lambda: self.given_back.append(host),
        )


async def test_what_a_launcher_placed_grows_where_it_makes_room_and_gives_that_back(
    tmp_path: Path,
) -> None:
    cluster = Cluster()
    starters = dict.fromkeys(NAMES, cluster.start)
    stack = Stack(tmp_path, starters=starters, grow=cluster.grow)
    names = stack.supervisor.names
    first = names()
    stack.ask(collector=2, inference=2)
    await until(lambda: names() - first == {"collector-1", "inference-1"})
    added = {spec.name: spec for spec in stack.supervisor.started}
    replica = added["inference-1"]
    assert replica.starter == cluster.start
    assert replica.address.startswith("10.0.0.2:")
    assert replica.environment["DIALOOP_INFERENCE_ADVERTISED_ADDRESS"] == replica.address
    assert replica.environment["DIALOOP_INFERENCE_HOST"] == "0.0.0.0"
    assert not cluster.given_back
    stack.ask(collector=2, inference=1)
    await until(lambda: cluster.given_back == ["10.0.0.2"])
    stack.ask(collector=1, inference=1)
    await until(lambda: cluster.given_back == ["10.0.0.2", "10.0.0.1"])
    assert names() == first
    stack.running.cancel()


async def test_a_process_of_the_start_comes_back_in_the_room_that_it_had(tmp_path: Path) -> None:
    cluster = Cluster()
    starters = dict.fromkeys(NAMES, cluster.start)
    stack = Stack(tmp_path, starters=starters, grow=cluster.grow)
    await stack.supervisor.stop("collector")
    stack.ask(collector=1)
    await until(lambda: "collector" in stack.supervisor.names())
    assert not cluster.taken
    assert stack.supervisor.started[0].address == stack.layout.address("collector")
    stack.running.cancel()


async def test_without_room_it_is_said_and_what_had_room_stays(tmp_path: Path) -> None:
    cluster = Cluster(most=1)
    stack = Stack(tmp_path, starters=dict.fromkeys(NAMES, cluster.start), grow=cluster.grow)
    stack.ask(collector=3)
    await until(lambda: "error" in stack.path.read_text())
    assert "Ray had no room" in json.loads(stack.path.read_text())["error"]
    await until(lambda: [spec.name for spec in stack.supervisor.started] == ["collector-1"])
    stack.running.cancel()


async def test_an_added_process_whose_machine_is_gone_gets_another_room(tmp_path: Path) -> None:
    cluster = Cluster()
    stack = Stack(tmp_path, starters=dict.fromkeys(NAMES, cluster.start), grow=cluster.grow)
    stack.ask(inference=2)
    await until(lambda: "inference-1" in stack.supervisor.names())
    cluster.moved["inference-1"]()
    await until(lambda: len(stack.supervisor.started) == 2)
    assert stack.supervisor.started[-1].address.startswith("10.0.0.2:")
    assert cluster.given_back == ["10.0.0.1"]
    late = cluster.moved["inference-1"]
    stack.ask(inference=1)
    await until(lambda: len(cluster.given_back) == 2)
    late()  # it was stopped meanwhile, as asked
    cluster.most = 0
    stack.ask(inference=2)
    await until(lambda: "error" in stack.path.read_text())
    assert len(stack.supervisor.started) == 2
    stack.running.cancel()


async def test_a_replica_gets_a_gpu_of_its_own_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scaling,
        "plan_here",
        lambda config, _: plan_devices(config, (Node(gpus=("0", "1", "2")),)),
    )
    stack = Stack(tmp_path, gpus=3, engine="vllm", train={"device": "cuda"})
    stack.ask(inference=2)
    await until(lambda: stack.supervisor.started)
    (spec,) = stack.supervisor.started
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "2"
    stack.ask(inference=3)
    await until(lambda: "error" in stack.path.read_text())
    assert "GPUs: trainer 1" in json.loads(stack.path.read_text())["error"]
    stack.running.cancel()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["collector=4", "inference=2"], {"collector": 4, "inference": 2}),
        (["inference=+1"], {"inference": 3}),
        (["collector=-1"], {"collector": 2}),
    ],
)
def test_counts_are_numbers_or_differences(words: list[str], wanted: dict[str, int]) -> None:
    assert wanted_counts(words, {"collector": 3, "inference": 2}) == wanted


@pytest.mark.parametrize("word", ["trainer=2", "inference", "inference=0", "collector=-3", "=1"])
def test_other_counts_are_refused_with_what_is_possible(word: str) -> None:
    with pytest.raises(InvalidConfig, match=r"collector=2 or inference=2|Leave at least one"):
        wanted_counts([word], {"collector": 3, "inference": 2})
