"""Sampling in the names of transformers and vLLM: what it means here, and what is refused."""

from __future__ import annotations

import pytest
from dialoop.errors import DialoopError, DialoopWarning, InvalidInput, Unsupported
from dialoop.trajectory import SamplingParams
from dialoop_extras.compat.sampling import generate_options, read_generate_options


@pytest.mark.parametrize(
    ("parameters", "sampling", "num_samples"),
    [
        ({}, SamplingParams(), 1),
        ({"max_tokens": 8, "n": 4}, SamplingParams(max_new_tokens=8), 4),
        ({"num_return_sequences": 3, "num_samples": 3}, SamplingParams(), 3),
        ({"stop_sequences": ["a", "b"]}, SamplingParams(stop=("a", "b")), 1),
        ({"stop": "a", "stop_strings": "a"}, SamplingParams(stop=("a",)), 1),
        ({"do_sample": False}, SamplingParams(temperature=0.0), 1),
        ({"do_sample": False, "temperature": 0}, SamplingParams(temperature=0), 1),
        ({"do_sample": True, "temperature": 0.5}, SamplingParams(temperature=0.5), 1),
        ({"top_k": -1, "top_p": None}, SamplingParams(), 1),
        ({"repetition_penalty": 1.5}, SamplingParams(repetition_penalty=1.5), 1),
        ({"num_beams": 1, "logprobs": 1, "presence_penalty": 0.0}, SamplingParams(), 1),
        ({"logprobs": 5}, SamplingParams(top_logprobs=5), 1),
        ({"top_logprobs": 2, "constraint": "{}", "max_tokens": 8},
         SamplingParams(top_logprobs=2, constraint="{}", max_new_tokens=8), 1),
        ({"include_stop_str_in_output": True, "logit_bias": {}}, SamplingParams(), 1),
    ],
)  # fmt: skip
def test_their_names_mean_ours(parameters, sampling, num_samples):
    options = read_generate_options(parameters)
    assert (options.sampling, options.num_samples, options.warnings) == (sampling, num_samples, ())


@pytest.mark.parametrize(
    ("parameters", "kind", "reason"),
    [
        ({"num_beams": 2}, Unsupported, "BEAMS_UNSUPPORTED"),
        ({"num_beams": 2, "early_stopping": True}, Unsupported, "BEAMS_UNSUPPORTED"),
        ({"num_beams": 0}, InvalidInput, "INVALID_SAMPLING"),
        ({"use_beam_search": True}, Unsupported, "SAMPLING_UNSUPPORTED"),
        ({"frequency_penalty": 0.1}, Unsupported, "SAMPLING_UNSUPPORTED"),
        ({"include_stop_str_in_output": False}, Unsupported, "SAMPLING_UNSUPPORTED"),
        ({"prompt_logprobs": 1}, Unsupported, "SAMPLING_UNSUPPORTED"),
        ({"return_log_probs": False}, Unsupported, "SAMPLING_UNSUPPORTED"),
        ({"logprobs": 21}, InvalidInput, "INVALID_SAMPLING"),
        ({"logprobs": True}, InvalidInput, "INVALID_SAMPLING"),
        ({"n": 2, "num_samples": 3}, InvalidInput, "INVALID_SAMPLING"),
        ({"n": 0}, InvalidInput, "INVALID_SAMPLING"),
        ({"n": "2"}, InvalidInput, "INVALID_SAMPLING"),
        ({"temperature": -0.1}, InvalidInput, "INVALID_SAMPLING"),
        ({"temperature": "hot"}, InvalidInput, "INVALID_SAMPLING"),
        ({"top_p": 1.5}, InvalidInput, "INVALID_SAMPLING"),
        ({"top_k": -5}, InvalidInput, "INVALID_SAMPLING"),
        ({"top_k": 2.5}, InvalidInput, "INVALID_SAMPLING"),
        ({"repetition_penalty": 0}, InvalidInput, "INVALID_SAMPLING"),
        ({"do_sample": False, "temperature": 0.5}, InvalidInput, "INVALID_SAMPLING"),
        ({"do_sample": True, "temperature": 0}, InvalidInput, "INVALID_SAMPLING"),
        ({"do_sample": 1}, InvalidInput, "INVALID_SAMPLING"),
        ({"stop": [1]}, InvalidInput, "INVALID_SAMPLING"),
        ({"stop": 1}, InvalidInput, "INVALID_SAMPLING"),
        ({"skip_special_tokens": "no"}, InvalidInput, "INVALID_SAMPLING"),
        ({"tempreature": 1}, InvalidInput, "UNKNOWN_FIELD"),
    ],
)
def test_what_is_wrong_or_not_done_is_refused(parameters, kind, reason):
    with pytest.raises(DialoopError) as refused:
        read_generate_options(parameters)
    assert (type(refused.value), refused.value.reason) == (kind, reason)
    assert refused.value.remedy


def test_of_two_names_the_older_wins_and_python_warns():
    with pytest.warns(DialoopWarning, match="max_tokens 5 was taken, max_new_tokens 9 was not"):
        options = generate_options(max_new_tokens=9, max_tokens=5)
    assert options.sampling.max_new_tokens == 5
    with pytest.warns(DialoopWarning, match="length_penalty is ignored"):
        assert generate_options(length_penalty=0.5).sampling == SamplingParams()


def test_what_is_off_cuts_nothing():
    assert not SamplingParams(top_p=1.0, min_p=0.0).truncates
    assert SamplingParams(top_p=0.99).truncates
