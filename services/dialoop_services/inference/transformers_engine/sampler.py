"""From logits to sampled tokens and the log-probs they were sampled with.

The order is vLLM's: repetition penalty, temperature, min-p, top-k, top-p. Greedy rows report
log-probs at temperature 1, after the penalty. All of it is computed where the logits are. The noise
of a draw comes from the host's generators, so that a seed draws the same noise on each device.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.trajectory import SamplingParams

_DROPPED = float("-inf")


def processed_logprobs(
    logits: torch.Tensor,
    sampling: Sequence[SamplingParams],
    token_ids: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Return log-probs [B, V] float32 of the distributions to sample from; logits [B, V].

    token_ids: prompt and answer of each row so far, to which a repetition penalty applies.
    """
    penalized = _penalize(logits.float(), sampling, token_ids)
    scaled = penalized / _column([s.temperature or 1.0 for s in sampling], penalized.device)
    rows = [index for index, s in enumerate(sampling) if s.truncates and s.temperature != 0]
    if rows:
        scaled[rows] = _truncate(scaled[rows], [sampling[row] for row in rows])
    return torch.log_softmax(scaled, dim=-1)


def sample_rows(
    logprobs: torch.Tensor,
    sampling: Sequence[SamplingParams],
    generators: Sequence[torch.Generator],
) -> torch.Tensor:
    """Sample a token per row, int64 [B]: p / Exponential(1) is largest at i with chance p_i."""
    greedy = torch.tensor([s.temperature == 0 for s in sampling], device=logprobs.device)
    noise = _exponential(logprobs.shape[-1], generators).to(logprobs.device)
    drawn = (logprobs.exp() / noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(dim=-1)
    return torch.where(greedy, logprobs.argmax(dim=-1), drawn)


def likeliest(
    logprobs: torch.Tensor, sampling: Sequence[SamplingParams]
) -> list[dict[int, float] | None]:
    """Return each row's `top_logprobs` likeliest tokens that may be sampled; None without any.

    logprobs: float32 [B, V].
    """
    most = min(max(s.top_logprobs for s in sampling), logprobs.shape[-1])
    if not most:
        return [None] * len(sampling)
    values, ids = (tensor.tolist() for tensor in logprobs.topk(most, dim=-1))
    rows: list[dict[int, float] | None] = []
    for row_ids, row_values, s in zip(ids, values, sampling, strict=True):
        pairs = list(zip(row_ids, row_values, strict=True))[: s.top_logprobs]
        rows.append({i: p for i, p in pairs if p != _DROPPED} if s.top_logprobs else None)
    return rows


def _exponential(width: int, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Return noise [B, width] of each row's generator; neighbours that share one draw together."""
    drawn = []
    for _, rows in groupby(generators, key=id):
        same = list(rows)
        noise = torch.empty(len(same), width, device="cpu")
        drawn.append(noise.exponential_(generator=same[0]))
    return torch.cat(drawn)


def _penalize(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], token_ids: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Penalize logits x of tokens that occurred already: x / penalty, or x * penalty below 0.

    Keskar et al. 2019 (arXiv:1909.05858), with vLLM's and transformers' care for negative logits.
    """
    rows = [index for index, s in enumerate(sampling) if s.penalizes]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        seen = torch.tensor(sorted(set(token_ids[row])), device=logits.device)
        penalty = sampling[row].repetition_penalty or 1.0
        values = logits[row, seen]
        logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _truncate(scaled: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    device = scaled.device
    probs = scaled.softmax(dim=-1)
    floor = _column([s.min_p or 0.0 for s in sampling], device) * probs.amax(dim=-1, keepdim=True)
    scaled = scaled.masked_fill(probs < floor, _DROPPED)
    ordered, order = scaled.sort(dim=-1, descending=True)
    size = scaled.shape[-1]
    top_k = [min(s.top_k or size, size) for s in sampling]
    kth = torch.tensor(top_k, device=device)[:, None] - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, kth), _DROPPED)
    ordered_probs = ordered.softmax(dim=-1)
    before = ordered_probs.cumsum(dim=-1) - ordered_probs
    top_p = _column([1.0 if s.top_p is None else s.top_p for s in sampling], device)
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), _DROPPED)
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]
