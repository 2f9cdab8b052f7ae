"""How busy replicas are: the share of the watcher's last looks at which they had requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.clients.inference import PolicyStatus
from dialoop_ops.cli.status import lines_of
from dialoop_ops.now import watcher as watcher_module
from dialoop_ops.now.snapshot import Now
from dialoop_ops.now.watcher import Watcher


def replica(num_requests: int) -> PolicyStatus:
    values: dict[str, Any] = dict.fromkeys(PolicyStatus.__dataclass_fields__, "")
    values |= {"policy_version": None, "adapters": {}, "data_planes": (), "ready": True}
    return PolicyStatus(**values | {"num_requests_running": num_requests, "num_sampled_tokens": 0})


async def test_the_share_of_looks_with_requests_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "_LOOKS", 4)
    stack: Any = SimpleNamespace(addresses={"inference-0": "", "inference-1": ""}, rest={})
    watcher = Watcher(stack)
    watcher._channels = {}
    counts = iter([9, 1, 0, 3, 0, 2])
    answers: dict[str, PolicyStatus | None] = {}

    async def ask(name: str, _: Any) -> Any:
        return answers.get(name)

    async def health(_: str) -> str:
        return "serving"

    monkeypatch.setattr(watcher, "_ask", ask)
    monkeypatch.setattr(watcher, "_health_of", health)
    for count in counts:
        answers["inference-0"] = replica(count)
        now = await watcher.look({})
    # Of the last four looks; a replica that never answered has no share.
    assert now.busy_shares == {"inference-0": 0.5}
    assert now.as_json()["replicas"]["inference-0"]["busy_share"] == 0.5
    assert "busy:      inference-0 50%" in lines_of(now)


@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        ({"lease_s": 6.0, "train_s": 3.0, "publish_s": 1.0}, 0.3),
        # A publish beside the next step holds nobody up but for the copy of the weights.
        ({"lease_s": 4.0, "train_s": 4.0, "capture_s": 1.0, "wait_s": 1.0, "publish_s": 9.0}, 0.5),
        ({}, None),
    ],
)
def test_the_trainer_is_busy_where_it_does_not_wait(
    seconds: dict[str, float], share: float | None
) -> None:
    trainer: Any = SimpleNamespace(metrics={f"train/{name}": s for name, s in seconds.items()})
    now = Now(
        time=0.0,
        services=(),
        trainer=trainer,
        queue=None,
        replicas={},
        sampled_tokens_per_s=None,
        blocked=(),
    )
    assert now.trainer_busy == share
