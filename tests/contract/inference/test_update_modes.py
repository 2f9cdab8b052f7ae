"""What a load of weights does to answers under way, and how each answer says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from dialoop.episode import UpdateMode
from dialoop.errors import PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams, StopReason

from tests.support.inference_world import (  # noqa: F401
    QUESTION,
    World,
    assert_refused,
    model_dir,
    publish,
    world,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LONG = SamplingParams(max_new_tokens=150)


async def load_within(w: World, model_dir, number: int, mode: UpdateMode):
    """A long answer, and a load once it has begun; the sample."""
    manifest = publish(w.root, model_dir, number=number, scale=0.2)
    seen = []
    async for chunk in w.client.generate_stream(QUESTION, sampling=LONG):
        seen.append(chunk)
        if len(seen) == 3:
            loading = asyncio.create_task(
                w.client.load_weights(replace(manifest, update_mode=mode))
            )
    await loading
    return seen[-1].samples[0], manifest.policy_version


async def test_an_answer_says_what_loads_did_to_it(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        (first,) = await w.client.generate(QUESTION)
        assert first.update_mode is UpdateMode.RECOMPUTE
        ends = (StopReason.STOP, StopReason.LENGTH)
        for number in range(1, 20):
            sample, new = await load_within(w, model_dir, number, UpdateMode.KEEP_KV)
            assert sample.stop_reason in ends
            if new in sample.sequence.policy_versions:
                assert sample.update_mode is UpdateMode.KEEP_KV
                break
        (later,) = await w.client.generate(QUESTION)
        assert later.update_mode is UpdateMode.RECOMPUTE
        assert new in sample.sequence.policy_versions


async def test_a_load_that_waits_lets_answers_end_and_holds_new_ones(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        old = w.replica.engine.policy_version
        running = [
            asyncio.create_task(w.client.generate(QUESTION, sampling=LONG)) for _ in range(6)
        ]
        while w.replica.engine.num_running < 6:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        manifest = replace(publish(w.root, model_dir, number=1), update_mode=UpdateMode.WAIT)
        loading = asyncio.create_task(w.client.load_weights(manifest))
        # Not by the clock: on a busy machine reading the file alone takes longer than any sleep.
        while w.replica.engine._may_admit.is_set() and not loading.done():
            await asyncio.sleep(0.001)
        (after,) = await w.client.generate(QUESTION)
        loaded = await loading
        for task in running:
            (sample,) = await task
            assert sample.sequence.policy_versions == (old,)
        assert after.sequence.policy_versions == (loaded.policy_version,)
        assert after.update_mode is UpdateMode.WAIT


async def test_a_paused_replica_cannot_wait_and_stays_in_rotation(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        await w.client.pause()
        manifest = publish(w.root, model_dir, number=1)
        waiting = replace(manifest, update_mode=UpdateMode.WAIT)
        await assert_refused(w.client.load_weights(waiting), PreconditionFailed, "PAUSED")
        assert (await w.client.get_policy()).ready
        await w.client.load_weights(manifest)
        await w.client.resume()
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.policy_versions == (PolicyVersion(lineage="main", number=1),)
