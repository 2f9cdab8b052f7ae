"""Snippets of torchrl's objectives (S1) and of torchtune's plan of packing (S4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop_extras.compat import (
    GRPOLoss,
    GRPOStats,
    GRPOWithChunkedOutputLoss,
    PackedTrajectory,
    RetrieveKL,
    SFTLoss,
    TrajectoryData,
    VLLMOutput,
    create_response_mask,
    create_sample_mask,
    extract_response_logprobs_from_pack,
    pack_sequences,
)
from dialoop_learning.loss.losses import LossInputs

VOCAB = 11


def trajectory(prompt: list[int], response: list[int], advantage: float) -> TrajectoryData:
    values = -torch.arange(1, len(response) + 1) / 10
    return TrajectoryData(
        prompt_tokens=torch.tensor(prompt),
        response_tokens=torch.tensor(response),
        logprobs=values,
        ref_logprobs=values - 0.05,
        rewards=torch.tensor([1.0]),
        advantages=torch.tensor([advantage]),
        successes=torch.tensor([1.0]),
        answer="75",
        sequence_id=f"s{prompt[0]}",
        group_id=prompt[0],
        reward_metadata={"func_names": ["right"]},
        policy_version=3,
    )


ITEMS = [trajectory([1, 2], [3, 4, 5], 1.0), trajectory([6], [7], -0.5)]


def stacked() -> TrajectoryData:
    """One TrajectoryData of two sequences, as a buffer that concatenates returns it."""
    return TrajectoryData(
        prompt_tokens=[item.prompt_tokens for item in ITEMS],
        response_tokens=[item.response_tokens for item in ITEMS],
        logprobs=[item.logprobs for item in ITEMS],
        ref_logprobs=[item.ref_logprobs for item in ITEMS],
        advantages=torch.tensor([1.0, -0.5]),
        answer=["75", "75"],
        sequence_id=["s1", "s6"],
        group_id=torch.tensor([1, 6]),
        policy_version=[3, 3],
    )


@pytest.mark.parametrize("sequences", [ITEMS, stacked()], ids=["list", "stacked"])
def test_s4_lines_182_to_242_sequences_are_packed(sequences: Any) -> None:
    pack = pack_sequences(
        sequences, max_seq_len=10, device="cpu", pad_token_id=0, populate_for_loss=True
    )
    assert isinstance(pack, PackedTrajectory)
    assert pack.packed_tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0, 0]
    assert pack.sample_mask.tolist() == [0] * 5 + [1] * 2 + [-1] * 3
    assert pack.targets.tolist() == [-100, -100, 3, 4, 5, -100, 7, -100, -100, -100]
    assert pack.packed_advantages.tolist() == [0, 0, 1, 1, 1, 0, -0.5, 0, 0, 0]
    assert (pack.sequence_ids, pack.group_ids, pack.policy_versions) == (
        ["s1", "s6"],
        [1, 6],
        [3, 3],
    )
    with pytest.raises(ValueError, match="no sequence"):
        pack_sequences([], max_seq_len=10, device="cpu", pad_token_id=0)
    with pytest.raises(ValueError, match="'s1' has 5 tokens"):
        pack_sequences(sequences, max_seq_len=4, device="cpu", pad_token_id=0)


def test_a_single_trajectory_is_packed_as_a_list_of_it() -> None:
    options: dict[str, Any] = {"max_seq_len": 8, "device": "cpu", "pad_token_id": 0}
    one, listed = (pack_sequences(given, **options) for given in (ITEMS[0], [ITEMS[0]]))
    assert torch.equal(one.packed_tokens, listed.packed_tokens)
    uneven = TrajectoryData(prompt_tokens=[torch.tensor([1])], response_tokens=[])
    with pytest.raises(InvalidInput, match="response"):
        pack_sequences(uneven, **options)


def test_s4_lines_101_to_118_and_246_to_299_log_probs_leave_the_pack_by_its_masks() -> None:
    output = VLLMOutput(
        prompts=[item.prompt_tokens for item in ITEMS],
        responses=[item.response_tokens for item in ITEMS],
        logprobs=[item.logprobs for item in ITEMS],
        answers=["75", "75"],
        sequence_ids=["s1", "s6"],
        group_ids=[1, 6],
        policy_version=3,
    )
    pack = pack_sequences(output, 10, torch.device("cpu"), 0)
    lens = (pack.prompt_lens, pack.response_lens, 10, torch.device("cpu"))
    assert torch.equal(create_response_mask(*lens), pack.response_mask)
    assert torch.equal(create_sample_mask(*lens), pack.sample_mask)
    scores = torch.arange(10.0)
    own = extract_response_logprobs_from_pack(scores, pack.sample_mask, pack.response_mask, 2)
    assert [part.tolist() for part in own] == [[2, 3, 4], [6]]


def test_s4_lines_149_to_158_the_loss_of_a_pack_is_that_of_its_sequences() -> None:
    """The pack has no batch dimension, and its logits at t predict the token at t + 1."""
    pack = pack_sequences(ITEMS, 10, torch.device("cpu"), 0, populate_for_loss=True)
    generator = torch.Generator().manual_seed(2)
    pi_logits = torch.randn(10, VOCAB, generator=generator, requires_grad=True)
    stats = GRPOWithChunkedOutputLoss(num_output_chunks=3, kl_coeff=0.1)(
        pi_logits=pi_logits,
        targets=pack.targets,
        ref_logprobs=pack.packed_ref_logprobs,
        advantages=pack.packed_advantages,
        padding_masks=pack.response_mask,
    )
    assert isinstance(stats, GRPOStats)
    logprobs = pi_logits.log_softmax(-1)
    means = []
    for item, start in zip(ITEMS, (2, 6), strict=True):
        ids = item.response_tokens
        own = logprobs[torch.arange(start - 1, start - 1 + len(ids)), ids]
        d = item.ref_logprobs - own
        terms = -(own - own.detach()).exp() * item.advantages + 0.1 * (d.exp() - 1 - d)
        means.append(terms.mean())
        placed = stats.pi_logprobs[start : start + len(ids)]
        torch.testing.assert_close(placed, own.detach())
    expected = torch.stack(means).mean()
    torch.testing.assert_close(stats.loss, expected)
    (gradient,) = torch.autograd.grad(stats.loss, pi_logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, pi_logits)[0])
    with pytest.raises(InvalidInput, match="packed_advantages"):
        GRPOWithChunkedOutputLoss()(
            pi_logits, pack.targets, pack.packed_ref_logprobs, torch.ones(2), pack.response_mask
        )


def inputs() -> LossInputs:
    """Five tokens of two sequences, of three and of two."""
    return LossInputs(
        policy_logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0, -6.0], requires_grad=True),
        sequence_index=torch.tensor([0, 0, 0, 1, 1]),
        loss_mask=torch.ones(5, dtype=torch.bool),
        num_tokens=5,
        num_sequences=2,
    )


@pytest.mark.parametrize(
    ("normalize", "reduction", "expected"),
    [
        (True, "mean", 3.5),
        (True, "sum", 7.0),
        (True, "none", [2.0, 5.0]),
        (False, "sum", 16.0),
        (False, "none", [6.0, 10.0]),
    ],
)
def test_s1_lines_850_to_860_sft_by_each_reduction(
    normalize: bool, reduction: str, expected: Any
) -> None:
    given = inputs()
    loss = SFTLoss(normalize_by_seq_length=normalize, reduction=reduction)(given).loss
    torch.testing.assert_close(loss, torch.tensor(expected))
    loss.sum().backward()
    assert given.policy_logprobs.grad is not None


def test_s1_lines_834_to_848_a_loss_reads_no_network_and_says_what_to_write() -> None:
    for loss in (GRPOLoss, SFTLoss):
        with pytest.raises(InvalidConfig, match="no loss reads weights here") as caught:
            loss(torch.nn.Linear(1, 1))
        assert "LossInputs" in caught.value.remedy
        loss(None)


async def test_s1_line_822_the_kl_from_the_collector() -> None:
    version = PolicyVersion(lineage="main", number=1)
    sampled = {"source": Source.MODEL, "policy_version": version}
    row = sequence_of([([1, 2], {"source": Source.PROMPT}), ([3, 4], sampled)], logprobs=[-1, -2])

    def reference(rows: Any) -> Any:
        return [np.full(len(row) - 1, -0.5) for row in rows]

    (kl,) = await RetrieveKL("from_collector", reference)([row])
    assert kl.tolist() == [-0.5, -1.5]
    bare = sequence_of([([1, 2], {"source": Source.PROMPT}), ([3], sampled)], logprobs=[])
    with pytest.raises(InvalidInput, match="no log-probs"):
        await RetrieveKL("from_collector", reference)([bare])
    with pytest.raises(InvalidConfig, match="sampled tokens alone"):
        RetrieveKL("from_collector", reference, assistant_only=False)
