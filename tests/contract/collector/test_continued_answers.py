"""When a replica dies in mid-answer, another goes on after the tokens that have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop.chat import History
from dialoop.clients.inference import SampleChunk
from dialoop.clients.retry import RetryPolicy
from dialoop.episode import Sample
from dialoop.errors import Unavailable, Unsupported
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.testing import ScriptedPolicy
from dialoop.trajectory import SamplingParams
from dialoop_services.collector import replicas
from dialoop_services.collector.replicas import Replicas
from dialoop_services.collector.routing import RoutingCounts, rank

from tests.support.inference_world import (
    MAX_MODEL_LEN,
    QUESTION,
    World,
    make_endless_model,
    publish,
    world,
)

QUICK = RetryPolicy(max_attempts=3, first_wait_s=0.001, max_wait_s=0.001)
GONE = RetryPolicy(max_attempts=3, first_wait_s=60, max_wait_s=60)  # who dies stays away
LONG = SamplingParams(max_new_tokens=120)
CHUNK = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_endless_model(tmp_path_factory.mktemp("m") / "model", max_model_len=MAX_MODEL_LEN)


@pytest.fixture(autouse=True)
def short_answers_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_LONG_ANSWER", 100)
    monkeypatch.setattr(replicas, "_CHUNK_TOKENS", CHUNK)


class Mortal:
    """A replica that dies once it has sent `dies_after` tokens; what it sampled is counted."""

    def __init__(self, w: World, *, dies_after: int | None = None) -> None:
        self.client, self.engine, self.dies_after = w.client, w.replica.engine, dies_after
        self.num_asked, self.num_sampled = 0, 0
        stream: Any = self.engine.stream

        async def counting(*arguments: Any, on_tokens: Any, **named: Any) -> Any:
            def count(chunk: Any) -> None:
                self.num_sampled += len(chunk.token_ids)
                on_tokens(chunk)

            return await stream(*arguments, on_tokens=count, **named)

        self.engine.stream = counting

    async def generate(self, *arguments: Any, **named: Any) -> tuple[Sample, ...]:
        return await self.client.generate(*arguments, **named)

    async def generate_stream(self, *arguments: Any, **named: Any) -> AsyncIterator[SampleChunk]:
        self.num_asked += 1
        num_sent = 0
        async with aclosing(self.client.generate_stream(*arguments, **named)) as chunks:
            async for chunk in chunks:
                num_sent += len(chunk.token_ids)
                yield chunk
                if self.dies_after is not None and num_sent >= self.dies_after:
                    raise Unavailable("killed", reason=Reason.SERVICE_DIED)


async def rescore(w: World, sample: Sample) -> np.ndarray[Any, Any]:
    """Log-probs of the sampled tokens under the policy that the replica serves."""
    ids = sample.sequence.token_ids.tolist()
    (row,) = await w.client.logprobs([ids])
    sampled = sample.sequence.response_mask()[1:]
    return row[sampled]


async def test_another_goes_on_after_the_tokens_and_each_is_as_its_own_version_says(
    model_dir: Path, tmp_path: Path
) -> None:
    async with world(model_dir, tmp_path / "a") as a, world(model_dir, tmp_path / "b") as b:
        newer = publish(b.root, model_dir, number=1, scale=0.02)
        await b.client.load_weights(newer)
        dying, living = Mortal(a, dies_after=90), Mortal(b)
        first, second = rank("g", [make_place("x"), make_place("y")])
        counts = RoutingCounts()
        group = Replicas({first.name: dying, second.name: living}, GONE, counts).of_group("g")
        (sample,) = await group.generate(QUESTION, sampling=LONG)
        versions = [
            (s.length, str(s.policy_version))
            for s in sample.sequence.segments
            if s.source is Source.MODEL
        ]
        kept = versions[0][0]
        assert versions == [(kept, "base-0"), (120 - kept, "main-1")]
        assert counts.num_kept_tokens == {second.name: kept}
        # At most what had not been sent yet: 5 % of the answer.
        assert kept >= 90
        assert dying.num_sampled - kept <= 0.05 * 120
        assert dying.num_sampled + living.num_sampled <= 1.05 * 120
        own = sample.sequence.inference_logprobs
        before, after = await rescore(a, sample), await rescore(b, sample)
        assert np.abs(before - own)[:kept].max() < 1e-4
        assert np.abs(after - own)[kept:].max() < 1e-4
        assert np.abs(before - own)[kept:].max() > 1e-3, "the versions differ"
        content = sample.history.require_full()[-1].text
        answer = sample.sequence.token_ids[sample.sequence.response_mask()].tolist()
        assert content == b.renderer.tokenizer.decode(answer)


async def test_a_whole_group_goes_on_and_its_next_turns_stay_with_the_survivor(
    model_dir: Path, tmp_path: Path
) -> None:
    async with world(model_dir, tmp_path / "a") as a, world(model_dir, tmp_path / "b") as b:
        dying, living = Mortal(a, dies_after=30), Mortal(b)
        first, second = rank("g", [make_place("x"), make_place("y")])
        group = Replicas({first.name: dying, second.name: living}, GONE).of_group("g")
        asking = (group.generate(QUESTION, sampling=LONG) for _ in range(3))
        samples = [sample for (sample,) in await asyncio.gather(*asking)]
        assert len({sample.prompt_id for sample in samples}) == 1
        assert {len(s.sequence.inference_logprobs) for s in samples} == {120}
        assert len({tuple(s.sequence.token_ids.tolist()) for s in samples}) == 3
        num_asked = dying.num_asked
        await group.generate(QUESTION, sampling=LONG)
        assert (dying.num_asked, living.num_asked) == (num_asked, 4)


async def test_what_cannot_go_on_is_sampled_anew(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, tmp_path / "a") as w:
        mortal = Mortal(w)
        seeded = SamplingParams(max_new_tokens=120, seed=1)
        await Replicas({"a": mortal}, QUICK).generate(QUESTION, sampling=seeded)
        short = SamplingParams(max_new_tokens=20)
        await Replicas({"a": mortal}, QUICK).generate(QUESTION, sampling=short)
        samples = await Replicas({"a": mortal}, QUICK).generate(
            QUESTION, sampling=LONG, num_samples=2
        )
        assert len(samples) == 2
        assert mortal.num_asked == 0


async def test_a_replica_whose_engine_does_not_stream_is_asked_for_whole_answers() -> None:
    class Silent(ScriptedPolicy):
        num_streams = 0

        async def generate_stream(self, history: History, **_: Any) -> AsyncIterator[SampleChunk]:
            self.num_streams += 1
            raise Unsupported("does not stream", reason=Reason.UNSUPPORTED)
            yield

    silent = Silent(["a"])
    fleet = Replicas({"a": silent}, QUICK)
    answers = [(await fleet.generate(QUESTION, sampling=LONG))[0] for _ in range(2)]
    assert {answer.history.require_full()[-1].text for answer in answers} == {"a"}
    assert silent.num_streams == 1


def make_place(name: str) -> Any:
    class Named:
        num_running = 0

    named = Named()
    named.name = name  # type: ignore[attr-defined]
    return named
