"""Attention over a forest of sequences equals that of each sequence alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from dialoop_learning.lora.layers import add_lora
from dialoop_learning.model import forest_attention
from dialoop_learning.model import policy as policy_module
from dialoop_learning.model.attention import plan_attention, share_prefixes
from dialoop_learning.model.experts import routers_of
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows

from benchmarks.servers.families import make_family


def _grown(draw: random.Random, num: int) -> list[TokenRow]:
    """Sequences of which each goes on where another one was, at some place; some twice."""
    known: list[tuple[list[int], list[bool]]] = [([], [])]
    for _ in range(num):
        ids, mask = draw.choice(known)
        cut = draw.randint(0, len(ids))
        own = draw.choice([0, 1, 3, 30, 90])
        known.append(
            (
                ids[:cut] + [draw.randrange(3, 200) for _ in range(own)],
                mask[:cut] + [draw.random() < 0.5 for _ in range(own)],
            )
        )
    return [
        TokenRow.from_demonstration([1, *ids], [False, *mask], temperature=draw.choice([1.0, 0.7]))
        for ids, mask in known[1:]
    ]


def _one_tree(draw: random.Random) -> list[TokenRow]:
    """Twelve answers behind one long prompt, some of which begin alike."""
    prompt = [draw.randrange(3, 200) for _ in range(120)]
    rows = []
    for number in range(12):
        answer = [5] * draw.choice([0, 2, 30]) + [7 + number] * draw.randint(1, 20)
        mask = [False] * len(prompt) + [True] * len(answer)
        rows.append(TokenRow.from_demonstration(prompt + answer, mask))
    return rows


def _score(
    policy: PolicyModel, batches: list[PackedBatch]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The log-probs and entropies of each sequence, and all gradients of a loss by sequence."""
    policy.zero_grad()
    found, advantages = [], random.Random(5)
    loss = torch.zeros(())
    for batch in batches:
        scores = policy(batch, temperature=batch.temperature, with_entropy=True)
        assert scores.entropy is not None
        pairs = zip(batch.split(scores.logprobs), batch.split(scores.entropy), strict=True)
        for own, entropy in pairs:
            loss = loss + advantages.gauss(0, 1) * own.sum() + 0.01 * entropy.sum()
            found.append(torch.stack([own, entropy]).detach())
    loss.backward()
    return found, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def _require_equal(policy: PolicyModel, rows: list[TokenRow], *, rel: float) -> None:
    alone, of_alone = _score(policy, [pack_rows([row]) for row in rows])
    forest, of_forest = _score(policy, [pack_rows(rows)])
    torch.testing.assert_close(forest, alone, atol=10 * rel, rtol=10 * rel)
    assert (of_forest - of_alone).norm() <= rel * of_alone.norm()


def _take_short_blocks(monkeypatch: pytest.MonkeyPatch, *, every: bool) -> None:
    monkeypatch.setattr(forest_attention, "_CALL", -1 if every else 0)
    monkeypatch.setattr(forest_attention, "_MERGE", 0 if every else 4)


def _blocks(rows: list[TokenRow]) -> int:
    batch = pack_rows(rows)
    shared = share_prefixes(batch.packed_tokens, batch.lengths)
    return len(plan_attention(shared, batch.lengths).blocks)


@pytest.fixture
def policy(tmp_path: Path) -> PolicyModel:
    torch.set_num_threads(1)
    return load_policy(make_tiny_model(tmp_path, seed=3))


def test_gradients_are_those_without_sharing_in_float32(policy: PolicyModel) -> None:
    rows = _one_tree(random.Random(0))
    assert _blocks(rows) == 2
    _require_equal(policy, rows, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_any_forest_is_exact_where_rounding_is_small(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    _take_short_blocks(monkeypatch, every=seed % 2 == 0)
    rows = _grown(random.Random(seed), 20)
    assert _blocks(rows) > 0
    _require_equal(policy.double(), rows, rel=1e-6)


@pytest.mark.parametrize(
    "family", ["mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v2", "qwen3_moe", "smollm3"]
)
def test_windows_caps_sinks_and_latent_heads_follow_the_forest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    torch.set_num_threads(1)
    policy = load_policy(make_family(family, tmp_path))
    has_experts = bool(routers_of(policy.causal_lm))
    if not has_experts:  # whose products are in single precision
        policy.double()
    for seed in range(2):
        _take_short_blocks(monkeypatch, every=seed == 0)
        rows = _grown(random.Random(seed), 14)
        assert _blocks(rows) > 1
        _require_equal(policy, rows, rel=1e-5 if has_experts else 1e-6)


def test_adapters_and_recomputed_layers_follow_the_forest(policy: PolicyModel) -> None:
    add_lora(policy.causal_lm, rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"))
    policy.checkpoint_activations()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    _require_equal(policy, _one_tree(random.Random(1)), rel=1e-6)


def test_half_precision_of_a_cpu_stays_as_near_as_without_a_forest(policy: PolicyModel) -> None:
    rows = _one_tree(random.Random(2))
    exact, _ = _score(policy, [pack_rows(rows)])
    policy.autocast = torch.bfloat16
    forest, _ = _score(policy, [pack_rows(rows)])
    alone, _ = _score(policy, [pack_rows([row]) for row in rows])

    def off(scores: list[torch.Tensor]) -> float:
        return float((torch.cat(scores, dim=1) - torch.cat(exact, dim=1)).norm())

    assert off(forest) <= 1.5 * off(alone)


def test_tokens_that_sequences_share_are_scored_once(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    score = policy_module.token_logprobs

    def count(hidden: torch.Tensor, *rest: object, **options: object) -> object:
        seen.append(len(hidden))
        return score(hidden, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(policy_module, "token_logprobs", count)
    forks = [[9, 8, 7, 1], [9, 8, 7, 2], [9, 8, 3]]
    rows = [TokenRow.from_demonstration([4, *fork], [False] + [True] * len(fork)) for fork in forks]
    assert len(policy(pack_rows(rows)).logprobs) == 11
    cooler = TokenRow.from_demonstration([4, 9, 8], [False, True, True], temperature=0.5)
    batch = pack_rows([*rows, cooler])
    assert len(policy(batch, temperature=batch.temperature).logprobs) == 13
    assert seen == [6, 8]
