"""Log-probs and KL of trajectories' tokens, through the SDK's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.scorer import ScorerClient
from dialoop.errors import InvalidInput, NotFound
from dialoop.sequences import Sequence, Source, sequence_of
from dialoop.trajectory import SamplingParams, Trajectory
from dialoop.v1.scorer_service_pb2_grpc import add_ScorerServiceServicer_to_server
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings
from dialoop_services.scorer.__main__ import make_scorer
from dialoop_services.scorer.servicer import ScorerServicer
from dialoop_services.scorer.settings import ScorerSettings
from transformers import AutoModelForCausalLM

from tests.support.samples.scorer_samples import MAIN_0, make_sequence, make_trajectory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(folder / name, seed=seed)
        for seed, name in enumerate(("reference", "teacher"))
    }


@asynccontextmanager
async def serve(models: dict[str, Path]) -> AsyncIterator[ScorerClient]:
    teacher = {"id": "teacher", "directory": str(models["teacher"])}
    settings = ScorerSettings.model_validate(
        {"model_dir": models["reference"], "models": [teacher]}
    )
    server = GrpcServer(ServerSettings(drain_s=0))
    servicer = ScorerServicer(make_scorer(settings))
    server.add(add_ScorerServiceServicer_to_server, servicer, "dialoop.v1.ScorerService")
    async with server, Channel(server.address, retry=RetryPolicy(max_attempts=1)) as channel:
        yield ScorerClient(channel)


def own(directory: Path, ids: list[int], temperature: float) -> Any:
    """The model's own log-probs of ids [L], from the second token on."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def two_turns() -> Sequence:
    """Tokens 2, 3 and 6 of it were sampled."""
    model = {"source": Source.MODEL, "policy_version": MAIN_0}
    return sequence_of(
        [
            ([5, 8], {"source": Source.PROMPT}),
            ([11, 12], model),
            ([9, 4], {"source": Source.TEMPLATE}),
            ([3], {**model, "turn": 1}),
        ],
        logprobs=[-0.5, -1.25, -2.0],
    )


def make_forked() -> Trajectory:
    """Two sequences at temperature 0.7."""
    sampling = SamplingParams(temperature=0.7)
    return make_trajectory("t0", 1.0, sequences=(two_turns(), make_sequence()), sampling=sampling)


async def test_logprobs_are_of_sampled_tokens_alone_with_their_positions(
    models: dict[str, Path],
) -> None:
    async with serve(models) as scorer:
        values = await scorer.logprobs_of([make_forked(), make_trajectory("t1", 0.0)])
    assert [(v.trajectory_id, v.sequence_index) for v in values] == [
        ("t0", 0),
        ("t0", 1),
        ("t1", 0),
    ]
    assert [v.positions.tolist() for v in values] == [[2, 3, 6], [3, 4], [3, 4]]
    first = own(models["reference"], [5, 8, 11, 12, 9, 4, 3], 0.7)
    assert np.abs(values[0].values - first[[1, 2, 5]]).max() < 1e-4
    assert (
        np.abs(values[2].values - own(models["reference"], [5, 8, 2, 11, 12], 1.0)[2:]).max() < 1e-4
    )


async def test_the_scope_all_has_every_token_but_the_first(models: dict[str, Path]) -> None:
    async with serve(models) as scorer:
        (first, _) = await scorer.logprobs_of([make_forked()], mask_scope="all")
    assert first.positions.tolist() == [1, 2, 3, 4, 5, 6]
    expected = own(models["reference"], [5, 8, 11, 12, 9, 4, 3], 0.7)
    assert np.abs(first.values - expected).max() < 1e-4


async def test_a_model_is_asked_by_its_id(models: dict[str, Path]) -> None:
    rows = [[5, 8, 2, 11, 12]]
    async with serve(models) as scorer:
        teacher = (await scorer.logprobs(rows, model_id="teacher"))[0]
        reference = (await scorer.logprobs(rows, model_id="reference"))[0]
        assert np.array_equal(reference, (await scorer.logprobs(rows))[0])
        with pytest.raises(
            NotFound, match="no model 'student'; it has teacher, reference"
        ) as caught:
            await scorer.logprobs_of([make_forked()], model_id="student")
    assert caught.value.reason == "MODEL_NOT_FOUND"
    assert np.abs(teacher - own(models["teacher"], rows[0], 1.0)).max() < 1e-4
    assert np.abs(teacher - reference).max() > 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
async def test_the_kl_is_from_the_sampler_to_the_reference_token_by_token(
    models: dict[str, Path], estimator: Any
) -> None:
    async with serve(models) as scorer:
        (kl, _) = await scorer.kl([make_forked()], estimator=estimator)
        (reference, _) = await scorer.logprobs_of([make_forked()])
    d = reference.values - np.float32([-0.5, -1.25, -2.0])
    expected = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator]
    assert kl.positions.tolist() == [2, 3, 6]
    assert kl.values == pytest.approx(expected, rel=1e-5)


async def test_the_kl_between_two_models_may_be_of_all_tokens(models: dict[str, Path]) -> None:
    async with serve(models) as scorer:
        (kl, _) = await scorer.kl([make_forked()], mask_scope="all", model_id="teacher")
        (same, _) = await scorer.kl(
            [make_forked()], model_id="teacher", reference_model_id="teacher", estimator="k3"
        )
    ids = [5, 8, 11, 12, 9, 4, 3]
    expected = own(models["teacher"], ids, 0.7) - own(models["reference"], ids, 0.7)
    assert np.abs(kl.values - expected).max() < 1e-4
    assert same.values.tolist() == [0.0, 0.0, 0.0]


async def test_what_has_no_logprobs_is_refused(models: dict[str, Path]) -> None:
    greedy = make_trajectory("t0", 0.0, sampling=SamplingParams(temperature=0.0))
    without = replace(two_turns(), inference_logprobs=np.empty(0, dtype=np.float32))
    async with serve(models) as scorer:
        with pytest.raises(InvalidInput) as caught:
            await scorer.logprobs_of([greedy])
        assert caught.value.reason == "INVALID_TEMPERATURE"
        for trajectory, scope in (
            (make_forked(), "all"),
            (replace(make_forked(), sequences=(without,)), ""),
        ):
            with pytest.raises(InvalidInput) as caught:
                await scorer.kl([trajectory], mask_scope=scope or "assistant")  # type: ignore[arg-type]
            assert caught.value.reason == "RAGGED"
