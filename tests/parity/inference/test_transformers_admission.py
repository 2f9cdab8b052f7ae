"""When the transformers engine takes new rows in, and the noise that rows are drawn with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.transformers_engine.batch import DecodingBatch
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.inference.transformers_engine.sampler import sample_rows
from transformers import AutoModelForCausalLM

from tests.support.engine_world import NO_STOP, save_model

PLACES = 8
OPTIONS = EngineOptions(max_model_len=64, max_num_seqs=PLACES)


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each admission took in."""
    sizes: list[int] = []
    admit = DecodingBatch.admit

    def count_rows(
        batch: DecodingBatch, rows: Sequence[Sequence[int]], which: Sequence[int]
    ) -> torch.Tensor:
        sizes.append(len(which))
        return admit(batch, rows, which)

    monkeypatch.setattr(DecodingBatch, "admit", count_rows)
    return sizes


async def _num_sampled(folder: Path, lengths: Sequence[int]) -> list[int]:
    engine = await TransformersEngine.start(save_model(folder, seed=0, tied=True), OPTIONS)
    try:
        answers = await asyncio.gather(
            *(
                engine.sample([5, 6, 7], SamplingParams(max_new_tokens=n, seed=n), stop=NO_STOP)
                for n in lengths
            )
        )
    finally:
        await engine.close()
    return [len(sampled.token_ids) for (sampled,) in answers]


async def test_rows_that_wait_for_places_are_taken_in_several_at_a_time(
    tmp_path: Path, admissions: list[int]
) -> None:
    lengths = list(range(1, 29))
    assert await _num_sampled(tmp_path, lengths) == lengths
    assert admissions[0] == PLACES
    assert all(size >= PLACES // 4 for size in admissions[:-1])
    assert sum(admissions) == len(lengths)


async def test_rows_that_fit_wait_for_nobody(tmp_path: Path, admissions: list[int]) -> None:
    assert await _num_sampled(tmp_path, [20, 1]) == [20, 1]
    assert admissions == [2]


def test_each_row_is_drawn_with_its_own_generators_noise() -> None:
    logprobs = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    sampling = [SamplingParams(temperature=1.0)] * 3

    def draw(*seeds: int) -> list[int]:
        made = {seed: torch.Generator().manual_seed(seed) for seed in set(seeds)}
        return sample_rows(logprobs, sampling, [made[seed] for seed in seeds]).tolist()

    alone = [
        sample_rows(logprobs[i : i + 1], sampling[:1], [g]).item()
        for i, g in enumerate(torch.Generator().manual_seed(seed) for seed in (7, 8, 9))
    ]
    assert draw(7, 8, 9) == alone
    assert draw(4, 4, 9)[2] == alone[2]


def test_rows_of_one_prompt_are_computed_once_and_are_those_computed_each(
    tmp_path: Path,
) -> None:
    save_model(tmp_path, seed=0, tied=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    rows, which = [[5, 6, 7], [9, 8]], [0, 1, 0, 0]
    each, once = DecodingBatch(model), DecodingBatch(model)
    with torch.inference_mode():
        wanted = [each.admit([rows[i] for i in which])]
        logits = [once.admit(rows, which)]
        lengths = [len(rows[i]) for i in which]
        for last in ([1, 2, 3, 4], [4, 3, 2, 1]):
            wanted.append(each.step(last, lengths))
            logits.append(once.step(last, lengths))
            lengths = [length + 1 for length in lengths]
    for expected, actual in zip(wanted, logits, strict=True):
        torch.testing.assert_close(expected, actual, atol=1e-5, rtol=0)


async def test_the_samples_of_a_prompt_are_taken_in_as_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []
    admit = DecodingBatch.admit

    def count_rows(
        batch: DecodingBatch, rows: Sequence[Sequence[int]], which: Sequence[int]
    ) -> torch.Tensor:
        taken.append((len(rows), len(which)))
        return admit(batch, rows, which)

    monkeypatch.setattr(DecodingBatch, "admit", count_rows)
    engine = await TransformersEngine.start(save_model(tmp_path, seed=0, tied=True), OPTIONS)
    sampling = SamplingParams(max_new_tokens=4, seed=3)
    sampled = await engine.sample([5, 6, 7], sampling, stop=NO_STOP, num_samples=4)
    await engine.close()
    assert taken == [(1, 4)]
    assert len({output.token_ids for output in sampled}) > 1
