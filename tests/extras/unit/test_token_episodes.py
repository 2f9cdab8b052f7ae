"""Rows of an episode that continues token ids keep the columns of their tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from dialoop.chat import ChatHistory
from dialoop.episode import Sample
from dialoop.sequences import Along, Column, PolicyVersion, Source, sequence_of
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_extras.token_episodes import RecordedPolicy

VERSION = PolicyVersion(lineage="main", number=1)


def sample_of(prompt: list[int], answer: list[int]) -> Sample:
    """Each token's experts are its own number, once in each of two layers."""
    sampled = {"source": Source.MODEL, "policy_version": VERSION}
    sequence = sequence_of(
        [(prompt, {"source": Source.PROMPT}), (answer, sampled)], logprobs=[-1.0] * len(answer)
    )
    values = np.repeat(np.array([*prompt, *answer], dtype="u1"), 2).reshape(-1, 2, 1)
    column = Column(values=values, along=Along.TOKENS)
    return Sample(
        history=ChatHistory(),
        sequence=replace(sequence, columns={"routed_experts": column}),
        stop_reason=StopReason.STOP,
        sampling=SamplingParams(),
    )


async def test_a_second_call_continues_the_row_with_the_columns_of_its_new_tokens() -> None:
    answers = [sample_of([1, 2, 3], [4, 5]), sample_of([1, 2, 3, 4, 5, 6, 7], [8])]

    class Policy:
        async def generate(self, **_: Any) -> tuple[Sample, ...]:
            return (answers.pop(0),)

    policy = RecordedPolicy(Policy(), SimpleNamespace(digest=""))  # type: ignore[arg-type]
    policy.begin_episode()
    await policy.generate()
    await policy.generate()
    (row,) = policy.rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.columns["routed_experts"].values[:, 0, 0].tolist() == row.token_ids.tolist()
