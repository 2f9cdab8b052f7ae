"""Both engines against a plain transformers forward pass: log-probs, weights, versions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
import torch
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_services.inference.engine import BASE_VERSION, StopTokens, TokenChunk

from tests.support.engine_world import (
    KINDS,
    MAX_MODEL_LEN,
    NO_STOP,
    VOCAB,
    Running,
    forward_logprobs,
    make_model,
    prompts,
    save_model,
    save_weights,
    start,
    version,
    worst,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", params=KINDS)
def choice(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    choice: tuple[str, bool], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    kind, tied = choice
    folder = save_model(tmp_path_factory.mktemp("model"), seed=0, tied=tied)
    engine = await start(kind, folder)
    yield Running(engine, folder, tmp_path_factory.mktemp("weights"), tied=tied)
    await engine.close()


async def test_logprobs_of_given_ids_equal_a_full_forward(running: Running) -> None:
    for prompt in (*prompts(3), prompts(1, shortest=MAX_MODEL_LEN)[0]):
        scored = await running.engine.logprobs(prompt)
        assert scored.logprobs.dtype == np.float32
        assert np.abs(scored.logprobs - forward_logprobs(prompt, **running.model)).max() < TOLERANCE
        assert scored.policy_version == running.engine.policy_version


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampled_logprobs_equal_a_full_forward(running: Running, temperature: float) -> None:
    sampling = SamplingParams(max_new_tokens=20, temperature=temperature)
    results = await asyncio.gather(
        *(running.engine.sample(p, sampling, stop=NO_STOP) for p in prompts(8))
    )
    for prompt, (sampled,) in zip(prompts(8), results, strict=True):
        assert len(sampled.token_ids) == 20
        assert sampled.stop_reason is StopReason.LENGTH
        assert worst(sampled, prompt, temperature=temperature, **running.model) < TOLERANCE


async def test_the_likeliest_tokens_are_those_of_a_full_forward(running: Running) -> None:
    prompt, num = prompts(1)[0], 6
    sampling = SamplingParams(max_new_tokens=5, temperature=0.7, top_logprobs=num)
    chunks: list[TokenChunk] = []
    streamed = await running.engine.stream(prompt, sampling, stop=NO_STOP, on_tokens=chunks.append)
    samples = await running.engine.sample(prompt, sampling, stop=NO_STOP, num_samples=2)
    assert tuple(top for chunk in chunks for top in chunk.top_logprobs) == streamed.top_logprobs
    for sampled in (streamed, *samples):
        assert len(sampled.logprobs) == len(sampled.top_logprobs) == 5
        ids = torch.tensor([[*prompt, *sampled.token_ids]])
        with torch.inference_mode():
            logits = make_model(**running.model)(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits / 0.7, dim=-1).topk(num, dim=-1).values
        values = torch.tensor([list(top.values()) for top in sampled.top_logprobs])
        torch.testing.assert_close(values, expected, atol=TOLERANCE, rtol=0)
        assert worst(sampled, prompt, temperature=0.7, **running.model) < TOLERANCE


@pytest.mark.parametrize("seed", [1, 2])
async def test_logprobs_follow_new_weights(running: Running, seed: int) -> None:
    prompt = prompts(1, shortest=40)[0]
    before = (await running.engine.logprobs(prompt)).logprobs
    loaded = await running.load(seed)
    scored = await running.engine.logprobs(prompt)
    assert np.abs(scored.logprobs - before).max() > 0.5
    assert np.abs(scored.logprobs - forward_logprobs(prompt, **running.model)).max() < TOLERANCE
    assert scored.policy_version == loaded == running.engine.policy_version
    (sampled,) = await running.engine.sample(
        prompt, SamplingParams(max_new_tokens=20), stop=NO_STOP
    )
    assert worst(sampled, prompt, **running.model) < TOLERANCE
    assert [span.policy_version for span in sampled.versions] == [loaded]


async def test_every_token_rescores_under_its_own_version(running: Running) -> None:
    """24 requests of 120 tokens, two updates on the way."""
    sampling = SamplingParams(max_new_tokens=120)
    tasks = [
        asyncio.create_task(running.engine.sample(p, sampling, stop=NO_STOP)) for p in prompts(24)
    ]
    streamed: list[int] = []
    watched = asyncio.create_task(
        running.engine.stream(
            [5, 6, 7], sampling, stop=NO_STOP, on_tokens=lambda p: streamed.extend(p.token_ids)
        )
    )
    seeds = {running.engine.policy_version: running.seed}
    for at, seed in ((35, 11), (75, 12)):
        while len(streamed) < at:
            await asyncio.sleep(0.002)
        seeds[await running.load(seed)] = seed
    results = [(await task)[0] for task in tasks]
    mixed = 0
    for prompt, sampled in zip([*prompts(24), [5, 6, 7]], [*results, await watched], strict=True):
        ids = [*prompt, *sampled.token_ids]
        assert sum(span.length for span in sampled.versions) == 120
        mixed += len(sampled.versions) > 1
        for span in sampled.versions:
            expected = forward_logprobs(ids, seed=seeds[span.policy_version], tied=running.tied)
            rows = slice(len(prompt) - 1 + span.start, len(prompt) - 1 + span.start + span.length)
            got = np.array(sampled.logprobs[span.start : span.start + span.length])
            assert np.abs(expected[rows] - got).max() < TOLERANCE
    assert mixed >= 20


async def test_streamed_pieces_carry_the_versions_of_the_whole_sample(running: Running) -> None:
    chunks: list = []
    task = asyncio.create_task(
        running.engine.stream(
            [9, 8], SamplingParams(max_new_tokens=100), stop=NO_STOP, on_tokens=chunks.append
        )
    )
    while len(chunks) < 30:
        await asyncio.sleep(0.002)
    await running.load(running.seed + 1)
    sampled = await task
    assert tuple(i for p in chunks for i in p.token_ids) == sampled.token_ids
    assert tuple(x for p in chunks for x in p.logprobs) == sampled.logprobs
    labels = [p.policy_version for p in chunks for _ in p.token_ids]
    assert labels == [s.policy_version for s in sampled.versions for _ in range(s.length)]
    assert len(set(labels)) == 2


async def test_greedy_equals_transformers_greedy(running: Running) -> None:
    prompt = prompts(1, shortest=12)[0]
    model = make_model(**running.model)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    (sampled,) = await running.engine.sample(
        prompt, SamplingParams(temperature=0.0, max_new_tokens=30), stop=NO_STOP
    )
    assert list(sampled.token_ids) == expected
    assert worst(sampled, prompt, **running.model) < TOLERANCE


async def test_a_stop_token_ends_the_sample_and_is_kept(running: Running) -> None:
    sampling = SamplingParams(max_new_tokens=200)
    stop = StopTokens(by_id=dict.fromkeys(range(100), "") | {7: "<seven>"})
    for (sampled,) in [await running.engine.sample(p, sampling, stop=stop) for p in prompts(5)]:
        assert sampled.stop_reason is StopReason.STOP
        assert sampled.token_ids[-1] < 100
        assert all(token >= 100 for token in sampled.token_ids[:-1])
        assert sampled.stop_string == ("<seven>" if sampled.token_ids[-1] == 7 else "")


async def test_a_stop_string_of_several_tokens_ends_the_sample(running: Running) -> None:
    sampling = SamplingParams(seed=5, max_new_tokens=60)
    (whole,) = await running.engine.sample([4, 4], sampling, stop=NO_STOP)
    decode = running.tokenizer.decode
    texts = [decode(whole.token_ids[i : i + 2]) for i in range(10, 59)]
    printable = [text for text in texts if text.isprintable() and "\ufffd" not in text]
    text = printable[0]
    (sampled,) = await running.engine.sample([4, 4], sampling, stop=StopTokens(strings=(text,)))
    assert sampled.stop_reason is StopReason.STOP
    assert sampled.stop_string == text
    assert sampled.token_ids == whole.token_ids[: len(sampled.token_ids)]
    assert decode(sampled.token_ids).endswith(text)
    assert text not in decode(sampled.token_ids[:-1])


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_a_sample_ends_where_its_watch_says(running: Running, num_samples: int) -> None:
    def begin() -> Callable[[int], str | None]:
        seen: list[int] = []

        def watch(token: int) -> str | None:
            seen.append(token)
            return f"<{token}>" if sum(seen) > 400 else None

        return watch

    prompt, stop = [4, 4], StopTokens(watch=begin)
    sampling = SamplingParams(seed=5, max_new_tokens=60, top_logprobs=2)
    options = {"num_samples": num_samples}
    whole = await running.engine.sample(prompt, sampling, stop=NO_STOP, **options)
    ended = await running.engine.sample(prompt, sampling, stop=stop, **options)
    chunks: list[TokenChunk] = []
    streamed = await running.engine.stream(prompt, sampling, stop=stop, on_tokens=chunks.append)
    for long, short in zip(whole, ended, strict=True):
        ids = short.token_ids
        assert ids == long.token_ids[: len(ids)]
        assert sum(ids) > 400 >= sum(ids[:-1])
        assert short.stop_string == f"<{ids[-1]}>"
        assert (short.stop_reason, len(short.top_logprobs)) == (StopReason.STOP, len(ids))
        assert [(s.start, s.length) for s in short.versions] == [(0, len(ids))]
        assert worst(short, prompt, **running.model) < TOLERANCE
    assert (streamed.token_ids, streamed.stop_string) == (ended[0].token_ids, ended[0].stop_string)
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == streamed.token_ids
    assert running.engine.num_running == 0


def penalized_logprobs(
    ids: list[int], start: int, penalty: float, temperature: float, **model: object
) -> np.ndarray:
    """Of ids[start:], by hand: every token before a position is there already."""
    with torch.inference_mode():
        logits = make_model(**model)(torch.tensor([ids])).logits[0].double().numpy()
    logprobs = []
    for position in range(start, len(ids)):
        row = logits[position - 1].copy()
        seen = sorted(set(ids[:position]))
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        row /= temperature or 1.0
        logprobs.append(row[ids[position]] - np.logaddexp.reduce(row))
    return np.array(logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_a_repetition_penalty_changes_the_distribution_and_the_log_probs_say_so(
    running: Running, temperature: float
) -> None:
    prompt = prompts(1)[0]
    plain = SamplingParams(max_new_tokens=20, temperature=temperature, seed=5)
    penalized = SamplingParams(
        max_new_tokens=20, temperature=temperature, seed=5, repetition_penalty=1.75
    )
    # One that is plain decodes beside it.
    (first,), (second,) = await asyncio.gather(
        running.engine.sample(prompt, penalized, stop=NO_STOP),
        running.engine.sample(prompt, plain, stop=NO_STOP),
    )
    whole = [*prompt, *first.token_ids]
    expected = penalized_logprobs(whole, len(prompt), 1.75, temperature, **running.model)
    assert np.abs(expected - np.array(first.logprobs)).max() < TOLERANCE
    # Whether it changes a token is luck; that it is another distribution is not.
    assert worst(first, prompt, temperature=temperature or 1.0, **running.model) > 10 * TOLERANCE
    assert worst(second, prompt, temperature=temperature or 1.0, **running.model) < TOLERANCE


async def test_truncated_sampling_stays_in_its_set(running: Running) -> None:
    prompt = prompts(1)[0]
    sampling = SamplingParams(max_new_tokens=1, top_k=3)
    results = await running.engine.sample(prompt, sampling, stop=NO_STOP, num_samples=32)
    with torch.inference_mode():
        logits = make_model(**running.model)(torch.tensor([prompt])).logits[0, -1]
    best = logits.topk(3)
    expected = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
    for sampled in results:
        assert sampled.logprobs[0] == pytest.approx(expected[sampled.token_ids[0]], abs=TOLERANCE)


async def test_samples_differ_and_a_seed_repeats_them(running: Running) -> None:
    sampling = SamplingParams(max_new_tokens=20, seed=3)
    first = await running.engine.sample([1, 2], sampling, stop=NO_STOP, num_samples=4)
    again = await running.engine.sample([1, 2], sampling, stop=NO_STOP, num_samples=4)
    assert [s.token_ids for s in first] == [s.token_ids for s in again]
    assert len({s.token_ids for s in first}) == 4


async def test_a_full_context_gives_an_empty_sample(running: Running) -> None:
    prompt = prompts(1, shortest=MAX_MODEL_LEN)[0]
    (sampled,) = await running.engine.sample(prompt, SamplingParams(), stop=NO_STOP)
    assert sampled.stop_reason is StopReason.CONTEXT_FULL
    assert sampled.token_ids == ()
    (last,) = await running.engine.sample(prompt[:-1], SamplingParams(), stop=NO_STOP)
    assert (last.stop_reason, len(last.token_ids)) == (StopReason.LENGTH, 1)


async def test_unknown_missing_and_misshapen_parameters_are_refused(running: Running) -> None:
    from safetensors.torch import load_file, save_file

    good = load_file(save_weights(running.folder / "x.safetensors", seed=5, tied=running.tied))
    before = await running.engine.logprobs([1, 2, 3])
    name = "model.layers.0.self_attn.q_proj.weight"
    for bad in (
        good | {"model.extra.weight": torch.zeros(2)},
        {k: v for k, v in good.items() if k != name},
        good | {name: torch.zeros(2, 2)},
    ):
        path = running.folder / "bad.safetensors"
        save_file(bad, path)
        with pytest.raises(PreconditionFailed) as caught:
            await running.engine.load_weights(path, version(999))
        assert caught.value.reason == "UNKNOWN_PARAMETERS"
    after = await running.engine.logprobs([1, 2, 3])
    assert np.array_equal(before.logprobs, after.logprobs)
    assert after.policy_version == before.policy_version


async def test_ids_outside_the_vocabulary_are_refused(running: Running) -> None:
    for ids in ([], [-1], [VOCAB]):
        with pytest.raises(InvalidInput):
            await running.engine.sample(ids, SamplingParams(), stop=NO_STOP)
        with pytest.raises(InvalidInput):
            await running.engine.logprobs(ids)


async def test_a_pause_holds_requests_and_a_resume_finishes_them(running: Running) -> None:
    await running.engine.pause()
    task = asyncio.create_task(
        running.engine.sample([1, 2, 3], SamplingParams(max_new_tokens=5), stop=NO_STOP)
    )
    await asyncio.sleep(0.3)
    assert not task.done()
    loaded = await running.load(running.seed + 1)
    await asyncio.sleep(0.2)
    assert not task.done()
    await running.engine.resume()
    (sampled,) = await task
    assert [span.policy_version for span in sampled.versions] == [loaded]


async def test_a_cancelled_request_leaves_the_others_alone(running: Running) -> None:
    sampling = SamplingParams(max_new_tokens=100)
    tasks = [
        asyncio.create_task(running.engine.sample(p, sampling, stop=NO_STOP)) for p in prompts(4)
    ]
    await asyncio.sleep(0.05)
    tasks[1].cancel()
    kept = [await task for index, task in enumerate(tasks) if index != 1]
    assert all(len(sampled.token_ids) == 100 for (sampled,) in kept)
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]


async def test_a_fresh_engine_has_the_base_version(tmp_path: Path) -> None:
    engine = await start("transformers", save_model(tmp_path, seed=0, tied=True))
    assert engine.policy_version == BASE_VERSION
    await engine.close()
