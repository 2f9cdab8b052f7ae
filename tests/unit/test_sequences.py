from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dialoop.errors import InvalidSequence
from dialoop.reasons import Reason
from dialoop.sequences import (
    Along,
    Column,
    PolicyVersion,
    Segment,
    Sequence,
    Source,
    sequence_of,
)

V4 = PolicyVersion(lineage="main", number=4)
V5 = PolicyVersion(lineage="main", number=5)


def example() -> Sequence:
    return sequence_of(
        [
            ([5, 8, 2], {"source": Source.PROMPT}),
            ([11, 12], {"source": Source.MODEL, "policy_version": V4}),
            ([7], {"source": Source.MODEL, "policy_version": V5}),
            ([], {"source": Source.TEMPLATE}),
            ([9], {"source": Source.TOOL}),
        ],
        logprobs=[-0.1, -2.3, -0.4],
    )


def test_masks_and_versions_come_from_the_segment_table():
    sequence = example()
    assert sequence.response_mask().tolist() == [False] * 3 + [True] * 3 + [False]
    assert sequence.num_model_tokens == 3
    assert sequence.policy_versions == (V4, V5)
    assert sequence.token_versions() == (V4, V4, V5)


def test_an_extension_shifts_its_segments():
    added = sequence_of([([1], {"source": Source.TEMPLATE})])
    longer = example().extended_by(added)
    assert longer.segments[-1] == Segment(start=7, length=1, source=Source.TEMPLATE)
    assert longer.inference_logprobs.tolist() == example().inference_logprobs.tolist()


def with_columns(sequence: Sequence) -> Sequence:
    """Number the tokens, and the sampled tokens."""
    return replace(
        sequence,
        columns={
            "place": Column(values=np.arange(len(sequence)), along=Along.TOKENS),
            "teacher_logprobs": Column(
                values=-np.arange(sequence.num_model_tokens, dtype=np.float32), along=Along.SAMPLED
            ),
        },
    )


def numbers(sequence: Sequence, name: str) -> list[float]:
    return [float(value) for value in sequence.columns[name].values]


def test_columns_follow_their_tokens():
    whole = with_columns(example())
    context = whole.as_context(5)
    assert numbers(context, "place") == [0, 1, 2, 3, 4]
    assert "teacher_logprobs" not in context.columns
    longer = context.extended_by(with_columns(example()))
    assert numbers(longer, "place") == [0, 1, 2, 3, 4, *range(7)]
    assert numbers(longer, "teacher_logprobs") == [0, -1, -2]
    two_turns = replace(
        whole, segments=(*whole.segments[:2], replace(whole.segments[2], turn=1), whole.segments[3])
    )
    first, second = two_turns.of_turns(0, 1), two_turns.of_turns(1, 2)
    assert (numbers(first, "place"), numbers(first, "teacher_logprobs")) == (
        [0, 1, 2, 3, 4],
        [0, -1],
    )
    assert (numbers(second, "place"), numbers(second, "teacher_logprobs")) == (
        [0, 1, 2, 3, 4, 5],
        [-2],
    )
    with pytest.raises(InvalidSequence, match="place") as caught:
        whole.extended_by(example())  # nobody knows its places
    assert caught.value.reason is Reason.RAGGED


@pytest.mark.parametrize("name", ["token_ids", "advantage", "Routed", "", "a" * 65])
def test_a_column_has_a_name_of_its_own(name):
    column = Column(values=np.zeros(7), along=Along.TOKENS)
    with pytest.raises(InvalidSequence) as caught:
        replace(example(), columns={name: column})
    assert caught.value.reason is Reason.BAD_COLUMN


def test_as_context_nothing_is_trained_again():
    context = example().as_context()
    assert context.num_model_tokens == 0
    assert context.token_ids.tolist() == example().token_ids.tolist()
    assert len(context.inference_logprobs) == 0


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(start=0, length=1, source=Source.PROMPT),),
        (Segment(start=1, length=1, source=Source.PROMPT),),
        (
            Segment(start=0, length=2, source=Source.PROMPT),
            Segment(start=1, length=1, source=Source.TOOL),
        ),
        (Segment(start=0, length=2, source=Source.MODEL),),
        (Segment(start=0, length=2, source=Source.TOOL, policy_version=V4),),
    ],
)
def test_a_table_that_does_not_fit_its_tokens_is_refused(segments):
    with pytest.raises(InvalidSequence):
        Sequence(token_ids=np.array([1, 2], dtype=np.int32), segments=segments)


@pytest.mark.parametrize("name", ["inference_logprobs", "ref_logprobs", "token_advantages"])
def test_values_are_one_per_sampled_token_or_none(name):
    whole = example()
    with pytest.raises(InvalidSequence) as caught:
        Sequence(
            token_ids=whole.token_ids,
            segments=whole.segments,
            **{name: np.zeros(7, dtype=np.float32)},
        )
    assert caught.value.reason == "RAGGED"


def test_staleness_is_judged_within_a_lineage():
    assert V5.staleness_of(V4) == 1
    with pytest.raises(InvalidSequence):
        V5.staleness_of(PolicyVersion(lineage="other", number=4))


def test_equality_looks_at_every_value():
    assert example() == example()
    assert example() != example().as_context()
    assert example() != "something else"
