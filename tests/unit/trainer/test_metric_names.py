"""docs/metrics.md has every name that a run writes, and no name that nothing writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop import testing
from dialoop.trajectory import Reward, StopReason, Turn
from dialoop_learning.loss.corrections import Correction
from dialoop_learning.loss.facts import LOSSES
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.loss.objective import combine_metrics
from dialoop_learning.packing.rows import TokenRow
from dialoop_services.trainer.data.batches import TrajectoryFigures, metrics_of
from dialoop_services.trainer.job.evaluation import EvaluationResult

from tests.support.metrics.names import EVERY_ROW, general, names_in_docs
from tests.support.samples.loss_samples import inputs_of
from tests.support.samples.scorer_samples import make_group
from tests.support.trainer_world import World, worlds

ROOT = Path(__file__).parents[3]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path) as make:
        yield make


async def test_every_name_that_a_run_writes_is_explained(world: Callable[..., World]) -> None:
    here = world(num_steps=2)
    here.offer("a", "b")
    here.offer("c", "d")
    await here.run()
    kinds = names_in_docs()
    assert {"train", "publish"} <= {row["kind"] for row in here.rows}
    for row in here.rows:
        names = set(map(general, row)) - kinds[EVERY_ROW]
        assert names <= kinds[row["kind"]], (row["kind"], names - kinds[row["kind"]])


def test_every_name_of_an_evaluation_is_explained() -> None:
    result = EvaluationResult(
        mean_reward=0.0,
        accuracy=None,
        tool_call_rate=0.0,
        num_trajectories=1,
        num_failed=0,
        oldest=None,
        newest=None,
        trial_rewards={"trial_reward/1": 1.0},
    )
    names = {*map(general, result.row()), "label", "due_train_step"}
    assert names_in_docs()["evaluation"] == names


def names_of_losses() -> set[str]:
    names: set[str] = set()
    for name, facts in LOSSES.items():
        extras: list[dict[str, Any]] = [{"kl_coeff": 0.1, "kl_inference_coeff": 0.1}]
        if facts.needs_advantages and not facts.imitates:
            extras.append({"correction": Correction(kind="tis")})
        for extra in extras:
            inputs = inputs_of(
                [-1.0],
                [-1.0],
                proximal_logprobs=[-1.0],
                ref_logprobs=[-1.5],
                advantages=[1.0],
                entropy=torch.ones(1),
                staleness=torch.zeros(1),
            )
            output = load_objective(name, entropy_coeff=0.1, **extra)(inputs)
            names |= combine_metrics([output.metrics]).keys()
    return names


def test_every_metric_of_every_loss_is_explained() -> None:
    names = names_of_losses()
    assert names <= names_in_docs()["train"], names - names_in_docs()["train"]


def test_no_name_is_explained_that_nothing_writes() -> None:
    source = "".join(
        path.read_text("utf-8")
        for room in ("dialoop_services/trainer", "dialoop_learning")
        for path in (ROOT / "services" / room).rglob("*.py")
    )
    for names in names_in_docs().values():
        for name in names - names_of_losses():
            stem = re.sub("<(name|number)>", r"{\1}", name)
            assert re.search(
                rf"""["']{re.escape(stem)}["']|\b{re.escape(stem)}\s?[:=]""", source
            ), name


def test_rewards_by_name_lengths_and_shares_are_those_computed_by_hand() -> None:
    first, second = make_group(0.0, 1.0).trajectories
    turn = Turn(
        message_start=1,
        num_messages=1,
        rewards=(Reward(name="right", value=1.0), Reward(name="brief", value=4.0, weight=0.5)),
        stop_reason=StopReason.LENGTH,
        num_tool_calls=2,
    )
    group = testing.group(replace(first, turns=(turn, turn)), replace(second, turns=()))
    metrics = metrics_of([TrajectoryFigures.of(t) for t in group.trajectories])
    assert metrics == {
        "reward": 3.0,
        "reward_std": 3.0,
        "tool_call_rate": 0.5,
        "truncated_share": 0.5,
        "response_tokens_mean": 2.0,
        "response_tokens_min": 2,
        "response_tokens_max": 2,
        "rewards/right/mean": 1.0,
        "rewards/right/std": 1.0,
        "rewards/brief/mean": 2.0,
        "rewards/brief/std": 2.0,
    }
    trials = [
        replace(t, labels={"trial_rewards": r})
        for t, r in zip(group.trajectories, ("1 2", "0 4"), strict=True)
    ]
    foreign = replace(group.trajectories[0], labels={"trial_rewards": "of an agent"})
    metrics = metrics_of([TrajectoryFigures.of(t) for t in (*trials, foreign)])
    assert (metrics["trial_reward/1"], metrics["trial_reward/2"]) == (0.5, 3.0)
    assert metrics_of([]) == {"reward": 0.0, "tool_call_rate": 0.0}


async def test_the_debug_table_is_written_on_request_with_what_the_loss_reads(
    world: Callable[..., World],
) -> None:
    here = world(num_steps=2, debug_table_every=2)

    def rows_to_train(sequences: Any, *, current: Any) -> list[TokenRow]:
        return [
            TokenRow.from_sequence(
                s.sequence,
                group_index=s.group_index,
                trajectory_index=s.trajectory_index,
                current=current,
            )
            for s in sequences
        ]

    here.learner.rows_to_train = rows_to_train  # type: ignore[method-assign, assignment]
    here.learner.logprobs_of_rows = lambda rows: [  # type: ignore[attr-defined]
        torch.tensor([-0.25, -0.75]) for _ in rows
    ]
    here.offer("a", "b")
    here.offer("c", "d")
    await here.run()
    lines = (here.run_dir / "debug_table.jsonl").read_text("utf-8").splitlines()
    table = [json.loads(line) for line in lines]
    ids = [(row["train_step"], row["group_id"], row["trajectory_id"]) for row in table]
    assert ids == [(2, g, f"{g}-{a}") for g in "cd" for a in (1.0, -1.0)]
    first = table[0]
    assert first["policy_version"] == "main-2"
    assert first["response_tokens"] == [6, 7]
    assert first["response_positions"] == [1, 2]
    assert first["policy_logprobs"] == [-0.25, -0.75]
    assert first["inference_logprobs"] == [-0.5, -1.5]
    assert first["advantages"] == [1.0, 1.0]
    assert (first["ref_logprobs"], first["num_tokens"]) == (None, 3)
