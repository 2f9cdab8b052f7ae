"""Adapters on both engines against weights merged by hand: used, swapped, gone, mixed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
from dialoop.clients.weights import Probe, WeightsManifest
from dialoop.errors import DialoopError, NotFound, PreconditionFailed, Unavailable
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.weights.adapter_files import AdapterLimits

from tests.support.engine_world import (
    MAX_MODEL_LEN,
    NO_STOP,
    make_model,
    prompts,
    save_model,
    save_weights,
)
from tests.support.samples.adapter_samples import (
    adapter_tensors,
    config_json,
    make_announcement,
    merged_model,
    scores,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dialoop_services.inference.engine import Engine

TOLERANCE = 1e-5
LIMITS = AdapterLimits(max_adapters=2, max_rank=8)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


async def start(kind: str, folder: Path) -> Engine:
    options = EngineOptions(max_model_len=MAX_MODEL_LEN, adapters=LIMITS)
    if kind == "vllm":
        pytest.importorskip("vllm")
        from dialoop_services.inference.vllm_engine.engine import VllmEngine

        return await VllmEngine.start(folder, options)
    from dialoop_services.inference.transformers_engine.engine import TransformersEngine

    return await TransformersEngine.start(folder, options)


class World:
    """A replica, the adapters it was given, and the seed of its whole weights."""

    def __init__(self, engine: Engine, root: Path, *, tied: bool) -> None:
        async def report(serving: bool) -> None:
            self.serving = serving

        self.engine, self.root, self.tied, self.seed, self.number = engine, root, tied, 0, 0
        self.replica = Replica(engine, weights_root=root, report=report)
        self.loaded: dict[str, dict] = {}

    async def load(self, name: str, *, seed: int, **manifest: object) -> WeightsManifest:
        tensors = adapter_tensors(seed=seed, tied=self.tied)
        self.number += 1
        announcement = make_announcement(
            self.root / f"a{self.number}.safetensors",
            tensors,
            number=self.number,
            name=name,
            **manifest,
        )
        await self.replica.load(announcement, _no_chunks())
        self.loaded[name] = tensors
        return announcement

    def expected_logprobs(self, name: str, ids: list[int]) -> np.ndarray:
        if not name:
            return scores(make_model(seed=self.seed, tied=self.tied), ids)
        return scores(merged_model(self.loaded[name], seed=self.seed, tied=self.tied), ids)

    async def difference(self, name: str, ids: list[int]) -> float:
        (scored,) = await self.replica.logprobs([ids], adapter=name)
        return float(np.abs(scored.logprobs - self.expected_logprobs(name, ids)).max())


async def _no_chunks() -> AsyncIterator[bytes]:
    return
    yield b""


KINDS = [
    pytest.param(("transformers", True), id="transformers-tied"),
    pytest.param(("transformers", False), id="transformers-untied"),
    *(
        pytest.param(
            ("vllm", tied),
            id=f"vllm-{'tied' if tied else 'untied'}",
            marks=[pytest.mark.heavy(reason="starts vLLM"), pytest.mark.vllm],
        )
        for tied in (True, False)
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def choice(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    choice: tuple[str, bool], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    kind, tied = choice
    engine = await start(kind, save_model(tmp_path_factory.mktemp("model"), seed=0, tied=tied))
    yield engine
    await engine.close()


_numbers = iter(range(1, 1000))


@pytest_asyncio.fixture(loop_scope="module")
async def w(engine: Engine, choice: tuple[str, bool], tmp_path: Path) -> AsyncIterator[World]:
    world = World(engine, tmp_path, tied=choice[1])
    await reload(world, seed=0)
    yield world
    for name in world.replica.adapters:
        await world.replica.unload_adapter(name)


async def reload(w: World, *, seed: int) -> None:
    """Whole weights of a seed."""
    import hashlib

    number = next(_numbers)
    path = save_weights(w.root / f"w{number}.safetensors", seed=seed, tied=w.tied)
    data = path.read_bytes()
    manifest = WeightsManifest(
        policy_version=PolicyVersion(lineage="main", number=number),
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        path=path.name,
    )
    await w.replica.load(manifest, _no_chunks())
    w.seed = seed


async def test_an_adapter_scores_as_merged_weights_and_the_policy_stays_as_it_was(w: World) -> None:
    announcement = await w.load("style", seed=1)
    for ids in prompts(3, shortest=20):
        assert await w.difference("style", ids) < TOLERANCE
        assert await w.difference("", ids) < TOLERANCE
        assert np.abs(w.expected_logprobs("style", ids) - w.expected_logprobs("", ids)).max() > 0.1
    (scored,) = await w.replica.logprobs([[1, 2, 3]], adapter="style")
    assert scored.policy_version == announcement.policy_version
    assert w.replica.adapters == {"style": announcement.policy_version}


async def test_after_a_swap_the_new_adapter_counts_also_behind_a_cached_prefix(w: World) -> None:
    (ids,) = prompts(1, shortest=100)
    await w.load("style", seed=1)
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    await w.replica.sample(ids, sampling, stop=NO_STOP, adapter="style")
    announcement = await w.load("style", seed=2)
    assert await w.difference("style", ids) < TOLERANCE
    (sampled,) = await w.replica.sample(ids, sampling, stop=NO_STOP, adapter="style")
    full = [*ids, *sampled.token_ids]
    expected = w.expected_logprobs("style", full)[len(ids) - 1 :]
    assert np.abs(np.array(sampled.logprobs) - expected).max() < TOLERANCE
    assert [span.policy_version for span in sampled.versions] == [announcement.policy_version]


async def test_rows_of_one_batch_each_have_their_own_adapter(w: World) -> None:
    await w.load("style", seed=1)
    await w.load("other", seed=2)
    names = ["", "style", "other"] * 4
    sampling = SamplingParams(max_new_tokens=16)
    requests = list(zip(names, prompts(len(names), shortest=8), strict=True))
    answers = await asyncio.gather(
        *(w.replica.sample(p, sampling, stop=NO_STOP, adapter=n) for n, p in requests)
    )
    for (name, prompt), (sampled,) in zip(requests, answers, strict=True):
        expected = w.expected_logprobs(name, [*prompt, *sampled.token_ids])[len(prompt) - 1 :]
        assert np.abs(np.array(sampled.logprobs) - expected).max() < TOLERANCE


async def test_samples_under_way_end_with_the_adapter_they_began_with(w: World) -> None:
    before = await w.load("style", seed=1)
    old = dict(w.loaded)
    (prompt,) = prompts(1, shortest=8)
    chunks = []
    task = asyncio.create_task(
        w.replica.sample(
            prompt,
            SamplingParams(max_new_tokens=120),
            stop=NO_STOP,
            on_tokens=chunks.append,
            adapter="style",
        )
    )
    while len(chunks) < 5:
        await asyncio.sleep(0.005)
    after = await w.load("style", seed=2)
    assert not task.done()
    assert await w.difference("style", prompt) < TOLERANCE
    (sampled,) = await task
    assert [span.policy_version for span in sampled.versions] == [before.policy_version]
    assert {chunk.policy_version for chunk in chunks} == {before.policy_version}
    assert w.replica.adapters == {"style": after.policy_version}
    w.loaded = old
    expected = w.expected_logprobs("style", [*prompt, *sampled.token_ids])[len(prompt) - 1 :]
    assert np.abs(np.array(sampled.logprobs) - expected).max() < TOLERANCE


async def test_an_adapter_that_adds_nothing_loads_and_scores_as_the_policy(w: World) -> None:
    tensors = adapter_tensors(seed=1, tied=w.tied, std=0.0)
    announcement = make_announcement(w.root / "zero.safetensors", tensors, number=1, name="zero")
    await w.replica.load(announcement, _no_chunks())
    (scored,) = await w.replica.logprobs([[5, 6, 7, 8]], adapter="zero")
    assert np.abs(scored.logprobs - w.expected_logprobs("", [5, 6, 7, 8])).max() < TOLERANCE


async def test_an_unloaded_adapter_is_not_found_and_unloading_again_does_no_harm(w: World) -> None:
    await w.load("style", seed=1)
    assert await w.replica.unload_adapter("style")
    assert not await w.replica.unload_adapter("style")
    with pytest.raises(NotFound) as caught:
        await w.replica.logprobs([[1, 2]], adapter="style")
    assert caught.value.reason == "ADAPTER_NOT_FOUND"
    assert await w.difference("", [1, 2, 3]) < TOLERANCE


async def test_new_weights_end_adapters_and_what_samples_with_them(w: World) -> None:
    await w.load("style", seed=1)
    (prompt,) = prompts(1)
    begun = asyncio.Event()
    sampling = SamplingParams(max_new_tokens=200)
    with_adapter, without = (
        asyncio.create_task(
            w.replica.sample(
                prompt,
                sampling,
                stop=NO_STOP,
                on_tokens=lambda _: begun.set(),
                adapter=name,
            )
        )
        for name in ("style", "")
    )
    await begun.wait()
    await reload(w, seed=3)
    with pytest.raises(Unavailable) as caught:
        await with_adapter
    assert caught.value.reason == "ADAPTER_LOST"
    (sampled,) = await without
    assert len(sampled.token_ids) == 200
    assert w.replica.adapters == {}
    assert await w.difference("", prompt) < TOLERANCE
    await w.load("style", seed=1)
    assert await w.difference("style", prompt) < TOLERANCE
    assert await w.difference("", prompt) < TOLERANCE


async def test_a_refused_adapter_leaves_the_one_that_had_the_name(w: World) -> None:
    announcement = await w.load("style", seed=1)
    ids = [3, 1, 4, 1, 5, 9]
    wrong = Probe(token_ids=tuple(ids), logprobs=np.full(5, -1.0, dtype=np.float32))
    tensors = adapter_tensors(seed=2, tied=w.tied)
    other = make_announcement(w.root / "x.safetensors", tensors, number=50, name="style")
    refusals: list[tuple[WeightsManifest, type[DialoopError], str]] = [
        (replace(other, probes=(wrong,)), PreconditionFailed, "PROBE_MISMATCH"),
        (
            replace(other, adapter_config_json=config_json(r=16)),
            PreconditionFailed,
            "ADAPTER_MISMATCH",
        ),
        (
            replace(other, policy_version=announcement.policy_version),
            PreconditionFailed,
            "VERSION_NOT_NEWER",
        ),
    ]
    for manifest, kind, reason in refusals:
        with pytest.raises(kind) as caught:
            await w.replica.load(manifest, _no_chunks())
        assert caught.value.reason == reason
        assert await w.difference("style", ids) < TOLERANCE
        assert w.replica.adapters == {"style": announcement.policy_version}
        assert not w.replica.fault


async def test_an_adapter_that_scores_as_its_publisher_says_is_taken(w: World) -> None:
    ids = [3, 1, 4, 1, 5, 9]
    model = merged_model(adapter_tensors(seed=4, tied=w.tied), seed=w.seed, tied=w.tied)
    probe = Probe(token_ids=tuple(ids), logprobs=scores(model, ids))
    announcement = await w.load("style", seed=4, probes=(probe,), max_logprob_difference=1e-5)
    assert w.replica.adapters == {"style": announcement.policy_version}


async def test_an_engine_that_passes_over_an_adapter_is_found_out(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = w.engine.logprobs

    async def deaf(ids, *, adapter=None):
        return await plain(ids)

    monkeypatch.setattr(w.engine, "logprobs", deaf)
    with pytest.raises(PreconditionFailed) as caught:
        await w.load("style", seed=1)
    assert caught.value.reason == "ADAPTER_NOT_IN_USE"
    assert w.replica.adapters == {}
