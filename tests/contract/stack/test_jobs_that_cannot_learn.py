"""Jobs from which nothing can be learned: each ends soon, with its exit code and the cause."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import dialoop_ops
import pytest
import torch
from dialoop.environments import ChatEnv, MaxTurns, Rewards
from dialoop.environments.episode import Episode
from dialoop.environments.rewards.functions import TRIAL_ANSWER
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.errors import DialoopError
from dialoop_learning.loss.losses import LossInputs, LossOutput, grpo
from dialoop_services.runtime.exit_reason import ExitReason

FAULTS: list[float] = []
"""When a function of the running job did what is wrong with it."""
ENDS_IN_S = 60.0


def note(value: Any = None) -> Any:
    FAULTS.append(time.monotonic())
    return value


def length(episode: Episode) -> float:
    return (sum(map(ord, episode.answer_text)) % 7) / 7


def nan_reward(episode: Episode) -> float:
    return 0.0 if episode.answer_text == TRIAL_ANSWER else note(float("nan"))


def same_reward(episode: Episode) -> float:
    return note(1.0)


def no_reward(episode: Episode) -> None:
    note()


def hanging_reward(episode: Episode) -> float:
    if episode.answer_text != TRIAL_ANSWER:
        note()
        time.sleep(600.0)
    return 0.0


def failing_reward(episode: Episode) -> float:
    note()
    raise KeyError("target")


def environment(reward: str = "length", repeats: int = 1) -> ChatEnv:
    rows = [{"query": f"Say {number}. " * repeats} for number in range(24)]
    transforms = (Rewards([globals()[reward]], timeout_s=1.0), MaxTurns(1))
    return ChatEnv(name="job", tasks=RowTasks({"train": rows}), transforms=transforms)


async def failing_agent(task: Any, connection: Any) -> Any:
    note()
    raise RuntimeError("no browser")


def _after_its_check(loss: Callable[[LossInputs], LossOutput]) -> Callable[..., LossOutput]:
    """Return the loss, which is a right one for the two made-up answers of the config's check."""

    @wraps(loss)
    def asked(inputs: LossInputs) -> LossOutput:
        return grpo(inputs) if inputs.num_sequences == 2 else loss(inputs)

    return asked


@_after_its_check
def nan_loss(inputs: LossInputs) -> LossOutput:
    return note(LossOutput(inputs.policy_logprobs.sum() * float("nan"), {}))


@_after_its_check
def vector_loss(inputs: LossInputs) -> LossOutput:
    return note(LossOutput(inputs.policy_logprobs, {}))


@_after_its_check
def failing_loss(inputs: LossInputs) -> LossOutput:
    note()
    raise KeyError("advantages")


@_after_its_check
def constant_loss(inputs: LossInputs) -> LossOutput:
    return note(LossOutput(torch.zeros(()), {}))


@_after_its_check
def hanging_loss(inputs: LossInputs) -> LossOutput:
    note()
    time.sleep(600.0)
    return grpo(inputs)


def one_advantage(rewards: list[float]) -> list[float]:
    return note([0.0])


def failing_group_reward(group: Any) -> list[float]:
    note()
    return [1.0 / 0 for _ in group.trajectories]


@dataclass(frozen=True, kw_only=True)
class Hopeless:
    """A job, its exit code, a word of its last line, and which fault has to end it."""

    code: int
    says: str
    fault: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


HERE = "test_jobs_that_cannot_learn.py, line"
PLAYED = "groups failed while they were played, at last:"
EMPTY = "0 of 3 train steps: 100 empty batches in a row"
REFUSED = "updates were refused: the loss is nan"
JOBS = {
    "nan loss": Hopeless(
        code=2, says=f"{REFUSED}.*{HERE}", fault=10, tables={"train": {"loss": nan_loss}}
    ),
    "a rate that is too high": Hopeless(
        code=2,
        says=REFUSED,
        tables={
            "environment": {"use": "arithmetic"},
            "train": {"mode": "sft", "learning_rate": 1e36, "max_grad_norm": 1e30},
        },
    ),
    "nan rewards": Hopeless(
        code=2, says=f"{PLAYED}.*REWARD_NOT_FINITE", fault=60, options={"reward": "nan_reward"}
    ),
    "uniform rewards": Hopeless(
        code=1, says=f"{EMPTY}.*uniform_reward", fault=400, options={"reward": "same_reward"}
    ),
    "no rewards": Hopeless(
        code=1, says=f"{EMPTY}.*no_reward", fault=400, options={"reward": "no_reward"}
    ),
    "failing rewards": Hopeless(
        code=2, says=f"{PLAYED}.*KeyError at {HERE}", fault=60, options={"reward": "failing_reward"}
    ),
    "too long": Hopeless(
        code=1, says="0 of 3 train steps: none of .*no_trainable_token", options={"repeats": 50}
    ),
    "hanging rewards": Hopeless(
        code=2,
        says=rf"{PLAYED}.*took more than 1 s \({HERE} \d+\)",
        fault=60,
        options={"reward": "hanging_reward"},
    ),
    "a hanging loss": Hopeless(
        code=2,
        says=rf"loss function at {HERE} \d+ took more than 1 s",
        fault=1,
        tables={"train": {"loss": hanging_loss, "loss_timeout_s": 1.0}},
    ),
    "a failing agent": Hopeless(
        code=2,
        says=f"{PLAYED}.*RuntimeError at {HERE}",
        fault=60,
        tables={"environment": {"use": environment, "agent": failing_agent}},
    ),
    "a loss of another shape": Hopeless(
        code=2,
        says=rf"{HERE} \d+ returned a tensor",
        fault=2,
        tables={"train": {"loss": vector_loss}},
    ),
    "a failing loss": Hopeless(
        code=2,
        says=f"raised KeyError at {HERE}",
        fault=2,
        tables={"train": {"loss": failing_loss}},
    ),
    "a constant loss": Hopeless(
        code=2,
        says="depends on no weight",
        fault=2,
        tables={"train": {"loss": constant_loss}},
    ),
    "a wrong estimator": Hopeless(
        code=2,
        says="gave 1 advantages for 4 rewards",  # asked with a made-up group, before the start
        fault=2,
        tables={"scorer": {"advantage_estimator": one_advantage}},
    ),
    "a failing group reward": Hopeless(
        code=2,
        says=f"ZeroDivisionError at {HERE}.*10 times",
        fault=10,
        tables={"scorer": {"rewards": [{"name": "own", "use": failing_group_reward}]}},
    ),
}


def named(value: Any) -> Any:
    """Return a table with import paths in place of this module's functions."""
    if isinstance(value, dict):
        return {key: named(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [named(inner) for inner in value]
    return f"{__name__}:{value.__name__}" if isinstance(value, Callable) else value


@pytest.mark.heavy(reason="fifteen jobs in this process, some of a hundred batches")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_cannot_learn_ends_and_says_why(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    config: dict[str, Any] = {
        "run": "hopeless",
        "inference": {"max_model_len": 96},
        "environment": {"use": environment, "options": job.options},
        "collector": {"group_size": 2, "max_new_tokens": 2, "member_retries": 0},
        "train": {"num_steps": 3, "groups_per_train_step": 2, "num_minibatches": 1},
        "evaluation": {"num_tasks": 0, "every": 0},
        "gates": {"rescoring_s": 0},
    }
    for table, values in job.tables.items():
        is_other = table == "environment"
        config[table] = values if is_other else config.get(table, {}) | values
    FAULTS.clear()
    try:
        result = dialoop_ops.train(named(config), in_process=True, quiet=True, folder=tmp_path)
    except DialoopError as error:
        code, last_line = ExitReason.of(error).exit_code, str(error)
    else:
        code, last_line = int(not result.succeeded), result.summary["ending"]
    ended = time.monotonic()
    assert code == job.code
    assert re.search(job.says, last_line, re.DOTALL), last_line
    if job.fault and FAULTS:  # none where a check of the config has found it
        assert ended - FAULTS[min(job.fault, len(FAULTS)) - 1] < ENDS_IN_S
