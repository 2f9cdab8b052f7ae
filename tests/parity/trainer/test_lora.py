"""LoRA and what saves memory: the merged policy is the trained one, and resumes as itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop_learning.lora.base_weights import BaseWeights, adapted_tensors
from dialoop_learning.lora.layers import ADAPTER
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_services.trainer.data.batches import TrainedSequence
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.settings import TrainerSettings
from safetensors.torch import load_file

VERSION = PolicyVersion(lineage="main", number=3)
PROBE = [[5, 6, 7, 8, 9, 10], [40, 41, 42]]
LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def learner(model_dir: Path) -> Callable[..., Learner]:
    def make(**options: Any) -> Learner:
        settings = {"learning_rate": 1e-2, "loss": "grpo", **options}
        return Learner(TrainerSettings(model_dir=model_dir, **settings))

    return make


def sequences(count: int, seed: int) -> list[TrainedSequence]:
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        sampled = generator.integers(10, 250, size=4 + index % 3).tolist()
        pieces = [
            (generator.integers(10, 250, size=5).tolist(), {"source": Source.PROMPT}),
            (sampled, {"source": Source.MODEL, "policy_version": VERSION}),
        ]
        row = sequence_of(pieces, logprobs=generator.uniform(-6, -5, size=len(sampled)))
        row = replace(row, advantage=1.0 if index % 2 else -1.0)
        rows.append(TrainedSequence(sequence=row, group_index=index // 2))
    return rows


def step(trained: Learner, seed: int = 1) -> Any:
    return trained.train_step(trained.rows_to_train(sequences(8, seed), current=VERSION))


def probe(directory: Path) -> list[Any]:
    """Log-probs of the probes by the model in a directory."""
    policy = load_policy(directory)
    rows = [TokenRow.from_demonstration(ids, [False] + [True] * (len(ids) - 1)) for ids in PROBE]
    batch = pack_rows(rows)
    with torch.no_grad():
        return [scores.numpy() for scores in batch.split(policy(batch).logprobs)]


def test_only_adapters_are_trained_and_the_merged_export_is_the_trained_policy(
    learner: Callable[..., Learner], model_dir: Path, tmp_path: Path
) -> None:
    trained = learner(model=LORA)
    before = load_file(model_dir / "model.safetensors")
    assert trained.num_parameters < sum(t.numel() for t in before.values()) / 5
    start = trained.logprobs(PROBE)
    step(trained)
    for file in model_dir.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    trained.export(tmp_path / "model.safetensors")
    merged = load_file(tmp_path / "model.safetensors")
    assert {k: v.shape for k, v in merged.items()} == {k: v.shape for k, v in before.items()}
    assert torch.equal(merged["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    own = trained.logprobs(PROBE)
    assert max(np.abs(a - b).max() for a, b in zip(own, start, strict=True)) > 1e-3
    answers = probe(tmp_path)
    assert max(np.abs(a - b).max() for a, b in zip(own, answers, strict=True)) < 1e-5


def test_a_lora_checkpoint_is_an_adapter_that_peft_loads_and_resumes_as_it_was(
    learner: Callable[..., Learner], model_dir: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    steady = learner(model=LORA)
    step(steady)
    saved = Checkpoints(tmp_path).save(steady, JobState(policy_version=VERSION, num_train_steps=1))
    assert not (saved / "model.safetensors").exists()
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    peft = PeftModel.from_pretrained(base, str(saved)).eval()
    with torch.no_grad():
        logits = peft(torch.tensor(PROBE[:1])).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(-1, torch.tensor(PROBE[0][1:])[:, None]).squeeze(-1)
    assert np.abs(theirs.numpy() - steady.logprobs(PROBE)[0]).max() < 1e-5
    resumed = learner(model=LORA, seed=99)
    assert Checkpoints(tmp_path).restore(resumed) is not None
    assert step(steady, 2) == step(resumed, 2)
    pairs = zip(steady.logprobs(PROBE), resumed.logprobs(PROBE), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("other", [{}, {"model": {"lora_rank": 2}}])
def test_a_checkpoint_of_another_kind_is_refused(
    learner: Callable[..., Learner], tmp_path: Path, other: dict[str, Any]
) -> None:
    Checkpoints(tmp_path).save(learner(model=LORA), JobState(policy_version=VERSION))
    with pytest.raises(InvalidConfig, match="lora"):
        Checkpoints(tmp_path).restore(learner(**other))


def test_an_adapter_is_the_same_bytes_whenever_it_is_written(
    learner: Callable[..., Learner], tmp_path: Path
) -> None:
    trained = learner(model=LORA)
    digests = {trained.export(tmp_path / str(n) / ADAPTER).sha256 for n in range(12)}
    assert len(digests) == 1
    config = json.loads((tmp_path / "0" / "adapter_config.json").read_text("utf-8"))
    assert config["target_modules"] == sorted(config["target_modules"])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_of_another_base_is_refused(
    learner: Callable[..., Learner], tmp_path: Path, sharded: bool
) -> None:
    ours = learner(model=LORA, sharded_checkpoints=sharded)
    Checkpoints(tmp_path).save(ours, JobState(policy_version=VERSION))
    other = make_tiny_model(tmp_path / "other", seed=5)
    theirs = Learner(TrainerSettings(model_dir=other, model=LORA))
    with pytest.raises(PreconditionFailed) as caught:
        Checkpoints(tmp_path).restore(theirs)
    assert caught.value.reason == "BASE_MISMATCH"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_added_into_its_base_is_the_merged_policy_bit_for_bit(
    learner: Callable[..., Learner], model_dir: Path, tmp_path: Path, dtype: str
) -> None:
    trained = learner(model=LORA, dtype=dtype, learning_rate=5e-2)
    for seed in range(3):
        step(trained, seed)
    whole = load_file(trained.export(tmp_path / "whole.safetensors").path)
    trained.export(tmp_path / "adapter_model.safetensors")
    base = BaseWeights.of(model_dir)
    added = dict(adapted_tensors(tmp_path, base, digest=base.digest()))
    assert added.keys() == whole.keys()
    assert all(torch.equal(added[name], whole[name]) for name in whole)
    assert {tensor.dtype for tensor in added.values()} == {getattr(torch, dtype)}
    start = load_file(model_dir / "model.safetensors")
    moved = sum(not torch.equal(added[name], start[name].to(added[name].dtype)) for name in added)
    assert moved == 4 * 7  # layers, and linear ones in each


def test_targets_are_chosen_and_unknown_ones_refused(learner: Callable[..., Learner]) -> None:
    few = learner(model={**LORA, "lora_targets": ["q_proj"]})
    assert few.num_parameters == 4 * 4 * (128 + 128)
    with pytest.raises(InvalidConfig, match="no linear layer x_proj"):
        learner(model={**LORA, "lora_targets": ["x_proj"]})


@pytest.mark.parametrize("lora", [{}, LORA])
def test_recomputed_activations_give_the_same_step(
    learner: Callable[..., Learner], lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.utils.checkpoint as module

    plain, thrifty = learner(model=lora), learner(model=lora, activation_checkpointing=True)
    used: list[int] = []
    frame = module._checkpoint_without_reentrant_generator

    def count(*args: Any, **kwargs: Any) -> Any:
        used.append(1)
        return frame(*args, **kwargs)

    monkeypatch.setattr(module, "_checkpoint_without_reentrant_generator", count)
    first, second = step(plain), step(thrifty)
    assert len(used) == 4 * 2  # layers, minibatches
    assert second.loss == pytest.approx(first.loss, abs=1e-7)
    pairs = zip(plain.logprobs(PROBE), thrifty.logprobs(PROBE), strict=True)
    assert all(np.abs(a - b).max() < 1e-5 for a, b in pairs)


def test_autocast_keeps_float32_weights_and_about_the_same_policy(
    learner: Callable[..., Learner], tmp_path: Path
) -> None:
    plain, mixed = learner(), learner(autocast="bfloat16")
    pairs = list(zip(plain.logprobs(PROBE), mixed.logprobs(PROBE), strict=True))
    assert 0 < max(np.abs(a - b).max() for a, b in pairs) < 0.25
    report = step(mixed)
    assert report.num_updates == 2
    mixed.export(tmp_path / "model.safetensors")
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()}
    assert kinds == {torch.float32}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none(learner: Callable[..., Learner]) -> None:
    with pytest.raises(InvalidConfig, match="no CUDA device"):
        learner(device="cuda")


def test_the_mismatch_of_fresh_tokens_is_measured_before_the_first_update(
    learner: Callable[..., Learner],
) -> None:
    trained = learner(learning_rate=0.5)
    fresh = []
    for row in sequences(4, 5):
        own = trained.logprobs([row.sequence.token_ids.tolist()])[0]
        mask = row.sequence.response_mask()[1:]
        fresh.append(replace(row, sequence=replace(row.sequence, inference_logprobs=own[mask])))
    report = trained.train_step(trained.rows_to_train(fresh, current=VERSION))
    assert report.fresh_mismatch_kl == pytest.approx(0.0, abs=1e-6)
    assert report.metrics["by_staleness"][0]["mismatch_kl"] > 1e-3
    older = replace(VERSION, number=4)
    stale = trained.train_step(trained.rows_to_train(fresh, current=older))
    assert stale.fresh_mismatch_kl is None


def test_held_out_loss_is_the_mean_over_demonstrated_tokens(
    learner: Callable[..., Learner],
) -> None:
    trained = learner()
    shown = [row.sequence for row in sequences(3, 7)]
    loss, count = trained.heldout_loss(trained.rows_to_imitate(shown))
    own = [trained.logprobs([s.token_ids.tolist()])[0][s.response_mask()[1:]] for s in shown]
    assert count == sum(map(len, own))
    assert loss == pytest.approx(-float(np.concatenate(own).mean()), abs=1e-5)
    trained.sft_step(trained.rows_to_imitate(shown))
    assert trained.heldout_loss(trained.rows_to_imitate(shown))[0] < loss
