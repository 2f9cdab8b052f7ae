"""Publishing to a replica: what is loaded, what is refused, what a failure leaves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from dialoop.clients.weights import WeightsManifest
from dialoop.errors import (
    DataLost,
    InvalidInput,
    PreconditionFailed,
    Unavailable,
)
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams
from dialoop_services.inference.engine import BASE_VERSION
from dialoop_services.inference.weights.publications import ModelDigests
from safetensors.torch import load_file, save_file

from tests.support.inference_world import (  # noqa: F401
    MAX_MODEL_LEN,
    QUESTION,
    assert_refused,
    model_dir,
    point_to,
    publish,
    world,
)
from tests.support.rest_world import http_of
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


SHORT = {"max_new_tokens": 3}


async def test_weights_load_from_a_path_and_from_chunks(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        manifest = publish(root, model_dir, number=1)
        loaded = await w.client.load_weights(manifest)
        assert loaded.policy_version == manifest.policy_version
        first = (await w.client.logprobs([[1, 2, 3]])).logprobs[0]
        other = publish(root, model_dir, number=2)
        data = (root / other.path).read_bytes()
        chunks = [data[i : i + 100_000] for i in range(0, len(data), 100_000)]
        await w.client.load_weights(replace(other, path=""), chunks)
        scored = await w.client.logprobs([[1, 2, 3]])
        assert scored.policy_version == other.policy_version
        assert np.abs(scored.logprobs[0] - first).max() > 0.1
        policy = await w.client.get_policy()
        assert policy.ready
        assert policy.policy_version == other.policy_version
        assert (policy.engine, policy.max_model_len) == ("transformers", MAX_MODEL_LEN)


async def test_answers_and_log_probs_name_the_model_that_gave_them(model_dir, tmp_path):
    root, sampling = tmp_path / "w", SamplingParams(max_new_tokens=3)
    async with world(model_dir, root, has_rest=True) as w, http_of(w.server) as http:

        async def read_digest() -> str:
            """The digest at every door, which is the same."""
            (sample,) = await w.client.generate(QUESTION, sampling=sampling)
            answer = await http.post("/v1/generate", json={"text": "1+", "sampling": SHORT})
            (document,) = answer.json()["samples"]
            scored = await http.post("/v1/logprob", json={"token_ids": [{"values": [1, 2, 3]}]})
            digests = {
                sample.model_digest,
                document["model_digest"],
                (await w.client.get_policy()).model_digest,
                (await http.get("/v1/policy")).json()["model_digest"],
                (await w.client.logprobs([[1, 2, 3]])).model_digest,
                scored.json()["model_digest"],
            }
            (digest,) = digests
            return digest

        base = await read_digest()
        again = await ModelDigests.of(model_dir)
        again.begin(BASE_VERSION)
        assert base == again.find("", BASE_VERSION)
        assert re.fullmatch("sha256:[0-9a-f]{64}", base)
        manifest = publish(root, model_dir, number=1)
        await w.client.load_weights(manifest)
        published = await read_digest()
        assert re.fullmatch("sha256:[0-9a-f]{64}", published)
        await w.client.load_weights(publish(root, model_dir, number=2))
        assert len({base, published, await read_digest()}) == 3
    again.publish(manifest, BASE_VERSION)
    assert again.find("", manifest.policy_version) == published


async def test_models_with_another_config_or_other_weights_have_another_digest(model_dir, tmp_path):
    def digest_of(digests: ModelDigests) -> str:
        digests.begin(BASE_VERSION)
        return digests.find("", BASE_VERSION)

    copied = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    same = digest_of(await ModelDigests.of(copied))
    (copied / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    other_config = digest_of(await ModelDigests.of(copied))
    shutil.copy(model_dir / "config.json", copied)
    tensors = load_file(copied / "model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1}, copied / "model.safetensors")
    other_weights = digest_of(await ModelDigests.of(copied))
    assert same == digest_of(await ModelDigests.of(model_dir))
    assert len({same, other_config, other_weights}) == 3
    # Nobody has a digest of weights that came over a device's own transfer.
    unknown = WeightsManifest(policy_version=PolicyVersion(lineage="main", number=1))
    digests = await ModelDigests.of(model_dir)
    digests.publish(unknown, BASE_VERSION)
    assert digests.find("", unknown.policy_version) == ""


async def test_an_old_version_is_refused_and_changes_nothing(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        await w.client.load_weights(publish(root, model_dir, number=5))
        for number in (4, 5):
            manifest = publish(root, model_dir, number=number)
            load = w.client.load_weights(manifest)
            await assert_refused(load, PreconditionFailed, "VERSION_NOT_NEWER")
        assert (await w.client.get_policy()).ready
        await w.client.load_weights(publish(root, model_dir, number=1, lineage="restored"))
        version = (await w.client.get_policy()).policy_version
        assert version == PolicyVersion(lineage="restored", number=1)


async def test_paths_outside_the_weights_root_are_refused(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        manifest = publish(root, model_dir, number=1)
        publish(tmp_path, model_dir, number=9)
        (root / "link").symlink_to(tmp_path)
        outside = (
            "../9.safetensors",
            str(tmp_path / "9.safetensors"),
            "link/9.safetensors",
            ".",
            "a\0b",
            "a" * 5000,
        )
        for path in outside:
            load = w.client.load_weights(replace(manifest, path=path))
            await assert_refused(load, InvalidInput, "MANIFEST_MISMATCH")
        assert (await w.client.get_policy()).ready


async def test_a_stream_that_breaks_its_form_is_refused(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        good = publish(root, model_dir, number=1)
        for manifest, chunks in (
            (good, [b"x"]),
            (replace(good, path="", num_bytes=3), [b"1234"]),
            (replace(good, num_bytes=0), []),
        ):
            load = w.client.load_weights(manifest, chunks)
            await assert_refused(load, InvalidInput, "MANIFEST_MISMATCH")
        assert (await w.client.get_policy()).ready


async def test_a_load_that_ends_without_its_mark_changes_nothing(model_dir, tmp_path, monkeypatch):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        manifest = publish(root, model_dir, number=1)
        data = (root / manifest.path).read_bytes()
        before = await w.client.get_policy()
        with monkeypatch.context() as without_mark:
            without_mark.setattr("dialoop.clients.channel._with_mark", lambda _, requests: requests)
            for announced, chunks in ((manifest, []), (replace(manifest, path=""), [data])):
                load = w.client.load_weights(announced, chunks)
                await assert_refused(load, InvalidInput, "STREAM_CUT")
        after = await w.client.get_policy()
        assert (after.ready, after.policy_version) == (True, before.policy_version)
        await w.client.load_weights(manifest)
        assert (await w.client.get_policy()).policy_version == manifest.policy_version


async def test_a_failed_load_takes_the_replica_out_until_one_succeeds(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        good = publish(root, model_dir, number=1)
        assert await w.health() == "SERVING"
        bad = replace(good, sha256="0" * 64)
        await assert_refused(w.client.load_weights(bad), DataLost, "CHECKSUM_MISMATCH")
        assert await w.health() == "NOT_SERVING"
        await assert_refused(w.client.generate(QUESTION), Unavailable, "WEIGHTS_BAD")
        await assert_refused(w.client.logprobs([[1, 2]]), Unavailable, "WEIGHTS_BAD")
        policy = await w.client.get_policy()
        assert (policy.ready, policy.reason) == (False, "WEIGHTS_BAD")
        assert policy.policy_version == BASE_VERSION
        await w.client.load_weights(good)
        assert await w.health() == "SERVING"
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.policy_versions == (good.policy_version,)


async def test_weights_of_another_model_are_refused(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        good = publish(root, model_dir, number=1)
        save_file({"model.norm.weight": torch.ones(128)}, root / "x.safetensors")
        data = (root / "x.safetensors").read_bytes()
        bad = replace(
            good,
            path="x.safetensors",
            num_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        await assert_refused(w.client.load_weights(bad), PreconditionFailed, "UNKNOWN_PARAMETERS")
        assert await w.health() == "NOT_SERVING"


async def test_a_caller_who_leaves_does_not_stop_a_load(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        begun, release = asyncio.Event(), asyncio.Event()
        load = w.replica.engine.load_weights

        async def slow(path, version, **options):
            begun.set()
            await release.wait()
            return await load(path, version, **options)

        w.replica.engine.load_weights = slow
        manifest = publish(root, model_dir, number=1)
        data = (root / manifest.path).read_bytes()
        loading = asyncio.create_task(w.client.load_weights(replace(manifest, path=""), [data]))
        await begun.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        release.set()
        async with asyncio.timeout(PATIENCE_S):
            while w.replica.engine.policy_version != manifest.policy_version:
                await asyncio.sleep(0.01)
        assert (await w.client.get_policy()).ready


async def test_a_new_replica_has_the_latest_policy(model_dir, tmp_path):
    root = tmp_path / "w"
    manifest = publish(root, model_dir, number=3)
    point_to(root, manifest)
    async with world(model_dir, root) as w:
        assert (await w.client.get_policy()).policy_version == manifest.policy_version


async def test_a_replica_that_awaits_a_policy_serves_no_other_weights(model_dir, tmp_path):
    manifest = publish(tmp_path / "w", model_dir, number=3)
    data = (tmp_path / "w" / manifest.path).read_bytes()
    async with world(model_dir, tmp_path / "w", reads_root=False, awaits_policy=True) as w:
        assert await w.health() == "NOT_SERVING"
        await assert_refused(w.client.generate(QUESTION), Unavailable, "NOT_READY")
        await assert_refused(w.client.logprobs([[1, 2]]), Unavailable, "NOT_READY")
        assert not (await w.client.get_policy()).ready
        await w.client.load_weights(replace(manifest, path=""), [data])
        assert await w.health() == "SERVING"
        (sample,) = await w.client.generate(QUESTION)
        assert sample.sequence.policy_versions == (manifest.policy_version,)


async def test_a_bad_latest_policy_waits_for_the_next(model_dir, tmp_path):
    root = tmp_path / "w"
    manifest = publish(root, model_dir, number=3)
    point_to(root, replace(manifest, sha256="0" * 64))
    async with world(model_dir, root) as w:
        assert await w.health() == "NOT_SERVING"
        await w.client.load_weights(manifest)
        assert await w.health() == "SERVING"
