"""How to sample: what is refused, and which distribution the log-probs are then of."""

from __future__ import annotations

import pytest
from dialoop.errors import InvalidInput
from dialoop.trajectory import Distribution, SamplingParams
from dialoop.v1 import trajectory_pb2
from dialoop.wire.records import SAMPLING


@pytest.mark.parametrize(
    ("parameters", "distribution", "alters"),
    [
        ({}, Distribution.RAW, False),
        ({"temperature": 1.0}, Distribution.RAW, False),
        ({"temperature": 0.0}, Distribution.RAW, False),
        ({"temperature": 0.0, "top_k": 3}, Distribution.RAW, True),
        ({"repetition_penalty": 1.0}, Distribution.RAW, False),
        ({"temperature": 0.5}, Distribution.PROCESSED, False),
        ({"top_p": 0.5}, Distribution.PROCESSED, True),
        ({"repetition_penalty": 1.5}, Distribution.PROCESSED, True),
        ({"repetition_penalty": 0.5, "temperature": 0.0}, Distribution.PROCESSED, True),
    ],
)
def test_log_probs_are_raw_only_where_sampling_changes_nothing(parameters, distribution, alters):
    sampling = SamplingParams(**parameters)
    assert (sampling.distribution, sampling.alters) == (distribution, alters)


@pytest.mark.parametrize("penalty", [0.0, -1.0, float("inf"), float("nan")])
def test_a_penalty_that_is_not_above_zero_is_refused(penalty):
    with pytest.raises(InvalidInput, match="repetition_penalty"):
        SamplingParams(repetition_penalty=penalty)


@pytest.mark.parametrize("off", [0, -1])
def test_a_top_k_that_is_off_elsewhere_is_absent(off):
    assert SamplingParams(top_k=off) == SamplingParams()
    over_the_wire = trajectory_pb2.SamplingParams(top_k=off)
    assert SAMPLING.from_proto(over_the_wire) == SamplingParams()
    assert not SAMPLING.to_proto(SamplingParams(top_k=off)).HasField("top_k")


def test_any_other_top_k_below_one_is_refused():
    with pytest.raises(InvalidInput, match="top_k is -2"):
        SamplingParams(top_k=-2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 2.5},
        {"max_new_tokens": 8.0},
        {"max_new_tokens": True},
        {"seed": "x"},
        {"seed": 1.5},
        {"top_logprobs": 2.5},
        {"top_logprobs": True},
        {"top_logprobs": None},
    ],
)
def test_what_counts_is_a_whole_number(wrong):
    with pytest.raises(InvalidInput, match="as a whole number") as caught:
        SamplingParams(**wrong)
    assert caught.value.reason == "INVALID_SAMPLING"


def test_a_penalty_survives_the_wire():
    sampling = SamplingParams(repetition_penalty=1.5)
    assert SAMPLING.from_proto(SAMPLING.to_proto(sampling)) == sampling
