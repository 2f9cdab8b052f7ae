from __future__ import annotations

import numpy as np
import pytest
import torch
from dialoop.errors import InvalidInput
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.scorer.__main__ import make_scorer
from dialoop_services.scorer.reference import load_reference
from dialoop_services.scorer.settings import ScorerSettings
from transformers import AutoModelForCausalLM

from tests.support.samples.scorer_samples import make_group, make_sequence

ROWS = ([5, 8, 2, 11, 12], [7, 7, 9], [1, 2, 3, 4, 5, 6, 7, 8])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def own(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def logprobs(ids, temperature=1.0):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()

    return logprobs


def reference(directory, max_row_tokens=16):
    return load_reference(
        directory, dtype="float32", device="cpu", max_row_tokens=max_row_tokens, num_threads=1
    )


@pytest.mark.parametrize("max_row_tokens", [16, 4])
def test_packed_logprobs_are_the_models_own(directory, own, max_row_tokens):
    scores = reference(directory, max_row_tokens).logprobs_of_all(ROWS, [1.0] * len(ROWS))
    for ids, logprobs in zip(ROWS, scores, strict=True):
        assert np.abs(logprobs - own(ids)).max() < 1e-4


def test_each_sequence_is_scored_at_its_own_temperature(directory, own):
    sequences = [make_sequence(), make_sequence(prompt=(9, 9), sampled=(3,), logprobs=(-1.0,))]
    scores = reference(directory).logprobs_of_sampled(sequences, [0.5, 2.0])
    assert np.abs(scores[0] - own([5, 8, 2, 11, 12], 0.5)[-2:]).max() < 1e-4
    assert np.abs(scores[1] - own([9, 9, 3], 2.0)[-1:]).max() < 1e-4


def test_tokens_outside_the_vocabulary_are_refused(directory):
    with pytest.raises(InvalidInput) as caught:
        reference(directory).logprobs_of_all([[1, 999_999]], [1.0])
    assert caught.value.reason == "TOKEN_OUT_OF_RANGE"


async def test_the_settings_turn_reference_logprobs_on(directory, own):
    settings = ScorerSettings(model_dir=directory, reference_logprobs=True, kl_coefficient=0.1)
    scored = await make_scorer(settings).score(make_group(0.0, 1.0))
    scores = scored.trajectories[0].sequences[0].ref_logprobs
    assert np.abs(scores - own([5, 8, 2, 11, 12])[-2:]).max() < 1e-4
    kl = float(sum(np.array([-0.5, -1.25]) - scores))
    assert scored.trajectories[0].reward == pytest.approx(-0.1 * kl, abs=1e-4)


async def test_a_reference_nobody_scores_with_still_answers_logprobs(directory):
    scorer = make_scorer(ScorerSettings(model_dir=directory))
    scored = await scorer.score(make_group(0.0, 1.0))
    assert len(scored.trajectories[0].sequences[0].ref_logprobs) == 0
    assert [len(row) for row in await scorer.model().logprobs_of_all([[1, 2, 3]])] == [2]
