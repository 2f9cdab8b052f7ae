"""An engine of the user's own, named by its import path, serves as a built-in one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialoop.chat import History, Message
from dialoop.clients.inference import InferenceClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.weights import WeightsKind
from dialoop.errors import InvalidConfig, PreconditionFailed, Unsupported
from dialoop.sequences import PolicyVersion
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_ops.cli.doctor import examine
from dialoop_ops.stack import preflight
from dialoop_services.config.engines import ENGINES
from dialoop_services.config.file import parse_config
from dialoop_services.hosting import GrpcServer
from dialoop_services.hosting.in_process import InProcessNetwork
from dialoop_services.inference import engine as engines
from dialoop_services.inference.__main__ import serve_in
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.runtime.process import RESTARTS_VARIABLE
from dialoop_services.runtime.settings import load

from tests.support.inference_world import model_dir, point_to, publish  # noqa: F401
from tests.support.waiting import PATIENCE_S

QUESTION = History((Message(role="user", content="35+40"),))


class Echo:
    """Answers each prompt with its own last tokens. It has what every engine has, and no more."""

    name, version, is_alive = "echo", "3", True

    def __init__(self, model_dir: Path, options: engines.EngineOptions) -> None:
        self.max_model_len = options.max_model_len
        self.vocab_size = Tokenizer.from_directory(model_dir).vocab_size
        self.policy_version = engines.BASE_VERSION

    @classmethod
    async def start(cls, model_dir: Path, options: engines.EngineOptions) -> Echo:
        return cls(model_dir, options)

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1):
        ids = tuple(prompt_ids[-sampling.max_new_tokens :])
        span = engines.VersionSpan(start=0, length=len(ids), policy_version=self.policy_version)
        sampled = engines.Sampled(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(span,),
            stop_reason=StopReason.LENGTH,
        )
        return (sampled,) * num_samples

    async def logprobs(self, token_ids):
        values = np.full(len(token_ids) - 1, -1.0, dtype=np.float32)
        return engines.Scored(logprobs=values, policy_version=self.policy_version)

    async def load_weights(self, path, version, *, mode=engines.UpdateMode.RECOMPUTE):
        self.policy_version = version
        return engines.LoadTimes(pause_s=0.0, load_s=0.0)

    async def close(self) -> None:
        """There is nothing to give up."""


class Closed:
    """Has no `close` and no `load_weights`: is no engine."""

    name, version, is_alive, max_model_len, vocab_size = "closed", "1", True, 8, 8
    policy_version = engines.BASE_VERSION
    sample, logprobs = Echo.sample, Echo.logprobs

    @classmethod
    async def start(cls, model_dir: Path, options: engines.EngineOptions) -> Closed:
        return cls()


def path_of(name: str) -> str:
    return f"{__name__}:{name}"


@dataclass
class Host:
    server: GrpcServer
    connect: Any


@asynccontextmanager
async def serve(folder: Path, root: Path, **options: Any) -> AsyncIterator[InferenceClient]:
    settings = load(
        InferenceSettings,
        engine=path_of("Echo"),
        model_dir=folder,
        weights_root=root,
        max_model_len=128,
        **options,
    )
    network = InProcessNetwork()
    server = network.server("inference", drain_s=1)
    serving = asyncio.create_task(serve_in(Host(server, network.connect), settings))
    try:
        async with network.connect("inference", retry=RetryPolicy(max_attempts=1)) as channel:
            await channel.wait_until_connected(timeout_s=PATIENCE_S)
            yield InferenceClient(channel)
    finally:
        server.stop()
        await serving


async def test_it_samples_scores_and_loads(model_dir: Path, tmp_path: Path) -> None:
    async with serve(model_dir, tmp_path) as client:
        status = await client.get_policy()
        assert (status.engine, status.engine_version, status.max_model_len) == ("echo", "3", 128)
        (sample,) = await client.generate(QUESTION, sampling=SamplingParams(max_new_tokens=3))
        prompt, answer = sample.sequence.token_ids[:-3], sample.sequence.token_ids[-3:]
        assert answer.tolist() == prompt[-3:].tolist()
        scored = await client.logprobs([[1, 2, 3]])
        assert scored.logprobs[0].tolist() == [-1.0, -1.0]
        manifest = publish(tmp_path, model_dir, number=4)
        loaded = await client.load_weights(manifest)
        assert loaded.policy_version == PolicyVersion(lineage="main", number=4)
        (later,) = await client.generate(QUESTION, sampling=SamplingParams(max_new_tokens=3))
        assert later.sequence.segments[-1].policy_version == loaded.policy_version


async def test_what_it_cannot_do_is_refused_with_its_name(model_dir: Path, tmp_path: Path) -> None:
    async with serve(model_dir, tmp_path) as client:
        with pytest.raises(Unsupported, match="echo does not stream"):
            [piece async for piece in client.generate_stream(QUESTION)]
        with pytest.raises(Unsupported, match="echo does not pause"):
            await client.pause()
        with pytest.raises(PreconditionFailed) as caught:
            await client.sleep()
        assert caught.value.reason == "SLEEP_DISABLED"
        adapter = replace(
            publish(tmp_path, model_dir, number=4), adapter_config_json="{}", base_digest="0"
        )
        with pytest.raises(Unsupported, match="echo does not load a policy that is an adapter"):
            await client.load_weights(replace(adapter, kind=WeightsKind.ADAPTER))
        with pytest.raises(PreconditionFailed) as caught:
            await client.load_adapter(replace(adapter, adapter="style"))
        assert caught.value.reason == "ADAPTERS_DISABLED"
        assert (await client.get_policy()).data_planes == ("shared_memory", "chunks")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine": path_of("Closed")}, "has no load_weights, close"),
        ({"engine": path_of("QUESTION")}, "has no `start`"),
        ({"engine": path_of("Nothing")}, "cannot be loaded"),
        ({"engine": path_of("Echo"), "max_adapters": 1}, "SupportsAdapters, which max_adapters"),
        ({"engine": path_of("Echo"), "device_lock": "lock"}, "SupportsSleep, which device_lock"),
        ({"engine": path_of("Echo"), "data_plane": "nccl"}, "SupportsTransfer, which data_plane"),
    ],
)
async def test_an_unfit_engine_is_refused_at_the_start(
    settings: dict[str, Any],
    problem: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    network = InProcessNetwork()
    host = Host(network.server("inference"), network.connect)
    with pytest.raises(InvalidConfig, match=problem) as caught:
        await serve_in(host, load(InferenceSettings, model_dir=model_dir, **settings))
    assert caught.value.reason == "ENGINE_NOT_FOUND"


def test_the_config_takes_a_path_or_a_built_in_name() -> None:
    preflight.check(parse_config({"engine": path_of("Echo"), "store": "memory"}, source="x"))
    with pytest.raises(InvalidConfig, match=r"engine is 'vlm'.*did you mean 'vllm'\?"):
        parse_config({"engine": "vlm"}, source="x")
    for path in ("no_such_module:Mine", "no_such_package.module:Mine"):
        with pytest.raises(InvalidConfig, match="there is no module no_such") as caught:
            preflight.check(parse_config({"engine": path, "store": "memory"}, source="x"))
        assert caught.value.reason == "ENGINE_NOT_FOUND"


def test_doctor_looks_for_what_every_built_in_engine_needs() -> None:
    """Doctor comes without the services, and so has lines of its own."""
    lines = {finding.name for finding in examine()}
    assert {package for facts in ENGINES.values() for package in facts.packages} <= lines


async def test_a_replica_that_comes_back_draws_other_random_numbers(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    class Seeded(Echo):
        def __init__(self, model_dir: Path, options: engines.EngineOptions) -> None:
            super().__init__(model_dir, options)
            seeds.append(options.seed)

    async def start(num_restarts: int, seed: int = 5) -> None:
        monkeypatch.setenv(RESTARTS_VARIABLE, str(num_restarts))
        async with serve(model_dir, tmp_path, seed=seed):
            pass

    monkeypatch.setattr(f"{__name__}.Echo", Seeded)
    for num_restarts in (0, 0, 1, 2, 1):
        await start(num_restarts)
    manifest = publish(tmp_path, model_dir, number=4)
    point_to(tmp_path, manifest)
    await start(0)
    await start(1, seed=6)
    assert seeds[:2] == [5, 5]
    assert seeds[2] == seeds[4]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
