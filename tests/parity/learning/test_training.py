from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dialoop.errors import InvalidConfig, Unsupported
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop_learning.loss.loss_loading import load_loss
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack, pack_rows
from dialoop_learning.training import loss_inputs, update
from transformers import AutoModelForCausalLM, CohereConfig, MambaConfig


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


def _sequences(policy: PolicyModel, temperature: float = 1.0) -> list[Sequence]:
    """Four sequences whose inference log-probs are the policy's own."""
    version = PolicyVersion(lineage="main", number=0)
    model = {"source": Source.MODEL, "policy_version": version}
    blank = [
        sequence_of(
            [([5, 6, i], {"source": Source.PROMPT}), (range(10, 12 + i), model)],
            logprobs=[0.0] * (2 + i),
        )
        for i in range(1, 5)
    ]
    batch = pack(blank)
    with torch.no_grad():
        scores = batch.split(policy(batch, temperature=temperature).logprobs)
    return [
        replace(s, inference_logprobs=own.numpy(), advantage=1.0 if i % 2 else -1.0)
        for i, (s, own) in enumerate(zip(blank, scores, strict=True))
    ]


def _optimizer(policy: PolicyModel) -> GuardedOptimizer:
    return GuardedOptimizer(policy.parameters(), OptimizerSettings(learning_rate=1e-3))


@pytest.mark.parametrize("loss", ["grpo", "dppo_mask", "sft"])
def test_update_does_not_depend_on_how_rows_are_cut(directory: Path, loss: str) -> None:
    whole, cut = load_policy(directory), load_policy(directory)
    sequences = _sequences(whole)
    single = update(whole, _optimizer(whole), [pack(sequences)], load_loss(loss))
    rows = [pack(sequences[:1]), pack(sequences[1:])]
    double = update(cut, _optimizer(cut), rows, load_loss(loss))
    assert double.loss == pytest.approx(single.loss, rel=1e-6, abs=1e-6)
    assert double.metrics == pytest.approx(single.metrics, rel=1e-6, abs=1e-6)
    assert double.step.grad_norm == pytest.approx(single.step.grad_norm, rel=1e-4)


def test_first_update_is_on_policy(directory: Path) -> None:
    policy = load_policy(directory)
    row = pack(_sequences(policy, temperature=0.7))
    report = update(policy, _optimizer(policy), [row], load_loss("grpo"), temperature=0.7)
    assert report.metrics["ess"] == pytest.approx(1.0, abs=1e-5)
    assert report.metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_wrong_temperature_shows_as_off_policy(directory: Path) -> None:
    policy = load_policy(directory)
    row = pack(_sequences(policy, temperature=0.7))
    report = update(policy, _optimizer(policy), [row], load_loss("grpo"), temperature=1.0)
    assert report.metrics["ess"] < 0.9


def test_grpo_makes_good_tokens_likelier_and_bad_ones_less_likely(directory: Path) -> None:
    policy = load_policy(directory)
    batch = pack(_sequences(policy))
    update(policy, _optimizer(policy), [batch], load_loss("grpo"))
    with torch.no_grad():
        after = loss_inputs(batch, policy(batch).logprobs)
    change = after.policy_logprobs - after.require("inference_logprobs")
    assert float((change * after.require("advantages")).mean()) > 0


def test_entropy_is_reported_when_asked_for(directory: Path) -> None:
    policy = load_policy(directory)
    row = pack(_sequences(policy))
    report = update(policy, _optimizer(policy), [row], load_loss("grpo"), with_entropy=True)
    assert 0 < report.metrics["entropy"] < 5.75  # log 314


def test_sft_learns_a_demonstration(directory: Path) -> None:
    policy = load_policy(directory)
    optimizer = _optimizer(policy)
    row = pack_rows([TokenRow.from_demonstration([1, 2, 3, 4], [False, True, True, True])])
    losses = [update(policy, optimizer, [row], load_loss("sft")).loss for _ in range(15)]
    assert losses[-1] < 0.2 * losses[0]


def test_loaded_model_has_no_dropout(directory: Path) -> None:
    assert not any(module.training for module in load_policy(directory).modules())


def test_bfloat16_scores_close_to_float32(directory: Path) -> None:
    row = pack_rows([TokenRow.from_demonstration([1, 2, 3, 4], [False, True, True, True])])
    full, half = (
        load_policy(directory, dtype=name)(row).logprobs for name in ("float32", "bfloat16")
    )
    torch.testing.assert_close(full, half, atol=0.1, rtol=0)


def test_a_model_whose_logits_are_large_loads_in_bfloat16(directory: Path, tmp_path: Path) -> None:
    """SmolLM2's are: rounding moves single tokens that it finds unlikely by half a nat."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(12)
    model.save_pretrained(tmp_path)
    assert load_policy(tmp_path, dtype="bfloat16")


def test_unknown_dtype_is_named(directory: Path) -> None:
    with pytest.raises(InvalidConfig, match="float32"):
        load_policy(directory, dtype="int8")


def test_state_space_model_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(Unsupported) as caught:
        load_policy(tmp_path)
    assert caught.value.reason == "MODEL_NOT_PACKABLE"


def test_logits_altered_in_a_way_that_the_head_does_not_know_are_refused(tmp_path: Path) -> None:
    config = CohereConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        logit_scale=8.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="log-probs are off by"):
        load_policy(tmp_path)
