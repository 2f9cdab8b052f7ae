"""How long the oldest groups wait, and which life of each service answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.clients.registry import ServiceInstance
from dialoop.clients.replay import LedgerCounts, ReplayStats
from dialoop_ops.cli.status import lines_of
from dialoop_ops.now.watcher import Watcher


def counts(**oldest_s: float) -> LedgerCounts:
    zero: dict[str, Any] = dict.fromkeys(LedgerCounts.__dataclass_fields__, 0)
    maps = {"num_groups_dropped": {}, "num_trajectories_dropped": {}, "oldest_s": oldest_s}
    return LedgerCounts(**zero | maps)


def stats(training: LedgerCounts, evaluation: LedgerCounts) -> ReplayStats:
    values: dict[str, Any] = dict.fromkeys(ReplayStats.__dataclass_fields__, 0)
    return ReplayStats(**values | {"training": training, "evaluation": evaluation})


def instance(name: str, address: str, epoch: int) -> ServiceInstance:
    return ServiceInstance(role=name.partition("-")[0], name=name, address=address, epoch=epoch)


async def test_now_has_the_age_of_the_oldest_and_the_incarnation_of_each_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {"collector": "h:1", "inference-0": "h:2", "scorer": "h:3", "replay": "h:4"}
    watcher = Watcher(SimpleNamespace(addresses=addresses, rest={}, run_id="r"))  # type: ignore[arg-type]
    queue = stats(counts(offered=70.0, leased=12.4, scored=3.0), counts(leased=9.0))
    # A replica that was killed and started again under a new epoch; its old lease has not ended.
    instances = (instance("collector-a", "h:1", 3), *(instance("gpu-0", "h:2", e) for e in (4, 7)))

    async def ask(name: str, call: Any) -> Any:
        if name != "replay":
            return None
        return instances if call == watcher._instances else queue

    async def health(_: str) -> str:
        return "serving"

    monkeypatch.setattr(watcher, "_ask", ask)
    monkeypatch.setattr(watcher, "_health_of", health)
    processes = {"scorer": {"state": "ready", "num_restarts": 2}}
    now = await watcher.look(processes)
    assert {each.name: each.incarnation for each in now.services} == {
        "collector": "epoch 3",
        "inference-0": "epoch 7",
        "scorer": "process 3",
        "replay": "",
    }
    assert now.as_json()["queue"]["oldest_s"] == {
        "training": {"tasks offered": 70.0, "playing": 12.4, "scored": 3.0},
        "evaluation": {"playing": 9.0},
    }
    lines = lines_of(now)
    oldest = "tasks offered 70 s, playing 12 s, scored 3 s, playing (evaluation) 9 s"
    assert f"oldest:    {oldest}" in lines
    assert any(line.startswith("inference-0") and "serving, epoch 7" in line for line in lines)


async def test_a_registry_that_does_not_answer_leaves_the_processes_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack: Any = SimpleNamespace(addresses={"collector": "h:1"}, rest={}, run_id="r")
    watcher = Watcher(stack)

    async def ask(*_: Any) -> None:
        return None

    async def health(_: str) -> str:
        return "does not answer"

    monkeypatch.setattr(watcher, "_ask", ask)
    monkeypatch.setattr(watcher, "_health_of", health)
    now = await watcher.look({"collector": {"state": "ready", "num_restarts": 0}})
    assert [each.incarnation for each in now.services] == ["process 1"]
    assert not [line for line in lines_of(now) if line.startswith("oldest:")]
