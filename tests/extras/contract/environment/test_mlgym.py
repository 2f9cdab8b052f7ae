"""Row 51: MLGym behind the environment service, against a fake of what is used of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop.trajectory import DoneReason, Owner
from dialoop_extras.mlgym import mlgym
from dialoop_ops.conformance.environment.checks import check_environment

from tests.support.environment_doors import DOORS, at, open_session, play, reason_of, texts

doors = pytest.mark.parametrize("door", DOORS)


@dataclass
class Bench:
    """A workspace whose score is what was last written; MLGym's names, types and orders."""

    name: str
    made: list[Bench]
    score: float = 0.0
    is_closed: bool = False
    ran: list[str] = field(default_factory=list)
    task: Any = None
    seed: int | None = None

    @property
    def task_args(self) -> Any:
        return SimpleNamespace(description=f"Improve {self.name}.", id=self.name)

    def reset(self, *, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.made.append(self)
        self.seed = seed
        self.task = SimpleNamespace(args=SimpleNamespace(baseline_scores=[{"Score": 0.25}]))
        if self.name == "broken":
            raise RuntimeError("no docker")
        return {"observation": None}, {}

    def step(self, action: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        assert threading.current_thread() is not threading.main_thread()
        self.ran.append(action)
        verb, _, rest = action.partition(" ")
        if verb == "write":
            self.score = float(rest)
            return "", 0, False, {"score": []}
        if verb in ("validate", "submit"):
            status = {"exit_status": "submitted"} if verb == "submit" else {}
            return "Evaluated.", 0, verb == "submit", {"score": [{"Score": self.score}], **status}
        if verb == "crash":
            return "RESTARTING", 0, True, {"score": [], "exit_status": "early_exit"}
        if verb == "raise":
            raise RuntimeError("secret pipe")
        return f"ran {action}", 0, False, {"score": []}

    def close(self) -> None:
        self.is_closed = True


def make_environment(**options: Any) -> tuple[Any, list[Bench]]:
    benches: list[Bench] = []
    environment = mlgym(
        tasks=["titanic", "broken"], make=lambda task: Bench(task, benches), **options
    )
    return environment, benches


def block(command: str) -> str:
    return f"Let me see.\n```\n{command}\n```"


@doors
async def test_51_the_reward_is_the_evaluation_minus_the_baseline(door):
    environment, benches = make_environment()
    async with at(door, environment) as client:
        opening = await open_session(client, "mlgym", task_key="titanic", seed=7)
        assert texts(opening)[-1] == "Improve titanic."
        outcomes = await play(client, block("ls"), block("write 0.75"), block("submit"))
        assert texts(outcomes[0])[-1] == "ran ls\n(9 steps left)"
        assert not outcomes[1].rewards
        last = outcomes[-1]
        assert last.done_reason is DoneReason.SUBMITTED
        assert [(r.name, r.value, r.success) for r in last.rewards] == [("mlgym", 0.5, True)]
    assert benches[0].ran == ["ls", "write 0.75", "submit"]
    assert benches[0].seed == 7
    assert benches[0].is_closed


@doors
async def test_51_ill_formed_answers_run_nothing_and_cost_what_was_said(door):
    environment, benches = make_environment(format_penalty=0.1)
    async with at(door, environment) as client:
        await open_session(client, "mlgym", task_key="titanic")
        outcomes = await play(
            client,
            "just ls",
            block("ls") + "\n" + block("pwd"),
            block("write 0.5"),
            block("submit"),
        )
        assert "your answer has 0" in texts(outcomes[0])[-1]
        assert "your answer has 2" in texts(outcomes[1])[-1]
        rewards = {r.name: r.value for r in outcomes[-1].rewards}
        assert rewards == {"mlgym": 0.25, "format": pytest.approx(-0.2)}
    assert benches[0].ran == ["write 0.5", "submit"]


@doors
async def test_51_ten_steps_end_it_and_what_was_validated_counts(door):
    environment, _ = make_environment()
    async with at(door, environment) as client:
        await open_session(client, "mlgym", task_key="titanic")
        answers = [block("write 1"), block("validate"), *[block("ls")] * 8]
        last = (await play(client, *answers))[-1]
        assert (last.truncated, last.done_reason) == (True, DoneReason.MAX_TURNS)
        assert [r.value for r in last.rewards] == [0.75]
        await open_session(client, "mlgym", "idle", task_key="titanic")
        last = (await play(client, *[block("ls")] * 10, session="idle"))[-1]
        assert [(r.value, r.success) for r in last.rewards] == [(0.0, False)]


@doors
@pytest.mark.parametrize(
    ("command", "reason"), [("crash", "CONTAINER_LOST"), ("raise", "MLGYM_FAILED")]
)
async def test_51_what_mlgym_breaks_is_a_failure_and_no_reward(door, command, reason):
    environment, benches = make_environment()
    async with at(door, environment) as client:
        await open_session(client, "mlgym", task_key="titanic")
        (outcome,) = await play(client, block(command))
        assert not outcome.rewards
        (failure,) = outcome.failures
        assert (failure.owner, failure.reason) == (Owner.ENVIRONMENT, reason)
        assert "secret" not in failure.message
    assert benches[0].is_closed


@doors
async def test_51_a_task_that_cannot_be_set_up_is_unavailable_and_leaves_nothing(door):
    environment, benches = make_environment()
    async with at(door, environment) as client:
        await client.create_session("s", "mlgym")
        refused = client.reset("s", episode=1, task_key="broken")
        assert await reason_of(refused) == "MLGYM_FAILED"
    assert all(bench.is_closed for bench in benches)


async def test_51_it_passes_the_conformance_kit():
    environment, benches = make_environment()
    environment.tasks._tasks["train"].pop("broken")
    findings = await check_environment(
        environment, answers=[block("write 0.5"), block("submit")], num_tasks=1
    )
    assert [(f.check, f.problem) for f in findings if not f.is_ok] == []
    assert all(bench.is_closed for bench in benches)


async def test_51_two_metrics_need_a_choice():
    environment, _ = make_environment(metric="F1")
    assert environment.commands.number({"F1": 0.5, "loss": 3}) == 0.5
    with pytest.raises(InvalidConfig, match="F1, loss"):
        make_environment()[0].commands.number({"F1": 0.5, "loss": 3})


async def test_51_without_the_package_it_says_so():
    environment = mlgym(tasks=["titanic"])
    async with at("in_process", environment) as client:
        await client.create_session("s", "mlgym")
        refused = client.reset("s", episode=1, task_key="titanic")
        assert await reason_of(refused) == "PACKAGE_MISSING"
