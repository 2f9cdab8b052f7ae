"""A replica that shares its device: who may work when, and what those are told who may not."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from dialoop.clients.inference import InferenceClient
from dialoop.episode import UpdateMode
from dialoop.errors import InternalError, PreconditionFailed, Unavailable
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.replica.device_lease import DeviceLease
from dialoop_services.inference.transformers_engine import engine as transformers_engine
from dialoop_services.inference.transformers_engine.engine import score
from dialoop_services.runtime.device_lock import DeviceLock

from tests.support.inference_world import (  # noqa: F401
    QUESTION,
    World,
    assert_refused,
    model_dir,
    point_to,
    publish,
    world,
)
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LONG = SamplingParams(max_new_tokens=150)
FIRST = PolicyVersion(lineage="main", number=1)


@asynccontextmanager
async def sharing(model_dir: Path, folder: Path) -> AsyncIterator[tuple[World, DeviceLock]]:
    """An awake replica, and the trainer's end of the lock."""
    path = folder / "device.lock"
    held = DeviceLock(path)
    assert held.try_share()
    async with world(model_dir, folder / "w", lease=DeviceLease(held, take_within_s=0.1)) as w:
        yield w, DeviceLock(path)


async def test_asleep_it_gives_the_device_up_and_says_so(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        assert not trainer.try_own()
        await w.client.sleep()
        await w.client.sleep()
        assert trainer.try_own()
        status = await w.client.get_policy()
        assert (status.ready, status.reason) == (False, "ASLEEP")
        assert await w.health() == "NOT_SERVING"
        await assert_refused(w.client.generate(QUESTION), Unavailable, "ASLEEP")
        await assert_refused(w.client.logprobs([[1, 2]]), Unavailable, "ASLEEP")
        await assert_refused(w.client.wake(), Unavailable, "ASLEEP")
        trainer.release()
        await w.client.wake()
        await w.client.wake()
        assert not trainer.try_own()
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.num_model_tokens
        assert await w.health() == "SERVING"


async def test_a_publish_wakes_it_once_the_trainer_has_left(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        await w.client.sleep()
        assert trainer.try_own()
        manifest = publish(w.root, model_dir, number=1)
        await assert_refused(w.client.load_weights(manifest), Unavailable, "ASLEEP")
        assert not w.replica.engine.policy_version.number
        trainer.release()
        await w.client.load_weights(manifest)
        assert not trainer.try_own()
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.policy_versions == (FIRST,)


async def test_weights_that_were_given_up_come_back_from_what_is_published(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        manifest = publish(w.root, model_dir, number=1)
        point_to(w.root, manifest)
        await w.client.load_weights(manifest)
        (before,) = (await w.client.logprobs([[5, 6, 7, 8]])).logprobs
        await w.client.sleep()
        w.replica.engine._model.get_input_embeddings().weight.zero_()  # as if another used it
        await w.client.wake()
        assert not trainer.try_own()
        (after,) = (await w.client.logprobs([[5, 6, 7, 8]])).logprobs
        assert after.tolist() == before.tolist()


async def test_what_is_under_way_ends_first_and_what_is_late_is_asked_again(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        await w.client.pause()  # so that no answer ends by itself
        answering = asyncio.create_task(w.client.generate(QUESTION, sampling=LONG))
        while not w.replica.engine.num_running:
            await asyncio.sleep(0.002)
        going = asyncio.create_task(w.client.sleep(drain_s=60.0))
        async with asyncio.timeout(PATIENCE_S):
            while (await w.client.get_policy()).reason != "ASLEEP":
                await asyncio.sleep(0.005)
        assert not trainer.try_own(), "an answer is under way"
        await assert_refused(w.client.generate(QUESTION), Unavailable, "ASLEEP")
        await w.client.resume()
        await going
        assert (await answering)[0].sequence.num_model_tokens
        await w.client.wake()
        await w.client.pause()
        stuck = asyncio.create_task(w.client.generate(QUESTION, sampling=LONG))
        while not w.replica.engine.num_running:
            await asyncio.sleep(0.002)
        await w.client.sleep(drain_s=0.05)
        assert trainer.try_own()
        await assert_refused(stuck, Unavailable, "ASLEEP")
        trainer.release()
        await w.client.wake()
        assert w.replica.engine.num_running == 0
        await w.client.resume()
        assert await w.client.generate(QUESTION)


async def test_a_caller_who_leaves_does_not_keep_it_half_awake(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        await w.client.pause()
        stuck = asyncio.create_task(w.client.generate(QUESTION, sampling=LONG))
        while not w.replica.engine.num_running:
            await asyncio.sleep(0.002)
        with pytest.raises(Exception, match=r"(?i)deadline"):
            await w.client.sleep(drain_s=2.0, deadline_s=0.5)
        await assert_refused(stuck, Unavailable, "ASLEEP")
        async with asyncio.timeout(PATIENCE_S):
            while not trainer.try_own():
                await asyncio.sleep(0.01)


async def test_a_load_that_fails_leaves_the_device_to_the_trainer(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        await w.client.sleep()
        manifest = publish(w.root, model_dir, number=1)
        (w.root / "1.safetensors").write_bytes(b"broken")
        with pytest.raises(Exception, match=r"(?i)checksum|sha256|bytes"):
            await w.client.load_weights(manifest)
        assert (await w.client.get_policy()).reason == "WEIGHTS_BAD"
        assert trainer.try_own()
        trainer.release()
        await w.client.load_weights(publish(w.root, model_dir, number=2))
        assert (await w.client.get_policy()).ready


async def test_it_wakes_by_itself_when_nobody_has_the_device(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        waking = asyncio.create_task(w.replica.wake_when_left(after_s=0.1, look_every_s=0.02))
        await w.client.sleep()
        assert trainer.try_own()
        await asyncio.sleep(0.3)
        assert (await w.client.get_policy()).reason == "ASLEEP", "the trainer works"
        trainer.release()  # as when it is killed
        async with asyncio.timeout(PATIENCE_S):
            while not (await w.client.get_policy()).ready:
                await asyncio.sleep(0.01)
        assert await w.client.generate(QUESTION)
        waking.cancel()


async def test_where_latest_json_cannot_be_read_the_weights_are_kept(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        await w.client.load_weights(publish(w.root, model_dir, number=1))
        (w.root / "latest.json").write_text("{broken")
        await w.client.sleep()
        assert trainer.try_own()
        trainer.release()
        await w.client.wake()
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.policy_versions == (FIRST,)
        assert await w.health() == "SERVING"


@pytest.mark.parametrize("broken", ["_report", "_lease.drain"])
async def test_one_that_cannot_fall_asleep_stays_awake(model_dir, tmp_path, monkeypatch, broken):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        *owner, name = broken.split(".")
        whose = w.replica._lease if owner else w.replica
        monkeypatch.setattr(whose, name, failing_once(getattr(whose, name)))
        await assert_refused(w.client.sleep(), InternalError, "INTERNAL")
        assert not trainer.try_own()
        assert await w.health() == "SERVING"
        assert await w.client.generate(QUESTION)
        await w.client.sleep()
        assert trainer.try_own()


async def test_a_caller_who_leaves_a_logprob_does_not_leave_it_on_the_device(
    model_dir, tmp_path, monkeypatch
):
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        assert may_end.wait(PATIENCE_S)
        ended.set()
        return score(*arguments)

    monkeypatch.setattr(transformers_engine, "score", slow)
    async with sharing(model_dir, tmp_path) as (w, trainer):
        asking = asyncio.create_task(w.replica.logprobs([[1, 2, 3], [4, 5]]))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        asking.cancel()
        await asyncio.sleep(0)
        asking.cancel()
        sleeping = asyncio.create_task(w.client.sleep(drain_s=0.01))
        await asyncio.sleep(0.1)
        assert not trainer.try_own(), "a thread computes"
        may_end.set()
        await sleeping
        assert trainer.try_own()
        assert ended.is_set()


async def test_a_publish_that_would_wait_wakes_one_that_is_held(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        waits = replace(publish(w.root, model_dir, number=1), update_mode=UpdateMode.WAIT)
        await w.client.pause()
        await assert_refused(w.client.load_weights(waits), PreconditionFailed, "PAUSED")
        await w.client.sleep()
        await w.client.load_weights(waits)
        assert not trainer.try_own()
        await w.client.resume()
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.policy_versions == (FIRST,)


async def test_a_sleep_may_last_as_long_as_what_is_under_way():
    deadlines = []

    class Heard:
        async def call(self, rpc, request, *, deadline_s):
            deadlines.append(deadline_s)

    client = InferenceClient(Heard())
    await client.sleep(drain_s=90.0)
    await client.sleep()
    await client.sleep(drain_s=90.0, deadline_s=5.0)
    assert deadlines == [120.0, 60.0, 5.0]


def failing_once(call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The same, but the first time there is no memory."""
    failures = [RuntimeError("CUDA out of memory")]

    async def fail_once(*arguments: object) -> None:
        if failures:
            raise failures.pop()
        await call(*arguments)

    return fail_once


async def test_a_wake_that_fails_leaves_the_device_to_the_trainer(model_dir, tmp_path, monkeypatch):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        engine = w.replica.engine
        await w.client.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(engine, "wake", failing_once(engine.wake))
            await assert_refused(w.client.wake(), InternalError, "INTERNAL")
            assert trainer.try_own()
            trainer.release()
            patch.setattr(engine, "wake", failing_once(engine.wake))
            manifest = publish(w.root, model_dir, number=1)
            await assert_refused(w.client.load_weights(manifest), InternalError, "INTERNAL")
            assert (await w.client.get_policy()).reason == "ASLEEP"
            assert trainer.try_own()
            trainer.release()
        await w.client.wake()
        assert not trainer.try_own()
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.policy_versions == (FIRST,)


async def test_an_engine_that_dies_waking_ends_the_service(model_dir, tmp_path, monkeypatch):
    async with sharing(model_dir, tmp_path) as (w, _):
        await w.client.sleep()
        watched = asyncio.create_task(w.replica.until_engine_dies())

        async def dies() -> None:
            await w.replica.engine.close()
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(w.replica.engine, "wake", dies)
        await assert_refused(w.client.wake(), InternalError, "INTERNAL")
        async with asyncio.timeout(PATIENCE_S):
            await watched
        assert await w.health() == "NOT_SERVING"
        assert (await w.client.get_policy()).reason == "NOT_READY"


async def test_asked_to_sleep_again_it_lets_go_of_whatever_it_still_holds(model_dir, tmp_path):
    async with sharing(model_dir, tmp_path) as (w, trainer):
        await w.client.sleep()
        await w.replica._lease.take()  # and nobody let go
        assert not trainer.try_own()
        await w.client.sleep()
        assert trainer.try_own()


async def test_who_could_not_wake_by_itself_tries_again(model_dir, tmp_path, monkeypatch):
    async with sharing(model_dir, tmp_path) as (w, _):
        await w.client.sleep()
        monkeypatch.setattr(w.replica.engine, "wake", failing_once(w.replica.engine.wake))
        waking = asyncio.create_task(w.replica.wake_when_left(after_s=0.04, look_every_s=0.02))
        async with asyncio.timeout(PATIENCE_S):
            while not (await w.client.get_policy()).ready:
                assert not waking.done()
                await asyncio.sleep(0.01)
        waking.cancel()


async def test_one_with_a_device_of_its_own_does_not_sleep(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        await assert_refused(w.client.sleep(), PreconditionFailed, "SLEEP_DISABLED")
        await assert_refused(w.client.wake(), PreconditionFailed, "SLEEP_DISABLED")
        assert (await w.client.get_policy()).ready
