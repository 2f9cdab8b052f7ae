"""Adapters through the service: loaded from a path or in chunks, used, refused, unloaded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dialoop.clients.inference import Probe, WeightsManifest
from dialoop.errors import (
    CapacityExhausted,
    DataLost,
    InvalidInput,
    NotFound,
    PreconditionFailed,
    Unsupported,
)
from dialoop.sequences import PolicyVersion
from dialoop_services.inference.weights.adapter_files import AdapterLimits

from tests.support.inference_world import (  # noqa: F401
    QUESTION,
    assert_refused,
    model_dir,
    publish,
    world,
)
from tests.support.samples.adapter_samples import adapter_of, config_json, write_tensors
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")

LIMITS = AdapterLimits(max_adapters=1, max_rank=8)


def manifest(root: Path, model_dir: Path, *, number: int = 1, **changes: object) -> WeightsManifest:
    path = root / f"adapter{number}.safetensors"
    sha256, num_bytes = write_tensors(path, adapter_of(model_dir, seed=number))
    return replace(
        WeightsManifest(
            policy_version=PolicyVersion(lineage="style", number=number),
            sha256=sha256,
            num_bytes=num_bytes,
            path=path.name,
            adapter="style",
            adapter_config_json=config_json(),
        ),
        **changes,
    )


async def test_an_adapter_loads_swaps_and_unloads(model_dir, tmp_path):
    async with world(model_dir, tmp_path, adapters=LIMITS) as w:
        ids = [[1, 2, 3, 4, 5, 6]]
        base = (await w.client.logprobs(ids)).logprobs[0]
        announcement = manifest(tmp_path, model_dir, number=1)
        await w.client.load_adapter(announcement)
        first = await w.client.logprobs(ids, adapter="style")
        assert first.policy_version == announcement.policy_version
        policy_digest = (await w.client.get_policy()).model_digest
        assert len({first.model_digest, policy_digest, ""}) == 3
        assert np.abs(first.logprobs[0] - base).max() > 0.05
        other = manifest(tmp_path, model_dir, number=2)
        data = (tmp_path / other.path).read_bytes()
        chunks = [data[i : i + 5000] for i in range(0, len(data), 5000)]
        loaded = await w.client.load_adapter(replace(other, path=""), chunks)
        assert loaded.policy_version == other.policy_version
        second = (await w.client.logprobs(ids, adapter="style")).logprobs[0]
        assert np.abs(second - first.logprobs[0]).max() > 0.05
        (sample,) = await w.client.generate(QUESTION, adapter="style")
        assert sample.sequence.policy_versions == (other.policy_version,)
        chunk_versions = {
            chunk.policy_version
            async for chunk in w.client.generate_stream(QUESTION, adapter="style")
            if chunk.token_ids
        }
        assert chunk_versions == {other.policy_version}
        policy = await w.client.get_policy()
        assert policy.adapters == {"style": other.policy_version}
        assert await w.client.unload_adapter("style")
        assert not await w.client.unload_adapter("style")
        assert (await w.client.get_policy()).adapters == {}
        assert np.array_equal((await w.client.logprobs(ids)).logprobs[0], base)


async def test_an_unknown_adapter_is_not_found(model_dir, tmp_path):
    async with world(model_dir, tmp_path, adapters=LIMITS) as w:
        for call in (
            w.client.generate(QUESTION, adapter="style"),
            w.client.logprobs([[1, 2]], adapter="style"),
        ):
            await assert_refused(call, NotFound, "ADAPTER_NOT_FOUND")


async def test_a_replica_without_adapters_says_which_setting_allows_them(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as w:
        with pytest.raises(PreconditionFailed) as caught:
            await w.client.load_adapter(manifest(tmp_path, model_dir))
        assert caught.value.reason == "ADAPTERS_DISABLED"
        assert "DIALOOP_INFERENCE_MAX_ADAPTERS" in caught.value.remedy


async def test_adapters_that_do_not_fit_are_refused_and_change_nothing(model_dir, tmp_path):
    async with world(model_dir, tmp_path, adapters=LIMITS) as w:
        good = manifest(tmp_path, model_dir)
        await w.client.load_adapter(good)
        newer = PolicyVersion(lineage="style", number=9)
        other = replace(manifest(tmp_path, model_dir, number=2), policy_version=newer)
        wrong = Probe(token_ids=(1, 2, 3), logprobs=np.zeros(2, dtype=np.float32))
        refusals = [
            ({"adapter_config_json": "{"}, InvalidInput, "INVALID_ADAPTER_CONFIG"),
            ({"adapter_config_json": config_json(r=0)}, InvalidInput, "INVALID_ADAPTER_CONFIG"),
            (
                {"adapter_config_json": config_json(use_dora=True)},
                Unsupported,
                "ADAPTER_UNSUPPORTED",
            ),
            ({"adapter_config_json": config_json(r=64)}, PreconditionFailed, "ADAPTER_MISMATCH"),
            ({"adapter_config_json": config_json(r=3)}, PreconditionFailed, "ADAPTER_MISMATCH"),
            (
                {"adapter_config_json": config_json(target_modules=["q_proj"])},
                PreconditionFailed,
                "ADAPTER_MISMATCH",
            ),
            ({"adapter": "a/b"}, InvalidInput, "INVALID_ADAPTER_NAME"),
            ({"adapter": "another"}, CapacityExhausted, "TOO_MANY_ADAPTERS"),
            ({"sha256": "0" * 64}, DataLost, "CHECKSUM_MISMATCH"),
            ({"probes": (wrong,)}, PreconditionFailed, "PROBE_MISMATCH"),
            ({"policy_version": good.policy_version}, PreconditionFailed, "VERSION_NOT_NEWER"),
        ]
        before = (await w.client.logprobs([[1, 2, 3]], adapter="style")).logprobs[0]
        for changes, kind, reason in refusals:
            await assert_refused(w.client.load_adapter(replace(other, **changes)), kind, reason)
        policy = await w.client.get_policy()
        assert policy.ready
        assert policy.adapters == {"style": good.policy_version}
        after = (await w.client.logprobs([[1, 2, 3]], adapter="style")).logprobs[0]
        assert np.array_equal(before, after)


async def test_tensors_of_another_model_and_numbers_that_are_none_are_refused(model_dir, tmp_path):
    async with world(model_dir, tmp_path, adapters=LIMITS) as w:
        good = adapter_of(model_dir, seed=1)
        name = next(iter(good))
        broken = {
            "ADAPTER_NOT_FINITE": good | {name: good[name] * float("nan")},
            "ADAPTER_MISMATCH": good | {name: good[name][:, :-1].contiguous()},
        }
        for reason, tensors in broken.items():
            announcement = manifest(tmp_path, model_dir)
            sha256, num_bytes = write_tensors(tmp_path / announcement.path, tensors)
            load = w.client.load_adapter(replace(announcement, sha256=sha256, num_bytes=num_bytes))
            await assert_refused(load, (InvalidInput, PreconditionFailed), reason)
        unknown = {"base_model.model.model.embed_tokens.lora_A.weight": good[name]}
        sha256, num_bytes = write_tensors(tmp_path / "u.safetensors", unknown)
        announcement = replace(
            announcement, path="u.safetensors", sha256=sha256, num_bytes=num_bytes
        )
        await assert_refused(
            w.client.load_adapter(announcement), PreconditionFailed, "ADAPTER_MISMATCH"
        )
        assert (await w.client.get_policy()).ready


async def test_a_new_policy_ends_adapters_over_the_wire_too(model_dir, tmp_path):
    async with world(model_dir, tmp_path, adapters=LIMITS) as w:
        await w.client.load_adapter(manifest(tmp_path, model_dir))
        await w.client.load_weights(publish(tmp_path, model_dir, number=1))
        assert (await w.client.get_policy()).adapters == {}
        await assert_refused(
            w.client.generate(QUESTION, adapter="style"), NotFound, "ADAPTER_NOT_FOUND"
        )
        assert (await asyncio.wait_for(w.client.generate(QUESTION), PATIENCE_S))[0].sequence
