from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop import testing
from dialoop.errors import DialoopError, InvalidInput, InvalidSequence, Unsupported
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop_extras.collates import (
    as_nested_tensor,
    as_padded_tensor,
    token_columns,
)
from dialoop_learning.model.attention import plan_attention, share_prefixes
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack, pack_rows
from transformers import AutoModelForCausalLM

LENGTHS = [(4, 3), (1, 9), (6, 1), (5, 30), (2, 12), (3, 11)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture
def policy(directory: Path) -> PolicyModel:
    torch.set_num_threads(1)
    return load_policy(directory)


def _sequence(prompt: int, response: int, **fields: Any) -> Sequence:
    generator = torch.Generator().manual_seed(prompt * 100 + response)
    ids = torch.randint(0, 314, (prompt + response + 2,), generator=generator).tolist()
    version = PolicyVersion(lineage="main", number=4)
    half = prompt + response // 2
    model = {"source": Source.MODEL, "policy_version": version}
    built = sequence_of(
        [
            (ids[:prompt], {"source": Source.PROMPT}),
            (ids[prompt:half], model),
            (ids[half : half + 2], {"source": Source.TOOL}),
            (ids[half + 2 :], model),
        ],
        logprobs=[-0.1 * i for i in range(response)],
    )
    return replace(built, **fields)


def _sequences() -> list[Sequence]:
    return [_sequence(*lengths) for lengths in LENGTHS]


def test_row_of_two_sequences_is_the_documented_one() -> None:
    rows = [
        TokenRow.from_demonstration([5, 8, 9], [False, True, True]),
        TokenRow.from_demonstration([4, 7], [False, True]),
    ]
    batch = pack_rows(rows, pad_to=7)
    assert batch.packed_tokens.tolist() == [5, 8, 9, 4, 7, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch.sample_mask.tolist() == [0, 0, 0, 1, 1, -1, -1]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, False, False]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.lengths == (3, 2)
    assert batch.inference_logprobs is None


def test_values_stand_on_response_positions_and_zero_elsewhere() -> None:
    batch = pack([_sequence(2, 2, advantage=0.5), _sequence(1, 3, advantage=-2.0)])
    assert batch.advantages is not None
    assert batch.inference_logprobs is not None
    assert batch.advantages.tolist() == [0, 0, 0.5, 0, 0, 0.5, 0, -2, 0, 0, -2, -2]
    expected = [0, 0, 0, 0, 0, -0.1, 0, 0, 0, 0, -0.1, -0.2]
    assert batch.inference_logprobs.tolist() == pytest.approx(expected)
    assert torch.equal(batch.scatter(batch.gather(batch.advantages)), batch.advantages)


def test_split_gives_each_sequence_its_values() -> None:
    batch = pack([_sequence(2, 2), _sequence(1, 3)], pad_to=20)
    assert [v.tolist() for v in batch.split(torch.arange(5))] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("pad_to", [None, 128])
def test_packed_logprobs_equal_those_of_each_sequence_alone(
    policy: PolicyModel, pad_to: int | None
) -> None:
    batch = pack(_sequences(), pad_to=pad_to)
    alone = [policy(pack([s])).logprobs for s in _sequences()]
    for packed, single in zip(batch.split(policy(batch).logprobs), alone, strict=True):
        torch.testing.assert_close(packed, single, atol=1e-5, rtol=0)


def test_packed_logprobs_follow_the_alignment_law(policy: PolicyModel) -> None:
    policy.causal_lm.set_attn_implementation("eager")
    expected = []
    for sequence in _sequences():
        ids = torch.from_numpy(sequence.token_ids).long()
        logprobs = policy.causal_lm(input_ids=ids[None]).logits[0].detach().log_softmax(-1)
        own = torch.tensor([logprobs[p - 1, ids[p]] for p in sequence.response_mask().nonzero()[0]])
        expected.append(own)
    policy.causal_lm.set_attn_implementation("dialoop_packed")
    packed = policy(pack(_sequences())).logprobs
    torch.testing.assert_close(packed, torch.cat(expected), atol=1e-5, rtol=0)


def test_packed_gradients_equal_unpacked_gradients(policy: PolicyModel) -> None:
    policy(pack(_sequences())).logprobs.sum().backward()
    packed = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    for sequence in _sequences():
        policy(pack([sequence])).logprobs.sum().backward()
    unpacked = [p.grad for p in policy.parameters() if p.grad is not None]
    assert len(packed) == len(unpacked) == len(list(policy.parameters()))
    for mine, other in zip(packed, unpacked, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm() + 1e-6


def test_positions_that_do_not_restart_are_refused() -> None:
    batch = pack(_sequences())
    with pytest.raises(InvalidInput) as caught:
        replace(batch, position_ids=torch.arange(batch.num_tokens))
    assert caught.value.reason == "POSITIONS_NOT_RESTARTED"


def test_loss_on_a_first_token_is_refused() -> None:
    batch = pack(_sequences())
    with pytest.raises(InvalidInput) as caught:
        replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    assert caught.value.reason == "TOKEN_WITHOUT_PREDICTOR"


def test_sequence_without_a_prompt_is_rejected() -> None:
    with pytest.raises(InvalidSequence) as caught:
        TokenRow.from_demonstration([1, 2], [True, True])
    assert caught.value.reason == "EMPTY_PROMPT"


def _error(build: Any) -> str:
    with pytest.raises(DialoopError) as caught:
        build()
    return caught.value.reason


def test_advantages_for_some_sequences_only_are_refused() -> None:
    mixed = [_sequence(2, 2, advantage=1.0), _sequence(1, 3)]
    with pytest.raises(InvalidInput, match="Sequence 1 has no advantages") as caught:
        pack(mixed)
    assert caught.value.reason == "RAGGED"


def test_row_that_is_too_short_or_empty_is_refused() -> None:
    assert _error(lambda: pack(_sequences(), pad_to=10)) == "ROW_DOES_NOT_FIT"
    assert _error(lambda: pack([])) == "ROW_DOES_NOT_FIT"


def test_model_called_without_a_plan_is_an_error(policy: PolicyModel) -> None:
    with pytest.raises(Unsupported) as caught:
        policy.causal_lm(input_ids=torch.tensor([[1, 2]]))
    assert caught.value.reason == "ATTENTION_PLAN_MISSING"


def test_every_token_is_restored_to_its_place() -> None:
    lengths = (3, 40, 4, 38, 1)
    plan = plan_attention(share_prefixes(torch.arange(86), lengths), lengths)
    assert torch.cat([b.flatten() for b in plan.buckets])[plan.restore].tolist() == list(range(86))
    assert plan.longest == 40


def test_scores_do_not_depend_on_how_rows_are_cut(policy: PolicyModel) -> None:
    whole = policy(pack(_sequences())).logprobs
    halves: list[PackedBatch] = [pack(_sequences()[:3]), pack(_sequences()[3:])]
    cut = torch.cat([policy(half).logprobs for half in halves])
    torch.testing.assert_close(whole, cut, atol=1e-5, rtol=0)


def test_packed_padded_and_nested_trajectories_have_one_loss(
    directory: Path, policy: PolicyModel
) -> None:
    trajectories = [
        testing.trajectory(
            trajectory_id=str(number),
            turns=(),
            sequences=(replace(sequence, advantage=number - 2.5),),
        )
        for number, sequence in enumerate(_sequences())
    ]
    model = AutoModelForCausalLM.from_pretrained(directory).eval()

    def terms(columns: Mapping[str, torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
        """Log-probs [..., L - 1] of the tokens from 1 on, times advantage on the response."""
        ids, advantages = columns["token_ids"][..., 1:], columns["advantages"][..., 1:]
        logprobs = scores[..., :-1, :].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return logprobs * advantages * columns["response_mask"][..., 1:]

    rows = token_columns(trajectories)
    padded = as_padded_tensor(rows, pad_value=7)
    lengths = padded["token_ids_lengths"]
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]
    nested = as_nested_tensor(rows)
    packed = pack_rows([TokenRow.from_sequence(t.sequences[0]) for t in trajectories])
    assert packed.advantages is not None
    with torch.no_grad():
        scores = model(padded["token_ids"], attention_mask=is_token.long()).logits
        by_padding = terms(padded, scores)[is_token[:, 1:]].sum()
        by_rows = []
        for number in range(len(rows)):
            row = {name: column.unbind()[number] for name, column in nested.items()}
            by_rows.append(terms(row, model(row["token_ids"][None]).logits[0]).sum())
        by_packing = (policy(packed).logprobs * packed.advantages[packed.loss_mask]).sum()
    assert by_padding.item() == pytest.approx(by_packing.item(), rel=1e-4)
    assert torch.stack(by_rows).sum().item() == pytest.approx(by_packing.item(), rel=1e-4)
    assert set(rows[0]) == {
        "token_ids",
        "response_mask",
        "temperature",
        "inference_logprobs",
        "advantages",
    }
    assert nested["temperature"].shape[0] == len(trajectories)
