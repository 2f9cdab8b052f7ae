from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidInput
from dialoop_extras.seed_interface import (
    RolloutOutput,
    TrajectoryData,
    VLLMOutput,
    create_response_mask,
    create_sample_mask,
    debug_table,
    extract_response_logprobs_from_pack,
    pack_sequences,
)
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model


def _data(prompt: int, response: int, **fields: Any) -> TrajectoryData:
    ids = torch.arange(10, 10 + prompt + response)
    return TrajectoryData(
        prompt_tokens=ids[:prompt],
        response_tokens=ids[prompt:],
        logprobs=-torch.arange(1, response + 1).float(),
        sequence_id=f"{prompt}+{response}",
        **fields,
    )


def _pack(items: list[Any], **options: Any) -> Any:
    return pack_sequences(items, 12, "cpu", 0, **options)


def test_a_pack_is_what_the_seed_describes() -> None:
    packed = _pack([_data(2, 3, group_id=4), _data(1, 2, group_id=5)])
    assert packed.packed_tokens.tolist() == [10, 11, 12, 13, 14, 10, 11, 12, 0, 0, 0, 0]
    assert packed.sample_mask.tolist() == [0] * 5 + [1] * 3 + [-1] * 4
    assert (
        packed.response_mask.tolist()
        == [False] * 2 + [True] * 3 + [False, True, True] + [False] * 4
    )
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert packed.prompt_lens.tolist() == [2, 1]
    assert packed.response_lens.tolist() == [3, 2]
    assert packed.sequence_ids == ["2+3", "1+2"]
    assert packed.group_ids == [4, 5]
    assert packed.targets is None


def test_what_the_loss_needs_is_scattered_onto_the_response() -> None:
    items = [
        _data(2, 2, ref_logprobs=torch.tensor([-0.5, -0.6]), advantages=torch.tensor([2.0])),
        _data(1, 1, ref_logprobs=torch.tensor([-0.7]), advantages=torch.tensor([-1.0])),
    ]
    packed = pack_sequences(items, 7, "cpu", 0, populate_for_loss=True)
    assert packed.targets is not None
    assert packed.targets.tolist() == [-100, -100, 12, 13, -100, 11, -100]
    assert packed.packed_advantages is not None
    assert packed.packed_advantages.tolist() == [0, 0, 2, 2, 0, -1, 0]
    assert packed.packed_ref_logprobs is not None
    assert packed.packed_ref_logprobs.tolist() == pytest.approx([0, 0, -0.5, -0.6, 0, -0.7, 0])
    assert packed.packed_logprobs is not None
    assert packed.packed_logprobs.tolist() == [0, 0, -1, -2, 0, -1, 0]


def test_masks_made_alone_are_those_of_the_pack() -> None:
    packed = _pack([_data(2, 3), _data(1, 0), _data(1, 2)])
    lens = (packed.prompt_lens, packed.response_lens, 12, "cpu")
    assert torch.equal(create_response_mask(*lens), packed.response_mask)
    assert torch.equal(create_sample_mask(*lens), packed.sample_mask)


def test_extracted_values_come_back_in_order_and_unpadded() -> None:
    packed = _pack([_data(2, 3), _data(1, 0), _data(1, 2)])
    values = torch.arange(12.0)
    parts = extract_response_logprobs_from_pack(values, packed.sample_mask, packed.response_mask, 3)
    assert [part.tolist() for part in parts] == [[2, 3, 4], [], [7, 8]]


def test_attention_mask_is_block_diagonal_causal_and_leaves_no_row_empty() -> None:
    mask = _pack([_data(1, 1), _data(1, 1)]).attention_mask
    assert mask[:4, :4].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]
    assert bool(mask.any(-1).all())
    assert not bool(mask[4:, :4].any())


@pytest.mark.parametrize("named", [RolloutOutput, VLLMOutput])
def test_rollout_output_and_its_sequences_pack_alike(named: type[RolloutOutput]) -> None:
    items = [_data(2, 2), _data(1, 3)]
    output = named(
        prompts=[i.prompt_tokens for i in items],
        responses=[i.response_tokens for i in items],
        logprobs=[i.logprobs for i in items],
        sequence_ids=[i.sequence_id for i in items],
    )
    for outputs in (output, [output]):
        packed = pack_sequences(outputs, 12, "cpu", 0)
        assert torch.equal(packed.packed_tokens, _pack(items).packed_tokens)
        assert packed.sequence_ids == ["2+2", "1+3"]


def test_exactly_full_needs_no_padding() -> None:
    packed = _pack([_data(4, 4), _data(2, 2)])
    assert -1 not in packed.sample_mask.tolist()


@pytest.mark.parametrize(
    ("items", "reason", "named"),
    [
        ([], "EMPTY_BATCH", "no sequence"),
        ([_data(7, 6)], "SEQUENCE_TOO_LONG", "7\\+6"),
        ([_data(4, 4), _data(4, 4)], "ROW_DOES_NOT_FIT", "16 tokens"),
        ([_data(2, 2, ref_logprobs=torch.zeros(3))], "RAGGED", "2\\+2"),
        (
            [_data(3, 2, advantages=torch.ones(1)), _data(2, 2)],
            "RAGGED",
            "'2\\+2' has no advantages",
        ),
        ([_data(2, 2), _data(0, 2)], "EMPTY_PROMPT", "'0\\+2' has an empty prompt"),
    ],
)
def test_bad_input_is_a_value_error_that_says_which_sequence(
    items: list[TrajectoryData], reason: str, named: str
) -> None:
    with pytest.raises(InvalidInput, match=named) as caught:
        _pack(items)
    assert caught.value.reason == reason
    assert isinstance(caught.value, ValueError)


def test_debug_table_shows_each_sequence_its_own_logprobs(tmp_path: Path) -> None:
    policy = load_policy(make_tiny_model(tmp_path, seed=0))
    items = [_data(2, 3), _data(1, 2)]
    packed = _pack(items)
    scores = packed.batch.scatter(policy(packed.batch).logprobs.detach())
    rows = debug_table(packed, scores, items)
    alone = policy(pack_sequences(items[1:], 12, "cpu", 0).batch).logprobs
    assert rows[1]["policy_logprobs"] == pytest.approx(alone.tolist(), abs=1e-5)
    assert [row["num_response_tokens"] for row in rows] == [3, 2]
