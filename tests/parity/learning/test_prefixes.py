from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop_learning.model.attention import plan_attention, share_prefixes
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows

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
