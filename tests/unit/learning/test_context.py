"""A row that several ranks compute: the chunks of each, put together, are the attention of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dialoop_learning.model.attention import _chunk_attention, _score, _visible
from dialoop_learning.model.context_parallel import Context, ContextShare
from dialoop_learning.model.forest_attention import combine
from dialoop_learning.packing.rows import TokenRow, pack_rows
from torch import Tensor

NUM_TOKENS, SIZE = 48, 3


@pytest.fixture(scope="module")
def shares() -> list[ContextShare]:
    mask = torch.arange(NUM_TOKENS - 5) % 4 > 0
    row = TokenRow(token_ids=torch.arange(NUM_TOKENS - 5), response_mask=mask)
    batch = pack_rows([row], pad_to=NUM_TOKENS)
    contexts = (Context(rank=rank, size=SIZE, group=None) for rank in range(SIZE))  # type: ignore[arg-type]
    return [context.share(batch) for context in contexts]


def test_each_token_is_one_ranks_and_found_there(shares: list[ContextShare]) -> None:
    kept = torch.cat([share.kept for share in shares])
    assert sorted(kept.tolist()) == list(range(NUM_TOKENS))
    positions = torch.arange(NUM_TOKENS)
    owners = shares[0].owners(positions)
    for share in shares:
        assert torch.equal(kept[share.places], positions)
        own = positions[owners == share.context.rank]
        assert torch.equal(share.kept[share.own_places(own)], own)
    late = [max(share.starts) + min(share.starts) for share in shares]
    assert len(set(late)) == 1  # under a causal mask each rank has as much to do


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 7},
        {"window": 20},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ],
)
def test_chunks_are_the_attention_of_the_whole(
    shares: list[ContextShare], options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, NUM_TOKENS, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    given = {"scale": None, "window": None, "softcap": None, "sinks": None, **options}
    found = torch.empty(NUM_TOKENS, 4, 8, dtype=torch.float64)
    for share in shares:
        own = query.index_select(2, share.kept)
        chunks = share.chunks(own, key, value, window=given["window"])
        found[share.kept] = torch.cat([_chunk_attention(*rows, **given) for rows in chunks])
    torch.testing.assert_close(found, _by_hand(query, key, value, **given))


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    rows = [query, *(x.repeat_interleave(2, 1) for x in (key, value))]
    visible = _visible(NUM_TOKENS, window, query.device)
    outputs, sums = _score(rows, visible, scale=scale, softcap=softcap)
    return combine([(slice(None), outputs, sums)], NUM_TOKENS, sinks)
