"""Groups that cannot be scored or taken in say why and are kept; their neighbours are scored."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from dialoop.trajectory import (
    Failure,
    Group,
    Owner,
    SamplingParams,
)
from dialoop_services.scorer.reference_batches import ReferenceBatches
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.scorer.servicer import Scorer

from tests.support.collector_world import RUN, adds_up, world
from tests.support.samples.scorer_samples import make_group, make_sequence
from tests.support.scorer_world import append, scoring, with_names


class Flat:
    """A reference that finds every token equally likely."""

    def logprobs_of_sampled(self, sequences: Any, temperatures: Any) -> Any:
        return [sequence.inference_logprobs for sequence in sequences]

    def logprobs_of_all(self, token_ids: Any, temperatures: Any) -> Any:
        raise NotImplementedError


def with_failure(group: Group) -> Group:
    """The second member ended by a failure that is not the policy's."""
    first, second = group.trajectories
    failure = Failure(owner=Owner.ENVIRONMENT, reason="DOWN", message="")
    return replace(group, trajectories=(first, replace(second, failures=(failure,))))


async def test_what_cannot_be_scored_is_a_dead_letter_that_says_why_and_the_rest_is_scored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    greedy = SamplingParams(temperature=0.0)
    groups = [
        with_names(make_group(1.0, task_id="alone")),
        with_names(make_group(0.0, 1.0, task_id="good")),
        with_failure(with_names(make_group(0.0, 1.0, task_id="failed"))),
        with_names(make_group(0.0, 1.0, task_id="greedy", sampling=greedy)),
    ]
    caplog.set_level(logging.WARNING)
    async with world() as w:
        assert not [outcome.reason for outcome in await append(w, *groups) if outcome.is_rejected]
        async with scoring(w, Scorer(Scoring(reference=ReferenceBatches(Flat)))):
            await w.until(lambda c: c.num_groups_dropped == {"dead_letter": 3})
            await w.until(lambda c: c.num_groups_scored == 1)
        letters = {letter.group_id: letter for letter in await w.replay.list_dead_letters(RUN)}
        assert {name: letter.reason for name, letter in letters.items()} == {
            "alone": "group_too_small",
            "failed": "unscorable_trajectory",
            "greedy": "invalid_temperature",
        }
        assert letters["failed"].group == groups[2]
        assert adds_up(await w.training())
        assert (await w.replay.get_stats(RUN)).num_redelivered == 0
    for words in ("alone has one", "Trajectory failed.1 failed", "Trajectory greedy.0 was"):
        assert words in caplog.text


@pytest.mark.parametrize(("num_good", "is_said"), [(0, True), (1, False)])
async def test_a_scorer_that_can_score_nothing_says_so_loudly(
    num_good: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    alone = [with_names(make_group(1.0, task_id=f"alone{n}")) for n in range(16)]
    good = [with_names(make_group(0.0, 1.0, task_id=f"good{n}")) for n in range(num_good)]
    async with world() as w:
        await append(w, *alone[:8], *good, *alone[8:])
        async with scoring(w, Scorer(Scoring())):
            await w.until(lambda c: c.num_groups_dropped == {"dead_letter": 16})
            await w.until(lambda c: c.num_groups_scored == num_good)
    errors = [text for text in caplog.messages if "16 groups could not be scored" in text]
    assert bool(errors) == is_said
    assert all("group_too_small" in text for text in errors)


async def test_what_the_queue_refuses_names_the_trajectory_and_leaves_its_lease() -> None:
    ragged = replace(make_sequence(), inference_logprobs=make_sequence().inference_logprobs)
    object.__setattr__(ragged, "inference_logprobs", ragged.inference_logprobs[:1])
    groups = [
        with_names(make_group(0.0, 1.0, task_id="ragged", sequences=(ragged,))),
        with_names(make_group(0.0, task_id="part", size=2)),
        with_names(make_group(0.0, 1.0, task_id="empty", sequences=())),
        with_names(make_group(0.0, 1.0, task_id="good")),
    ]
    async with world() as w:
        outcomes = await append(w, *groups)
        assert [outcome.reason for outcome in outcomes] == [
            "RAGGED",
            "WRONG_SIZE",
            "NO_TRAINABLE_TOKEN",
            "",
        ]
        assert (
            "Trajectory ragged.0, sequence 0: inference_logprobs has 1 values for 2 sampled tokens"
            in outcomes[0].message
        )
        assert "Group empty" in outcomes[2].message
        stats = await w.replay.get_stats(RUN)
    assert stats.num_rejected_appends == 3
    assert (stats.training.num_groups_leased, stats.training.num_groups_unscored) == (3, 1)
