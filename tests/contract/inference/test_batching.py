"""Requests that begin together: so many samples at least and at most, never past a deadline."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from dialoop.clients.weights import WeightsManifest
from dialoop.episode import UpdateMode
from dialoop.errors import DialoopError, InvalidConfig, Unavailable
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_services.hosting.in_process import InProcessNetwork
from dialoop_services.inference.__main__ import _until_over
from dialoop_services.inference.engine import Sampled, StopTokens
from dialoop_services.inference.replica.batching import BatchLimits, RequestBatches
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.runtime.settings import load

from tests.support.inference_world import QUESTION, model_dir, world  # noqa: F401
from tests.support.rest_world import TwinEngine, http_of
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NEVER_S = 1000.0
DONE = Sampled(token_ids=(), logprobs=(), versions=(), stop_reason=StopReason.STOP)


class HeldEngine(TwinEngine):
    """Tells who is with it, and ends nobody's sampling before it may."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.began: list[float] = []
        self.most = 0
        self.may_end = asyncio.Event()

    async def sample(self, prompt_ids, sampling, *, num_samples=1, **_):
        self.inside.append(prompt_ids[0])
        self.began.append(asyncio.get_running_loop().time())
        self.most = max(self.most, len(self.inside))
        try:
            await self.may_end.wait()
            await asyncio.sleep(0)
        finally:
            self.inside.remove(prompt_ids[0])
        return (DONE,) * num_samples


class Asker:
    """Asks a replica with limits, one number per request."""

    def __init__(
        self, tasks: asyncio.TaskGroup, *, weights_root: Path | None = None, **limits
    ) -> None:
        async def report(serving: bool) -> None:
            """Nobody asks."""

        self.engine = HeldEngine()
        self.batches = RequestBatches(BatchLimits(**limits))
        self.replica = Replica(
            self.engine, weights_root=weights_root, report=report, batches=self.batches
        )
        self._tasks = tasks

    async def ask(self, number: int, num_samples: int = 1) -> asyncio.Task:
        """A request that has come as far as it can."""
        sampling = self.replica.sample(
            [number], SamplingParams(), stop=StopTokens(), num_samples=num_samples
        )
        task = self._tasks.create_task(sampling)
        await let_tasks_run()
        return task


@asynccontextmanager
async def asking(**limits) -> AsyncIterator[Asker]:
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        asker = Asker(tasks, **limits)
        yield asker
        asker.engine.may_end.set()


async def let_tasks_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_by_default_nobody_waits():
    async with asking() as asker:
        for number in (1, 2, 3):
            await asker.ask(number)
            assert asker.engine.inside == list(range(1, number + 1))


async def test_requests_wait_until_enough_samples_are_there():
    async with asking(min_batch_size=4, timeout_s=NEVER_S) as asker:
        await asker.ask(1)
        await asker.ask(2, num_samples=2)
        assert asker.engine.inside == []
        assert asker.replica.num_requests_running == 2
        await asker.ask(3)
        assert sorted(asker.engine.inside) == [1, 2, 3]
        late = await asker.ask(4)
        assert sorted(asker.engine.inside) == [1, 2, 3]
        late.cancel()


async def test_a_partial_batch_begins_at_the_deadline_of_its_first():
    async with asking(min_batch_size=3, timeout_s=0.2) as asker:
        asked_at = asyncio.get_running_loop().time()
        await asker.ask(1)
        await asker.ask(2)
        while len(asker.engine.inside) < 2:
            await asyncio.sleep(0.01)
        assert asker.engine.began[0] - asked_at > 0.19


async def test_no_more_than_the_largest_batch_is_with_the_engine():
    async with asking(max_batch_size=2) as asker:
        tasks = [await asker.ask(number) for number in (1, 2, 3, 4)]
        assert asker.engine.inside == [1, 2]
        asker.engine.may_end.set()
        await asyncio.gather(*tasks)
        assert asker.engine.most == 2


async def test_what_of_a_due_batch_found_no_room_begins_once_there_is_room():
    async with asking(min_batch_size=2, max_batch_size=3, timeout_s=NEVER_S) as asker:
        tasks = [await asker.ask(number) for number in (1, 2, 3, 4)]
        assert sorted(asker.engine.inside) == [1, 2, 3]
        tasks[0].cancel()
        await let_tasks_run()
        assert sorted(asker.engine.inside) == [2, 3, 4]
        later = await asker.ask(5)
        tasks[1].cancel()
        await let_tasks_run()
        assert sorted(asker.engine.inside) == [
            3,
            4,
        ]  # who comes after them waits for a batch of its own
        later.cancel()


async def test_a_request_is_never_split_and_a_large_one_begins_alone():
    async with asking(max_batch_size=4) as asker:
        first = await asker.ask(1, num_samples=3)
        large = await asker.ask(2, num_samples=9)
        await asker.ask(3)
        assert asker.engine.inside == [1]  # and nobody overtakes
        asker.engine.may_end.set()
        await first
        assert len(await large) == 9


async def test_who_leaves_while_waiting_is_forgotten():
    async with asking(min_batch_size=3, timeout_s=NEVER_S) as asker:
        leaver = await asker.ask(1)
        await asker.ask(2)
        leaver.cancel()
        await let_tasks_run()
        assert asker.replica.num_requests_running == 1
        await asker.ask(3)
        assert asker.engine.inside == []
        await asker.ask(4)
        assert sorted(asker.engine.inside) == [2, 3, 4]


async def test_who_leaves_the_engine_gives_the_place_to_the_next():
    async with asking(max_batch_size=1) as asker:
        first = await asker.ask(1)
        await asker.ask(2)
        first.cancel()
        await let_tasks_run()
        assert asker.engine.inside == [2]


async def test_a_server_that_stops_begins_what_waits_for_a_batch():
    server = InProcessNetwork().server("inference")
    async with asking(min_batch_size=3, max_batch_size=3, timeout_s=NEVER_S) as asker:
        serving = asyncio.create_task(_until_over(server, asker.replica, wake_after_s=NEVER_S))
        await asker.ask(1)
        assert asker.engine.inside == []
        server.stop()
        await serving
        await let_tasks_run()
        assert asker.engine.inside == [1]
        await asker.ask(2)
        await asker.ask(3, num_samples=2)
        assert sorted(asker.engine.inside) == [1, 2]  # there is room for no more


async def test_a_replica_that_left_rotation_meanwhile_says_so_to_those_who_waited():
    async with asking(min_batch_size=2, timeout_s=NEVER_S) as asker:
        sampling = asker.replica.sample([1], SamplingParams(), stop=StopTokens())
        task = asyncio.ensure_future(sampling)
        await let_tasks_run()
        await asker.replica._leave_rotation("WEIGHTS_BAD")
        async with asker.batches.place(1):
            with pytest.raises(Unavailable):
                await task
        assert asker.engine.most == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_ids": []}, "NO_TOKENS"),
        ({"prompt_ids": [10**6]}, "TOKEN_OUT_OF_RANGE"),
        ({"sampling": SamplingParams(top_p=0.0)}, "INVALID_SAMPLING"),
        ({"num_samples": 2, "on_tokens": print}, "INVALID_SAMPLING"),
        ({"adapter": "nope"}, "ADAPTER_NOT_FOUND"),
    ],
)
async def test_what_is_refused_neither_waits_for_a_batch_nor_counts_in_it(change, reason):
    call = {"prompt_ids": [2], "sampling": SamplingParams(), "stop": StopTokens()} | change
    async with asking(min_batch_size=2, timeout_s=NEVER_S) as asker:
        waiting = await asker.ask(1)
        with pytest.raises(DialoopError) as refused:
            await asker.replica.sample(**call)
        assert refused.value.reason == reason
        await let_tasks_run()
        assert asker.engine.began == []
        waiting.cancel()


async def test_a_full_context_is_answered_without_a_batch():
    async with asking(min_batch_size=2, timeout_s=NEVER_S) as asker:
        waiting = await asker.ask(1)
        full = [7] * asker.engine.max_model_len
        (sampled,) = await asker.replica.sample(full, SamplingParams(), stop=StopTokens())
        assert (sampled.stop_reason, sampled.token_ids) == (StopReason.CONTEXT_FULL, ())
        await let_tasks_run()
        assert asker.engine.began == []
        waiting.cancel()


async def test_a_load_during_the_wait_for_a_batch_is_no_load_during_the_sampling(tmp_path):
    (tmp_path / "weights").write_bytes(b"x")
    manifest = WeightsManifest(
        policy_version=PolicyVersion(lineage="main", number=4),
        sha256=hashlib.sha256(b"x").hexdigest(),
        num_bytes=1,
        path="weights",
        update_mode=UpdateMode.KEEP_KV,
    )
    async with asking(min_batch_size=2, timeout_s=NEVER_S, weights_root=tmp_path) as asker:
        early = await asker.ask(1)
        await asker.replica.load(manifest, nothing())
        await asker.ask(2)
        asker.engine.may_end.set()
        (sampled,) = await early
        assert sampled.update_mode is UpdateMode.RECOMPUTE


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def test_both_doors_share_a_batch(model_dir, tmp_path):
    sampling = {"temperature": 0.0, "max_new_tokens": 3}
    async with world(model_dir, tmp_path / "w", has_rest=True) as w, http_of(w.server) as http:
        limits = BatchLimits(min_batch_size=3, timeout_s=NEVER_S)
        w.replica._batches = RequestBatches(limits)
        over_grpc = asyncio.create_task(
            w.client.generate(QUESTION, sampling=SamplingParams(**sampling), num_samples=2)
        )
        async with asyncio.timeout(PATIENCE_S):
            while not w.replica.num_requests_running:
                await asyncio.sleep(0.01)
            assert w.replica.engine.num_running == 0
            body = {"text": "12", "sampling": sampling}
            over_rest = await http.post("/v1/generate", json=body)
            assert len(await over_grpc) == 2
    assert over_rest.status_code == 200


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"min_batch_size": 8, "max_batch_size": 4}, "min_batch_size is 8"),
        ({"batching": False, "min_batch_size": 8}, "min_batch_size would have no effect"),
        ({"batching": False, "max_batch_size": 8}, "max_batch_size"),
        ({"batching": False, "batching_timeout_s": 1.0}, "batching_timeout_s"),
        ({"min_batch_size": 0}, "MIN_BATCH_SIZE"),
        ({"batching_timeout_s": 0.0}, "BATCHING_TIMEOUT_S"),
        ({"batching_timeout_s": float("inf")}, "BATCHING_TIMEOUT_S"),
    ],
)
def test_wrong_sizes_end_the_start_with_one_sentence(sizes, named, tmp_path):
    with pytest.raises(InvalidConfig, match=named):
        load(InferenceSettings, model_dir=tmp_path, **sizes)


def test_right_sizes_are_taken(tmp_path):
    sizes = {"min_batch_size": 2, "max_batch_size": 4, "batching_timeout_s": 0.5}
    settings = load(InferenceSettings, model_dir=tmp_path, **sizes)
    expected = BatchLimits(min_batch_size=2, max_batch_size=4, timeout_s=0.5)
    assert settings.batch_limits == expected
    assert load(InferenceSettings, model_dir=tmp_path, batching=False).batch_limits == BatchLimits()


@pytest.mark.parametrize(
    "wrong", [{"min_batch_size": 3, "max_batch_size": 2}, {"min_batch_size": 0}, {"timeout_s": 0}]
)
def test_limits_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(InvalidConfig):
        BatchLimits(**wrong)
