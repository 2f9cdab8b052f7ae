"""Tokens per second where they arrive in bursts, by hand and by a clock of the tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.clients.inference import PolicyStatus
from dialoop.clients.trainer import Phase
from dialoop.errors import Unavailable
from dialoop_ops.cli.status import lines_of
from dialoop_ops.now import watcher as watcher_module
from dialoop_ops.now.rates import BurstRate, SampledRate
from dialoop_ops.now.watcher import Watcher
from dialoop_ops.stack.report import observer as observer_module
from dialoop_ops.stack.report.live import figures_of
from dialoop_ops.stack.report.observer import Observer

ANSWERS, ANSWER_TOKENS, ANSWER_S = 16, 500, 40
"""So many answers at a time, of so many tokens, which begin together and end together."""
RATE = ANSWERS * ANSWER_TOKENS / ANSWER_S
STEP_TOKENS, STEP_S = 9000, 45


def policy(num_sampled: int, num_running: int) -> PolicyStatus:
    values: dict[str, Any] = dict.fromkeys(PolicyStatus.__dataclass_fields__, "")
    values |= {"policy_version": None, "adapters": {}, "data_planes": (), "ready": True}
    return PolicyStatus(
        **values | {"num_sampled_tokens": num_sampled, "num_requests_running": num_running}
    )


def sampled_by(now: float, *, begin: float, end: float = 1e9) -> PolicyStatus:
    """A replica at that moment, which samples from `begin` on until `end`."""
    num_bursts = int((min(now, end) - begin) // ANSWER_S) if now >= begin else 0
    return policy(ANSWERS * ANSWER_TOKENS * num_bursts, ANSWERS if begin <= now < end else 0)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    for module in (observer_module, watcher_module):
        monkeypatch.setattr(module, "time", ticking)
    return ticking


async def test_the_live_view_shows_the_rate_of_a_run_whose_answers_end_in_bursts(
    clock: Clock,
) -> None:
    """Looks a second apart; nothing ends between most of them, and the figure is right at all."""

    async def get_policy() -> PolicyStatus:
        return sampled_by(clock.now, begin=10, end=410)

    async def get_status() -> Any:
        num_steps = int(max(0, min(clock.now, 460) - 10) // STEP_S)
        return SimpleNamespace(
            phase=Phase.WARM_START if clock.now < 10 else Phase.TRAINING,
            num_train_steps=num_steps,
            policy_version=None,
            alarms=(),
            metrics={"train/num_trained_tokens": float(STEP_TOKENS)} if num_steps else {},
        )

    async def get_stats(_: str) -> Any:
        raise Unavailable("away")

    trainer, replay = SimpleNamespace(get_status=get_status), SimpleNamespace(get_stats=get_stats)
    replica: Any = SimpleNamespace(get_policy=get_policy)
    observer = Observer("run", trainer, replay, [replica, replica])  # type: ignore[arg-type]
    shown: dict[int, str] = {}
    for second in range(700):
        clock.now = float(second)
        snapshot = await observer.snapshot()
        shown[second] = figures_of(snapshot)["tokens/s"]
    # Two replicas, each idle until second 10: a look at which nothing runs knows all there is.
    assert snapshot.num_sampled_tokens == 2 * ANSWERS * ANSWER_TOKENS * 10
    assert {shown[second] for second in range(1, 10)} == {"0 generated, 0 trained"}
    assert {shown[second] for second in range(11, 50)} == {"-"}
    assert {shown[second].split(",")[0] for second in range(50, 90)} == {"320 generated"}  # of 50 s
    assert {shown[second].split(",")[0] for second in range(130, 411)} == {"400 generated"}
    assert {shown[second].split(", ")[1] for second in range(55, 100)} == {"164 trained"}  # of 55 s
    assert {shown[second].split(", ")[1] for second in range(145, 461)} == {"200 trained"}
    # Sampling has ended: the last minute forgets it. Training hangs: that shows after a while.
    assert {shown[second].split(",")[0] for second in range(470, 700)} == {"0 generated"}
    assert shown[500].split(", ")[1] == "200 trained"
    assert 50 < float(shown[699].split(", ")[1].removesuffix(" trained")) < 100


async def test_a_watcher_that_comes_later_waits_for_two_ends_before_it_says_a_rate(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Watcher(SimpleNamespace(addresses={"inference-0": ""}, rest={}))  # type: ignore[arg-type]
    watcher._channels = {}

    async def ask(name: str, _: Any) -> Any:
        return sampled_by(clock.now, begin=0) if name == "inference-0" else None

    async def health(_: str) -> str:
        return "serving"

    monkeypatch.setattr(watcher, "_ask", ask)
    monkeypatch.setattr(watcher, "_health_of", health)
    rates = {}
    for second in range(75, 400):
        clock.now = float(second)
        now = await watcher.look({})
        rates[second] = now.sampled_tokens_per_s
    assert {rates[second] for second in range(75, 120)} == {None}
    assert {rates[second] for second in range(120, 400)} == {RATE}
    assert f"sampling:  {RATE:.0f} tokens/s" in lines_of(now)
    assert now.as_json()["sampled_tokens_per_s"] == RATE


def looks(rate: BurstRate, *counted: tuple[float, int]) -> list[float | None]:
    """What a rate says at these moments of tokens that were counted since the look before."""
    return [rate.look(tokens, now, is_idle=False) for now, tokens in counted]


def test_a_burst_that_two_looks_saw_is_no_rate_by_itself() -> None:
    rate = BurstRate()
    assert looks(rate, (0, 100), (1, 100), (30, 0)) == [None, None, None]
    # Half of the next burst is seen at first, then all of it: 200 tokens in the 100 s since.
    assert looks(rate, (100, 100), (101, 100)) == [100 / 99, 2.0]


def test_answers_that_end_one_by_one_have_the_rate_of_the_last_minute() -> None:
    rate = BurstRate()
    slow, fast = ([(float(n), tokens) for n in range(100)] for tokens in (10, 30))
    said = looks(rate, *slow, *((100 + now, tokens) for now, tokens in fast))
    assert said[5:100] == [10.0] * 95
    assert 10 < (said[130] or 0) < 30
    assert said[165:] == [30.0] * 35


def test_a_replica_that_was_started_again_counts_from_0_and_a_silent_one_is_left_out() -> None:
    sampled = SampledRate()

    def two(first: int, second: int) -> dict[str, PolicyStatus]:
        return {"a": policy(first, 0), "b": policy(second, 0)}

    assert sampled.look(two(1000, 0), 0.0) is None
    assert sampled.look(two(1600, 100), 10.0) == 70.0
    assert sampled.look({"a": None, "b": policy(300, 0)}, 20.0) == 45.0
    assert sampled.look(two(300, 300), 30.0) == 40.0  # 600 + 300 of a, 300 of b
    assert sampled.total == 1600 + 300 + 300
    assert sampled.look({"a": None, "b": None}, 40.0) == 40.0  # nobody knows better
