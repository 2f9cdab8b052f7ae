"""Each model family trains on packed rows as its own class in transformers computes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dialoop_learning.model.policy import PolicyModel, load_policy
from dialoop_learning.packing.rows import TokenRow, pack_rows

from benchmarks.servers.families import (
    FAMILIES,
    WINDOW,
    families_table,
    make_family,
)

ROOT = Path(__file__).parents[3]


def _rows() -> list[TokenRow]:
    """Rows shorter and much longer than a window, two of which share a beginning."""
    generator = torch.Generator().manual_seed(7)
    beginning = torch.randint(314, (WINDOW + 5,), generator=generator).tolist()
    rows = []
    for length, start in ((5, []), (30, beginning), (25, beginning), (WINDOW + 1, [])):
        rest = torch.randint(314, (length - len(start),), generator=generator).tolist()
        ids = [*start, *rest]
        rows.append(TokenRow.from_demonstration(ids, [False, *[i > 3 for i in range(1, length)]]))
    return rows


def _rowwise_logprobs(policy: PolicyModel, rows: list[TokenRow]) -> torch.Tensor:
    """Log-probs of the trained tokens by transformers' eager attention and head, row by row."""
    policy.causal_lm.set_attn_implementation("eager")
    parts = []
    for row in rows:
        logits = policy.causal_lm(input_ids=row.token_ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, row.token_ids[1:, None]).squeeze(-1)
        parts.append(logprobs[row.response_mask[1:]])
    policy.causal_lm.set_attn_implementation("dialoop_packed")
    return torch.cat(parts)


def _gradients(policy: PolicyModel, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    named = policy.causal_lm.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def test_the_page_shows_every_family() -> None:
    assert families_table() in (ROOT / "docs" / "families.md").read_text("utf-8")


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_unpacked_in_log_probs_and_gradients(name: str, tmp_path: Path) -> None:
    policy = load_policy(make_family(name, tmp_path, seed=1))
    rows = _rows()
    expected = _rowwise_logprobs(policy, rows)
    wanted = _gradients(policy, expected)
    actual = policy(pack_rows(rows)).logprobs
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    own = _gradients(policy, actual)
    assert own.keys() == wanted.keys()
    for parameter, gradient in own.items():
        difference = (gradient - wanted[parameter]).norm()
        assert difference <= 1e-4 * wanted[parameter].norm() + 1e-5, parameter


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_changes_what_rows_longer_than_it_score(name: str, tmp_path: Path) -> None:
    policy = load_policy(make_family(name, tmp_path, seed=1))
    rows = _rows()
    with torch.no_grad():
        windowed = policy(pack_rows(rows)).logprobs
        policy.causal_lm.config.sliding_window = None
        for module in policy.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = None
        whole = policy(pack_rows(rows)).logprobs
    assert float((windowed - whole).abs().max()) > 1e-2
