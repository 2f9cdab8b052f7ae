"""Log-probs of chosen tokens in bounded memory, however large the vocabulary.

The language-model head and the softmax run in chunks of rows. The backward pass needs their
probabilities: up to a fixed number of bytes they are kept, the rest is computed a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from torch import Tensor

from dialoop_learning.model.fused_head import (
    cut_kernel,
    cut_logprobs,
    refuse_entropy,
    require_plain_head,
)
from dialoop_learning.model.products import product

if TYPE_CHECKING:
    from dialoop_learning.model.experts import ReplayCounts
    from dialoop_learning.model.fused_head import LogprobKernel

DEFAULT_CHUNK_ROWS = 1024
"""Most rows of logits that exist at one time."""

DEFAULT_KEPT_BYTES = 256 << 20
"""Most bytes of probabilities kept for backward; the rest is computed a second time there. A row of
700 answer tokens of 49,152 words keeps all of them: with 64 MiB a train step took 6 % longer."""

_CACHED_LOGITS = 1 << 20
_LEAST_ROWS = 128


class TokenScores(NamedTuple):
    """The scores of M tokens: logprobs float32 [M] in nats, entropy float32 [M] in nats.

    entropy is None unless `with_entropy` was set. Both carry gradients. float64 stays float64.
    balance: how evenly experts were used, from `experts.balance_of`; None where nobody asks for it.
    replayed: how many choices of experts were replayed; None without recorded experts.
    num_forwarded: tokens that the model computed, those of shared beginnings once.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    balance: Tensor | None = None
    replayed: ReplayCounts | None = None
    num_forwarded: int = 0


class DistinctTokens(NamedTuple):
    """Which of M tokens are scored, where sequences share some that the policy wrote.

    chosen: int64 [D], one of each, None for all. copies: int64 [M], each token's place among the D.
    """

    chosen: Tensor | None = None
    copies: Tensor | None = None

    @classmethod
    def of(cls, places: Tensor, temperature: float | Tensor) -> DistinctTokens:
        """Tell tokens apart by their places int64 [M] among the computed ones, and temperature."""
        if isinstance(temperature, Tensor) and temperature.numel() > 1:
            kinds, kind = torch.unique(temperature, return_inverse=True)
            places = places * len(kinds) + kind
        distinct, copies = torch.unique(places, return_inverse=True)
        if len(distinct) == len(places):
            return cls()
        chosen = torch.empty_like(distinct)
        chosen[copies] = torch.arange(len(places), device=places.device)
        return cls(chosen, copies)

    def once(self, values: Any) -> Any:
        """Return values [M] of the scored tokens, [D], and one value as it is."""
        if self.chosen is None or not isinstance(values, Tensor) or values.numel() == 1:
            return values
        return values[self.chosen]

    def expand(self, scores: TokenScores) -> TokenScores:
        """Return the scores of D tokens as those of all M."""
        if self.copies is None:
            return scores
        entropy = None if scores.entropy is None else scores.entropy[self.copies]
        return scores._replace(logprobs=scores.logprobs[self.copies], entropy=entropy)


def token_logprobs(  # noqa: PLR0913 - what is scored, and three ways to trade memory for time
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    kept_bytes: int = DEFAULT_KEPT_BYTES,
    kernel: LogprobKernel = "chunked",
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> TokenScores:
    """Return log softmax(hidden @ weight.T / temperature)[targets] [M], in float32 or better.

    bias: [V], added to the logits. softcap: logits l then become softcap tanh(l / softcap), as in
    Gemma 2 (arXiv:2408.00118, 2). Temperature comes last. Both need the kernel "chunked".

    hidden: [M, H]. weight: [V, H]. targets: int64 [M]. temperature: one number or [M]; it must be
    the one that the tokens were sampled with, because the policy is the tempered distribution.
    At most `chunk_rows` rows of logits exist at one time, and `kept_bytes` of probabilities until
    backward. The kernel "cut" is that of `dialoop_learning.model.fused_head`: on CUDA, in
    half precision, without entropy.
    """
    scale = _inverse_temperature(temperature, hidden)
    if kernel == "cut":
        if with_entropy:
            refuse_entropy()
        require_plain_head(bias, softcap)
        fused = cut_kernel(hidden.device)
        return TokenScores(cut_logprobs(hidden, weight, targets, scale, kernel=fused))
    altered = bias is not None or softcap is not None  # then backward needs the logits themselves
    if altered or not torch.is_grad_enabled():
        kept_bytes = 0
    options = _Options(
        with_entropy=with_entropy, chunk_rows=chunk_rows, kept_bytes=kept_bytes, softcap=softcap
    )
    logprobs, entropy = _ChunkedLogProbs.apply(hidden, weight, bias, targets, scale, options)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropy if with_entropy else None)


def _inverse_temperature(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """Return 1 / temperature, float32 [M], or [1] where all tokens have the same."""
    values = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).reshape(-1)
    if not bool((values > 0).all()):
        raise InvalidInput(
            f"Log-probs at temperature {temperature} are undefined.",
            reason=Reason.INVALID_TEMPERATURE,
            remedy="Train on tokens sampled with a temperature above 0.",
        )
    return 1.0 / values


class _Options(NamedTuple):
    with_entropy: bool
    chunk_rows: int
    kept_bytes: int
    softcap: float | None


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probs and entropy whose backward keeps p - onehot of some chunks.

    The p = softmax(logits) of the other chunks are computed a second time.

    d logp_i / d logits = onehot(target_i) - p_i; d H_i / d logits = -p_i (log p_i + H_i).
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes tensors one by one
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        rows, head = hidden.shape[0], _Head(weight, bias, options.softcap)
        logprobs = hidden.new_empty(rows, dtype=_precision(hidden))
        entropy = torch.empty_like(logprobs) if options.with_entropy else logprobs.new_empty(0)
        room = options.kept_bytes
        kept = []
        for part in _parts(rows, _chunk_rows(options, weight)):
            every = _every_logprob(hidden[part], head, _of(scale, part))
            logprobs[part] = every.gather(-1, targets[part, None]).squeeze(-1)
            room -= every.nbytes
            if options.with_entropy and (room < 0 or every.dtype is not weight.dtype):
                probs = every.exp()
                entropy[part] = -probs.mul_(every).sum(-1)
                del probs
            if room >= 0:
                kept.append(_away(every.exp_(), targets[part], weight))
                if options.with_entropy and every.dtype is weight.dtype:
                    # H = log Z - p logits, and logits = scale W h: the vocabulary is summed in p W.
                    tempered = hidden[part] * _of(scale, part)
                    summed = (tempered * kept[-1].of_hidden).sum(-1)
                    entropy[part] = (-logprobs[part] - summed).clamp_min_(0)  # rounding, near 0
            del every  # or it would lie beside the next chunk's
        ctx.save_for_backward(hidden, weight, bias, targets, scale, logprobs, entropy)
        ctx.options, ctx.kept = options, kept
        ctx.set_materialize_grads(False)  # an entropy that is only a metric gets no gradient
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, scale, chosen, entropy = ctx.saved_tensors
        head = _Head(weight, bias, ctx.options.softcap)
        kept, ctx.kept = ctx.kept, []  # freed as they are used; a second backward recomputes all
        kept.reverse()
        grad_hidden = torch.empty_like(hidden)
        # Summed in float32 for weights of any dtype: in bfloat16 small chunks would round away.
        grad_weight = None  # a frozen head, as under LoRA, needs none
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=_precision(weight))
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=_precision(bias))
        is_bent = grads[1] is not None or not head.plain
        for part in _parts(hidden.shape[0], _chunk_rows(ctx.options, weight)):
            away = kept.pop() if kept else None
            if is_bent:
                bend: Tensor | float = 1.0
                if away is None or away.probs.dtype is not chosen.dtype:
                    logits = _logits(hidden[part], head, _of(scale, part))
                    bend = head.bend(logits, _of(scale, part))
                    logprobs = torch.log_softmax(logits, -1, out=logits)
                    del logits  # another name of `logprobs`
                else:
                    logprobs = away.every_logprob(targets[part], chosen[part])
                slope = _slope(logprobs, targets[part], entropy, part, grads)
                slope.mul_(_of(scale, part) * bend)
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
                slope = slope.to(weight.dtype)
                grad_hidden[part] = product(slope, weight)
                _add_product(grad_weight, slope.T, hidden[part])
                del away, logprobs, slope, bend
                continue
            if away is None:
                every = _every_logprob(hidden[part], head, _of(scale, part))
                away = _away(every.exp_(), targets[part], weight)
                del every  # another name of what `away` has
            grad = grads[0][part, None] * _of(scale, part)
            # The factor of a row multiplies what has the size of hidden states, not the vocabulary.
            grad_hidden[part] = away.of_hidden * -grad
            weighted = (hidden[part].to(grad.dtype) * -grad).to(weight.dtype)
            _add_product(grad_weight, away.probs.T, weighted)
            del away
        whole = None if grad_weight is None else grad_weight.to(weight.dtype)
        of_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, whole, of_bias, None, None, None


class _Away(NamedTuple):
    """p - onehot(target) of a chunk [m, V], and its product with the head's weight [m, H]."""

    probs: Tensor
    of_hidden: Tensor

    def every_logprob(self, targets: Tensor, chosen: Tensor) -> Tensor:
        """Return log p [m, V], computed in `probs`; `chosen` are those of the targets [m].

        Where p rounds to zero it is the logarithm of the smallest number: p log p is zero there.
        """
        probs = self.probs.scatter_(-1, targets[:, None], chosen[:, None].exp())
        return probs.clamp_min_(torch.finfo(probs.dtype).tiny).log_()


class _Head(NamedTuple):
    """The head's weight [V, H], its bias [V] and the cap of its logits."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None

    @property
    def plain(self) -> bool:
        """Return whether logits are a product and nothing else."""
        return self.bias is None and self.softcap is None

    def bend(self, tempered: Tensor, scale: Tensor) -> Tensor | float:
        """Return the derivative of the capped logits by those before the cap, [rows, V] or 1."""
        if self.softcap is None:
            return 1.0
        return 1 - (tempered / (scale * self.softcap)) ** 2


def _away(probs: Tensor, targets: Tensor, weight: Tensor) -> _Away:
    """Return p - onehot(target) of a chunk, computed in `probs`, and its product with the weight.

    It is computed before anything is rounded to the weight's dtype: near p = 1 rounding would lose
    it.
    """
    probs.scatter_add_(-1, targets[:, None], -torch.ones_like(probs[:, :1]))
    away = probs.to(weight.dtype)
    return _Away(away, product(away, weight))


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, unless that is None; left lies transposed."""
    if total is None:
        return
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _slope(
    logprobs: Tensor, targets: Tensor, entropy: Tensor, part: slice, grads: tuple[Tensor, ...]
) -> Tensor:
    """Return the gradient [rows of part, V] at the tempered logits; it may overwrite `logprobs`."""
    of_logprobs, of_entropy = grads
    away = None
    if of_entropy is not None:
        away = (logprobs + entropy[part, None]).mul_(of_entropy[part, None])
    probs = logprobs.exp_()
    if away is not None:
        away.mul_(probs).neg_()
    if of_logprobs is None:
        return probs.zero_() if away is None else away
    factor = of_logprobs[part, None]
    slope = probs.mul_(-factor).scatter_add_(-1, targets[:, None], factor.contiguous())
    return slope if away is None else slope.add_(away)


def _chunk_rows(options: _Options, weight: Tensor) -> int:
    """Return the rows of a chunk: on a CPU few enough for its cache, but at least `_LEAST_ROWS`."""
    if weight.device.type != "cpu":
        return options.chunk_rows
    return min(options.chunk_rows, max(_LEAST_ROWS, _CACHED_LOGITS // weight.shape[0]))


def _parts(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _precision(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def _of(scale: Tensor, part: slice) -> Tensor:
    """Return the scale of the part's rows, to multiply [rows, V]."""
    return scale[part, None] if len(scale) > 1 else scale


def _every_logprob(hidden: Tensor, head: _Head, scale: Tensor) -> Tensor:
    """Return the log-probs [rows, V] of all tokens."""
    logits = _logits(hidden, head, scale)
    return torch.log_softmax(logits, -1, out=logits)


def _logits(hidden: Tensor, head: _Head, scale: Tensor) -> Tensor:
    """Return tempered logits [rows, V], in float32 or better."""
    if head.plain and hidden.dtype is _precision(hidden):
        return product(hidden * scale, head.weight.T)  # hidden states are smaller than logits
    logits = product(hidden, head.weight.T).to(_precision(hidden))
    if head.bias is not None:
        logits = logits.add_(head.bias)
    if head.softcap is not None:
        logits = logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits.mul_(scale)
