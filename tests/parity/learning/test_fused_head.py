import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dialoop.errors import DialoopError
from dialoop_learning.model import logprobs
from dialoop_learning.model.attention import (
    AttentionPlan,
    VarlenPlan,
    packed_attention,
    plan_attention,
    share_prefixes,
    takes_varlen,
    varlen_attention,
)
from dialoop_learning.model.fused_head import cut_kernel, cut_logprobs
from dialoop_learning.model.logprobs import token_logprobs
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow, pack_rows

from benchmarks.servers.families import make_family

ROWS, WIDTH, VOCABULARY = 9, 16, 50
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def linear_cross_entropy(
    e: Any,
    c: Any,
    targets: Any,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
    filter_eps: float | str | None = "high",
) -> Any:
    """The signature of cut-cross-entropy 25.1.1, computed plainly."""
    assert (reduction, filter_eps, softcap, shift) == ("none", None, None, False)
    logits = (e.double() @ c.double().T).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)


def _problem() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


def _reason(call: Any) -> str:
    with pytest.raises(DialoopError) as caught:
        call()
    assert caught.value.remedy
    return caught.value.reason


@pytest.mark.parametrize("temperature", [1.0, 0.5, torch.linspace(0.5, 2, ROWS)])
def test_fused_logprobs_and_gradients_equal_those_of_chunks(temperature: Any) -> None:
    hidden, weight, targets = _problem()
    coefficients = torch.linspace(-1, 1, ROWS)
    scale = 1 / torch.as_tensor(temperature).reshape(-1).float()
    fused = cut_logprobs(hidden, weight, targets, scale, kernel=linear_cross_entropy)
    actual = torch.autograd.grad((fused * coefficients).sum(), (hidden, weight))
    head = weight.bfloat16().float()  # what a kernel in half precision reads
    plain = token_logprobs(hidden.float(), head, targets, temperature=temperature).logprobs
    expected = torch.autograd.grad((plain * coefficients).sum(), (hidden, weight))
    torch.testing.assert_close(fused, plain, atol=0.05, rtol=0)
    for mine, other in zip(actual, expected, strict=True):
        assert (mine.float() - other.float()).norm() <= 0.01 * other.float().norm()


def test_sums_are_asked_for_in_float32_where_the_release_can() -> None:
    precision = {}

    def newer(e: Any, c: Any, targets: Any, *, accum_c_fp32: bool = False, **options: Any) -> Any:
        precision["accum_c_fp32"] = accum_c_fp32
        return linear_cross_entropy(e, c, targets, **options)

    cut_logprobs(*_problem(), torch.ones(1), kernel=newer)
    assert precision == {"accum_c_fp32": True}


def test_no_rows_give_no_logprobs_and_zero_gradients() -> None:
    hidden, weight, targets = _problem()
    scores = cut_logprobs(hidden[:0], weight, targets[:0], torch.ones(1), kernel=pytest.fail)
    scores.sum().backward()
    assert scores.shape == (0,)
    assert float(weight.grad.abs().sum()) == 0.0


def test_without_cuda_the_fused_kernel_is_refused_by_name() -> None:
    assert _reason(lambda: token_logprobs(*_problem(), kernel="cut")) == "NEEDS_CUDA"


def test_without_its_package_the_fused_kernel_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    assert _reason(lambda: cut_kernel(CUDA)) == "KERNEL_NOT_INSTALLED"


def test_with_its_package_and_cuda_the_fused_kernel_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = ModuleType("cut_cross_entropy")
    installed.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", installed)
    assert cut_kernel(CUDA) is linear_cross_entropy


def test_entropy_is_refused_by_the_fused_kernel() -> None:
    scores = lambda: token_logprobs(*_problem(), kernel="cut", with_entropy=True)  # noqa: E731
    assert _reason(scores) == "KERNEL_WITHOUT_ENTROPY"


@pytest.mark.parametrize(("family", "what"), [("phi2", "a bias"), ("gemma2", "soft-capped")])
def test_heads_that_the_fused_kernel_cannot_compute_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, what: str
) -> None:
    installed = ModuleType("cut_cross_entropy")
    installed.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", installed)
    policy = load_policy(make_family(family, tmp_path), dtype="bfloat16")
    with pytest.raises(DialoopError, match=what) as caught:
        policy.take_kernel("cut", device=CUDA)
    assert caught.value.reason == "KERNEL_NEEDS_PLAIN_HEAD"


def test_float32_is_refused_by_the_fused_kernel() -> None:
    hidden, weight, targets = _problem()
    whole = lambda: cut_logprobs(  # noqa: E731
        hidden.float(), weight, targets, torch.ones(1), kernel=linear_cross_entropy
    )
    assert _reason(whole) == "KERNEL_NEEDS_HALF_PRECISION"


def test_a_policy_refuses_the_fused_kernel_before_any_work(tmp_path: Path) -> None:
    policy = load_policy(make_tiny_model(tmp_path, seed=0))
    assert _reason(lambda: policy.take_kernel("cut", device=torch.device("cpu"))) == "NEEDS_CUDA"
    assert policy.logprob_kernel == "chunked"


def test_with_autocast_a_policy_in_float32_gives_the_fused_kernel_half_precision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = ModuleType("cut_cross_entropy")
    installed.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", installed)
    monkeypatch.setattr(logprobs, "cut_kernel", lambda _: linear_cross_entropy)
    policy = load_policy(make_family("qwen3", tmp_path))
    policy.autocast = torch.bfloat16
    batch = pack_rows([TokenRow.from_demonstration([5, 6, 7, 8], [False, True, True, True])])
    chunked = policy(batch).logprobs
    policy.take_kernel("cut", device=CUDA)
    torch.testing.assert_close(policy(batch).logprobs, chunked, atol=0.05, rtol=0.0)


def test_varlen_attention_is_taken_on_cuda_in_half_precision_only() -> None:
    assert takes_varlen(CUDA, torch.bfloat16)
    assert takes_varlen(CUDA, torch.float16)
    assert not takes_varlen(CUDA, torch.float32)
    assert not takes_varlen(CPU, torch.bfloat16)
    assert plan_attention(share_prefixes(torch.arange(5), (3, 2)), (3, 2)).varlen is None


def _varlen(
    query: Any, key: Any, value: Any, ends: Any, ends_k: Any, longest: int, longest_k: int, **o: Any
) -> Any:
    """torch's varlen_attn, one sequence after the other."""
    assert torch.equal(ends, ends_k)
    before, after = o.pop("window_size")
    assert (longest, after) == (longest_k, 0)
    parts = []
    for start, end in pairwise(ends.tolist()):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        visible = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if before >= 0:
            visible = visible.triu(-before)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, **o)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _one_head_each(query: Any, key: Any, *rest: Any, **options: Any) -> Any:
    """The kernel of torch 2.11, which takes no grouped heads."""
    assert query.shape == key.shape
    assert "enable_gqa" not in options
    return _varlen(query, key, *rest, **options)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_varlen_attention_equals_that_of_buckets(key_heads: int, window: int | None) -> None:
    tokens, lengths = torch.tensor([1, 2, 3, 1, 2, 5, 6, 9, 9]), (3, 4, 2)
    shared = share_prefixes(tokens, lengths)
    plan = plan_attention(shared, lengths)
    ends = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    flat = AttentionPlan(
        buckets=(),
        restore=plan.restore,
        depths=plan.depths,
        longest=plan.longest,
        varlen=VarlenPlan(tokens=shared.places, kept=shared.kept, cu_seqlens=ends),
    )
    generator = torch.Generator().manual_seed(1)
    size = len(shared.kept)
    query, key, value = (
        torch.randn(1, heads, size, 8, generator=generator, dtype=torch.float64)
        for heads in (4, key_heads, key_heads)
    )
    module = torch.nn.Module()
    expected, _ = packed_attention(
        module, query, key, value, None, attention_plan=plan, scaling=0.3, sliding_window=window
    )
    actual = varlen_attention(query, key, value, flat, scale=0.3, window=window, kernel=_varlen)
    torch.testing.assert_close(actual, expected)
    alone = varlen_attention(
        query,
        key,
        value,
        flat,
        scale=0.3,
        window=window,
        kernel=_one_head_each,
        takes_groups=False,
    )
    torch.testing.assert_close(alone, expected)
    # As under autocast: rotated queries and keys come in float32, values in half precision.
    half = varlen_attention(
        query, key, value.bfloat16(), flat, scale=0.3, window=window, kernel=_varlen
    )
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.double(), expected, atol=0.03, rtol=0.03)
