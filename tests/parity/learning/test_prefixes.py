"""Sequences that begin alike are one forest, and its scores and gradients those of each alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

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

PROMPT, OTHER = [7, 8, 9, 10, 11], [7, 8, 3]


def _row(prompt: list[int], response: list[int]) -> TokenRow:
    mask = [False] * len(prompt) + [True] * len(response)
    return TokenRow.from_demonstration(prompt + response, mask)


def _group() -> list[TokenRow]:
    """Five answers to one prompt, two of them alike for a while, and two to another prompt."""
    answers = [[1, 2, 3], [1, 2, 4, 5], [6], [20] * 30, [1, 2, 3]]
    return [_row(PROMPT, a) for a in answers] + [_row(OTHER, [5, 5]), _row(OTHER, [6])]


def _watch_lengths(monkeypatch: pytest.MonkeyPatch, policy: PolicyModel) -> list[int]:
    """Collects how many tokens the model is called with."""
    seen: list[int] = []
    forward = policy.causal_lm.base_model.forward

    def count(**fields: Any) -> Any:
        seen.append(fields["input_ids"].shape[1])
        return forward(**fields)

    monkeypatch.setattr(policy.causal_lm.base_model, "forward", count)
    return seen


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
        answer = [5] * draw.choice([0, 2, 60]) + [7 + number] * draw.randint(1, 20)
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


def test_two_answers_to_one_prompt_are_the_documented_example() -> None:
    shared = share_prefixes(torch.tensor([5, 8, 9, 1, 5, 8, 4]), (4, 3))
    assert shared.kept.tolist() == [4, 5, 6, 2, 3]
    assert shared.places.tolist() == [0, 1, 3, 4, 0, 1, 2]


def test_sequences_that_begin_differently_share_nothing() -> None:
    tokens = torch.tensor([1, 2, 2, 1, 3, 2])
    shared = share_prefixes(tokens, (2, 2, 2))
    assert shared.kept.tolist() == shared.places.tolist() == [0, 1, 2, 3, 4, 5]


def test_large_ids_are_ordered_as_numbers() -> None:
    rows = [[255, 1], [256, 1], [255, 2], [256, 2], [65536, 1]]
    tokens = torch.tensor([token for row in rows for token in row])
    shared = share_prefixes(tokens, (2,) * 5)
    assert len(shared.kept) == 8
    assert torch.equal(tokens[shared.kept][shared.places], tokens)


def test_as_much_is_shared_as_any_pair_has_in_common() -> None:
    rows = [row.token_ids.tolist() for row in _group()]
    batch = pack_rows(_group())
    shared = share_prefixes(batch.packed_tokens, batch.lengths)
    distinct = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(shared.kept) == len(distinct)


def test_model_computes_a_shared_prompt_once(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _watch_lengths(monkeypatch, policy)
    batch = pack_rows([_row(PROMPT, [20 + i, 1]) for i in range(8)])
    num_forwarded = policy(batch).num_forwarded
    assert batch.num_tokens == 8 * 7
    assert seen == [5 + 8 * 2] == [num_forwarded]


def test_shared_prompts_change_no_logprob_and_no_gradient(policy: PolicyModel) -> None:
    def score(batches: list[PackedBatch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        policy.zero_grad()
        logprobs = torch.cat([policy(batch).logprobs for batch in batches])
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        return logprobs.detach(), [
            p.grad.clone() for p in policy.parameters() if p.grad is not None
        ]

    packed, of_packed = score([pack_rows(_group())])
    alone, of_alone = score([pack_rows([row]) for row in _group()])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    for mine, other in zip(of_packed, of_alone, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm() + 1e-7


def test_shared_prompts_are_exact_in_float64(policy: PolicyModel) -> None:
    policy.double()
    packed = policy(pack_rows(_group())).logprobs
    alone = torch.cat([policy(pack_rows([row])).logprobs for row in _group()])
    torch.testing.assert_close(packed, alone, atol=1e-9, rtol=0)


def test_attention_of_a_shared_row_reads_every_sequence_from_its_beginning() -> None:
    lengths = (3, 3)
    shared = share_prefixes(torch.tensor([5, 8, 9, 5, 8, 4]), lengths)
    plan = plan_attention(shared, lengths)
    assert [layout.tolist() for layout in plan.buckets] == [[[0, 1, 2], [0, 1, 3]]]
    assert plan.restore.tolist()[2:] == [2, 5]


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

    def count(hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(len(hidden))
        return score(hidden, *rest, **options)

    monkeypatch.setattr(policy_module, "token_logprobs", count)
    forks = [[9, 8, 7, 1], [9, 8, 7, 2], [9, 8, 3]]
    rows = [TokenRow.from_demonstration([4, *fork], [False] + [True] * len(fork)) for fork in forks]
    assert len(policy(pack_rows(rows)).logprobs) == 11
    cooler = TokenRow.from_demonstration([4, 9, 8], [False, True, True], temperature=0.5)
    batch = pack_rows([*rows, cooler])
    assert len(policy(batch, temperature=batch.temperature).logprobs) == 13
    assert seen == [6, 8]
