"""vLLM, transformers engine and trainer give the same ids the same log-probs, whatever is loaded.

3M parameters, weights that move the logits by nats: within 1e-5 in float32, 3e-3 on average in
bfloat16, tied and untied, before and after ten publishes, idle and under load.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
import torch
from dialoop.episode import UpdateMode
from dialoop.trajectory import SamplingParams

from tests.support.engine_gates import GATE_KINDS, Gated, Setup, gated_engine
from tests.support.engine_world import NO_STOP, prompts
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop_services.inference.engine import Sampled

NUM_PUBLISHES = 10

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=GATE_KINDS)
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gated]:
    setup: Setup = request.param
    async with gated_engine(setup, tmp_path_factory.mktemp("gate")) as made:
        yield made


async def sampled_rows(world: Gated, count: int, length: int) -> list[tuple[list[int], Sampled]]:
    sampling = SamplingParams(max_new_tokens=length)
    asked_prompts = prompts(count)
    answers = await asyncio.gather(
        *(world.engine.sample(prompt, sampling, stop=NO_STOP) for prompt in asked_prompts)
    )
    return [(prompt, sampled) for prompt, (sampled,) in zip(asked_prompts, answers, strict=True)]


async def require_agreement(world: Gated) -> np.ndarray:
    """Of sampled and of given ids, at rest and while 24 others are sampled."""
    rows = await sampled_rows(world, 6, 40)
    others = asyncio.create_task(sampled_rows(world, 24, 60))
    await asyncio.sleep(0.02)
    rows += await sampled_rows(world, 6, 40)
    whole = [[*prompt, *sampled.token_ids] for prompt, sampled in rows]
    busy = [await world.engine.logprobs(ids) for ids in whole]
    rows += await others
    idle = [await world.engine.logprobs(ids) for ids in whole]
    own = world.trainer_logprobs([[*prompt, *sampled.token_ids] for prompt, sampled in rows])
    for (prompt, sampled), mine in zip(rows, own, strict=True):
        world.require_close(mine[len(prompt) - 1 :], np.array(sampled.logprobs))
        assert {span.policy_version for span in sampled.versions} == {world.engine.policy_version}
    for mine, first, second in zip(own, busy, idle, strict=False):
        world.require_close(mine, first.logprobs)
        world.require_close(mine, second.logprobs)
    return np.concatenate(own)


async def test_three_agree_before_and_after_ten_publishes(world: Gated) -> None:
    before = await require_agreement(world)
    probe = prompts(1, shortest=60)[0]
    last = world.trainer_logprobs([probe])[0]
    for _ in range(NUM_PUBLISHES):
        await world.publish()
        now = world.trainer_logprobs([probe])[0]
        assert (
            np.abs(now - last).max() > world.version_gap
        )  # else a wrong update would show as noise
        world.require_close(now, (await world.engine.logprobs(probe)).logprobs)
        last = now
    await require_agreement(world)
    assert before.min() < -1.0


@pytest.mark.parametrize("mode", [UpdateMode.RECOMPUTE, UpdateMode.WAIT], ids=lambda m: m.name)
async def test_every_token_rescores_under_its_version_after_publishes_on_the_way(
    world: Gated, mode: UpdateMode
) -> None:
    """20 answers of 120 tokens where 16 fit at a time, three publishes while they are sampled."""
    sampling = SamplingParams(max_new_tokens=120)
    asked_prompts = prompts(20)
    first, chunks = world.engine.policy_version, []
    tasks = [
        asyncio.create_task(
            world.engine.stream(prompt, sampling, stop=NO_STOP, on_tokens=chunks.append)
        )
        for prompt in asked_prompts
    ]
    for number in range(1, 4):
        while sum(len(chunk.token_ids) for chunk in chunks) < number * 16 * 10:
            await asyncio.sleep(0.002)
        await world.publish(mode)
    answers = [await task for task in tasks]
    seen = {span.policy_version for sampled in answers for span in sampled.versions}
    assert len(seen) >= 2
    assert first in seen
    assert max(sampled.queue_s for sampled in answers) > 0.1  # those for whom there was no place
    mixed = sum(len(sampled.versions) > 1 for sampled in answers)
    assert mixed == 0 if mode is UpdateMode.WAIT else mixed >= 10
    for version in seen:
        world.trainer_takes(version)
        own = world.trainer_logprobs(
            [[*p, *s.token_ids] for p, s in zip(asked_prompts, answers, strict=True)]
        )
        for prompt, sampled, mine in zip(asked_prompts, answers, own, strict=True):
            for span in sampled.versions:
                if span.policy_version == version:
                    part = slice(span.start, span.start + span.length)
                    got = np.array(sampled.logprobs[part])
                    world.require_close(mine[len(prompt) - 1 :][part], got)


async def test_kept_keys_are_for_those_under_way_alone(world: Gated) -> None:
    """What was under way is off by more than rounding; what comes with its prefix later is not."""
    prompt = prompts(1, shortest=140)[0]  # longer than a block of vLLM's prefix cache on a CPU
    streamed: list[int] = []
    running = asyncio.create_task(
        world.engine.stream(
            prompt,
            SamplingParams(max_new_tokens=110),
            stop=NO_STOP,
            on_tokens=lambda chunk: streamed.extend(chunk.token_ids),
        )
    )
    while len(streamed) < 40:
        await asyncio.sleep(0.002)
    loaded = await world.publish(UpdateMode.KEEP_KV)
    (later,) = await world.engine.sample(prompt, SamplingParams(max_new_tokens=20), stop=NO_STOP)
    sampled = await running
    assert [span.policy_version for span in later.versions] == [loaded]
    mine = world.trainer_logprobs([[*prompt, *later.token_ids], [*prompt, *sampled.token_ids]])
    world.require_close(mine[0][len(prompt) - 1 :], np.array(later.logprobs))
    after = sampled.versions[-1]
    assert after.policy_version == loaded
    got = np.array(sampled.logprobs[after.start :])
    assert np.abs(mine[1][len(prompt) - 1 + after.start :] - got).max() > world.version_gap / 5
    await world.publish()


async def test_on_a_cpu_no_process_of_vllm_waits_for_another(world: Gated) -> None:
    if world.setup.kind == "vllm" and not torch.cuda.is_available():
        parallel = world.engine._llm.vllm_config.parallel_config
        assert parallel.distributed_executor_backend == "uni"


async def test_a_cancelled_answer_gives_its_place_up_at_once(world: Gated) -> None:
    long = SamplingParams(max_new_tokens=180)
    for num_samples in (1, 4):
        begun = [
            asyncio.create_task(world.engine.sample(p, long, stop=NO_STOP, num_samples=num_samples))
            for p in prompts(20)
        ]
        while world.engine.num_running < 16:
            await asyncio.sleep(0.002)
        for task in begun:
            task.cancel()
        await asyncio.wait(begun)
        async with asyncio.timeout(PATIENCE_S):
            while world.engine.num_running or await world.core_is_busy():
                await asyncio.sleep(0.01)
            (sampled,) = await world.engine.sample(
                [1, 2, 3], SamplingParams(max_new_tokens=2), stop=NO_STOP
            )
        assert len(sampled.token_ids) == 2
        assert sampled.queue_s < PATIENCE_S
