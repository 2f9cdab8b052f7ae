"""A real vLLM that is published to by what changed: ten steps of AdamW, exact as whole ones are."""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dialoop.clients.weights import WeightsKind
from dialoop.sequences import PolicyVersion
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow

from tests.contract.trainer.test_deltas import Trainer, tear
from tests.support.engine_gates import Setup, start_engine
from tests.support.inference_world import World, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.heavy(reason="starts vLLM"),
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

NUM_STEPS = 10
PROBES = [[5 + (7 * row + at) % 250 for at in range(24)] for row in range(3)]
DELTA, WHOLE = WeightsKind.DELTA, WeightsKind.WHOLE


class AdamTrainer(Trainer):
    """A learner in float32 of which a step of AdamW changes some of the bits in bfloat16."""

    def train(self) -> None:
        self.number += 1
        ids = [5 + (11 * self.number + at * at) % 250 for at in range(32)]
        row = TokenRow.from_demonstration(ids, [False] + [True] * (len(ids) - 1))
        assert self.learner.sft_step([row]).step.applied


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[World, AdamTrainer]]:
    model_dir = make_tiny_model(folder / "model", seed=0)
    engine = await start_engine(Setup(kind="vllm", tied=True, dtype="bfloat16"), model_dir)
    async with world(model_dir, folder / "w", reads_root=False, engine=engine) as w:
        run_dir, rate = folder / "run", 1e-5
        trainer = AdamTrainer(
            w, model_dir, run_dir, inference_dtype="bfloat16", learning_rate=rate, keep_policies=99
        )
        assert (await trainer.publish()).delta_bytes == 0
        yield w, trainer


async def scores(w: World) -> list[np.ndarray]:
    return [np.array(row) for row in (await w.client.logprobs(PROBES)).logprobs]


def kept_digest(folder: Path) -> str:
    """Of the file from which the engine has loaded."""
    (kept,) = folder.glob("dialoop-policy-*/model.safetensors")
    return hashlib.sha256(kept.read_bytes()).hexdigest()


async def test_vllm_has_the_bits_of_whole_publishes_after_ten_deltas_a_missed_one_and_a_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with served(tmp_path) as (w, trainer):
        seen, published = [], []
        for _ in range(NUM_STEPS):
            published.append(await trainer.publish())
            assert trainer.kinds == [DELTA]
            assert 0 < published[-1].delta_bytes < 0.5 * published[-1].weights.num_bytes
            assert kept_digest(tmp_path) == published[-1].weights.sha256
            assert published[-1].max_logprob_difference < 0.1
            seen.append(await scores(w))
        assert len({float(rows[0].sum()) for rows in seen}) == NUM_STEPS, "each changed the engine"

        async with world(tmp_path / "model", tmp_path / "other", reads_root=False) as other:
            trainer.publisher._replicas = (other.client,)
            await trainer.publish()
            trainer.publisher._replicas = (w.client,)
        await trainer.publish()
        assert trainer.kinds == [DELTA, WHOLE]  # it missed the one before

        before, between = await scores(w), []
        send = trainer.publisher._sender._send

        async def torn(replica: Any, manifest: Any, path: Path, deadline_s: float) -> None:
            if manifest.kind is DELTA:
                tear(path)
            try:
                await send(replica, manifest, path, deadline_s)
            finally:
                if manifest.kind is DELTA:
                    between.extend(await scores(w))

        monkeypatch.setattr(trainer.publisher._sender, "_send", torn)
        await trainer.publish()
        assert trainer.kinds == [DELTA, WHOLE]
        assert same(between, before)
        assert not same(await scores(w), before)

        monkeypatch.undo()
        for number, (was, scored) in enumerate(zip(published, seen, strict=True), 1):
            version = PolicyVersion(lineage="main.r1", number=number)
            whole = replace(was.weights, delta=None)
            manifest = trainer.publisher._manifest(version, whole)
            await trainer.publisher._sender.send(w.client, manifest, whole, deadline_s=60)
            assert trainer.kinds[-1] is WHOLE
            assert same(await scores(w), scored)


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
