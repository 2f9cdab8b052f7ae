"""The time limit of an answer grows with max_new_tokens, and counts no wait to begin."""

from __future__ import annotations

import asyncio

import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.environment import CREATE_GROUP, RESET, STEP
from dialoop.clients.errors import is_outage, is_worth_retrying
from dialoop.clients.inference import GENERATE
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import DeadlineExceeded
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_services.inference.engine import EngineOptions, Sampled, StopTokens
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.replica.time_limit import TimeLimit
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.runtime.settings import load

from tests.support.inference_world import QUESTION, model_dir, world  # noqa: F401
from tests.support.rest_world import TwinEngine
from tests.support.waiting import PATIENCE_S, until

DONE = Sampled(token_ids=(), logprobs=(), versions=(), stop_reason=StopReason.STOP)
NEVER_S = 1000.0


class SlowEngine(TwinEngine):
    """Samples for so long as each request's first token says."""

    max_model_len = 2000

    async def sample(self, prompt_ids, sampling, *, num_samples=1, **_):
        await asyncio.sleep(prompt_ids[0])
        return (DONE,) * num_samples


class QueueingEngine(SlowEngine):
    """Lets every request wait until it is told to begin."""

    tells_begin = True

    def __init__(self) -> None:
        self.may_begin = asyncio.Event()
        self.num_waiting = 0

    async def sample(self, prompt_ids, sampling, *, num_samples=1, on_begin=None, **_):
        self.num_waiting += 1
        await self.may_begin.wait()
        on_begin()
        return await super().sample(prompt_ids, sampling, num_samples=num_samples)


def replica_of(engine, **limit: float) -> Replica:
    async def report(serving: bool) -> None:
        """Nobody asks."""

    return Replica(engine, weights_root=None, report=report, time_limit=TimeLimit(**limit))


async def ask(replica: Replica, seconds: int, max_new_tokens: int = 1):
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return await replica.sample([seconds], sampling, stop=StopTokens())


async def test_an_answer_that_takes_too_long_is_its_own_failure_and_harms_no_other():
    replica = replica_of(SlowEngine(), base_s=0.05, per_token_s=0.0)
    with pytest.raises(DeadlineExceeded) as caught:
        await ask(replica, 200)
    error = caught.value
    assert error.reason == "ANSWER_TIMED_OUT"
    assert "answer_s_per_token" in error.remedy
    assert not is_worth_retrying(error)
    assert not is_outage(error)
    assert replica.num_requests_running == 0
    assert not replica.fault
    assert await ask(replica, 0) == (DONE,)


async def test_the_limit_grows_with_the_tokens_that_the_answer_may_have():
    replica = replica_of(SlowEngine(), base_s=0.01, per_token_s=1.0)
    with pytest.raises(DeadlineExceeded, match="at most 1 tokens"):
        await ask(replica, 2, max_new_tokens=1)
    assert await ask(replica, 1, max_new_tokens=60) == (DONE,)


async def test_the_wait_in_the_engines_queue_does_not_count():
    engine = QueueingEngine()
    replica = replica_of(engine, base_s=0.2, per_token_s=0.0)
    asking = asyncio.ensure_future(ask(replica, 0))
    await until(lambda: engine.num_waiting)
    await asyncio.sleep(0.5)
    assert not asking.done()
    engine.may_begin.set()
    assert await asking == (DONE,)
    with pytest.raises(DeadlineExceeded):
        await ask(replica, 200)


async def test_the_transformers_engine_says_when_a_request_begins(model_dir):
    """With one place the second request begins only when the first has ended."""
    options = EngineOptions(max_model_len=64, max_num_seqs=1)
    engine = await TransformersEngine.start(model_dir, options)
    happened: list[str] = []

    async def sample(name: str) -> None:
        await engine.sample(
            [1, 2],
            SamplingParams(max_new_tokens=8),
            stop=StopTokens(),
            on_begin=lambda: happened.append(f"{name} begins"),
        )
        happened.append(f"{name} ends")

    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(sample("first"), sample("second"))
    finally:
        await engine.close()
    assert happened.index("first begins") == 0
    assert happened.index("second begins") > 0
    assert happened.count("second begins") == 1
    assert sorted(happened)[1::2] == ["first ends", "second ends"]


async def test_the_reason_arrives_over_the_wire_and_is_not_asked_again(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "weights") as served:
        served.replica._time_limit = TimeLimit(base_s=1e-6, per_token_s=0.0)
        num_asked = 0
        sample = served.replica.sample

        async def count(*args, **options):
            nonlocal num_asked
            num_asked += 1
            return await sample(*args, **options)

        served.replica.sample = count
        async with Channel(served.server.address, retry=RetryPolicy(max_attempts=5)) as channel:
            client = type(served.client)(channel)
            with pytest.raises(DeadlineExceeded) as caught:
                await client.generate(QUESTION)
    assert caught.value.reason == "ANSWER_TIMED_OUT"
    assert num_asked == 1


@pytest.mark.parametrize("rpc", [GENERATE, RESET, STEP, CREATE_GROUP])
async def test_the_client_has_no_deadline_of_its_own_where_the_service_has_one(rpc, monkeypatch):
    timeouts: list[object] = []

    class Recording:
        def unary_unary(self, path, **_):
            async def call(request, *, timeout, metadata):
                timeouts.append(timeout)
                return rpc.answer()

            return call

    monkeypatch.setattr("dialoop.clients.channel.open_channel", lambda *_: Recording())
    channel = Channel("nowhere")
    await channel.call(rpc, rpc.request())
    await channel.call(rpc, rpc.request(), deadline_s=5.0)
    assert timeouts[0] is None
    assert timeouts[1] == pytest.approx(5.0, abs=1.0)


def test_the_limit_follows_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("DIALOOP_INFERENCE_MODEL_DIR", str(tmp_path))
    monkeypatch.setenv("DIALOOP_INFERENCE_ANSWER_BASE_S", "7")
    monkeypatch.setenv("DIALOOP_INFERENCE_ANSWER_S_PER_TOKEN", "0.5")
    assert load(InferenceSettings).time_limit == TimeLimit(base_s=7, per_token_s=0.5)
