import math
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidInput
from dialoop_learning.model.logprobs import token_logprobs

ROWS, WIDTH, VOCABULARY = 37, 16, 50


def _problem(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


def _full(hidden: Any, weight: Any, targets: Any, temperature: Any) -> Any:
    logits = (hidden @ weight.T).float() / torch.as_tensor(temperature).reshape(-1, 1)
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 2, ROWS)])
@pytest.mark.parametrize("chunk_rows", [1, 8, 1000])
def test_chunked_equals_full_in_value_and_gradient(temperature: Any, chunk_rows: int) -> None:
    hidden, weight, targets = _problem()
    coefficients = torch.linspace(-1, 1, ROWS)
    full = _full(hidden, weight, targets, temperature)
    expected = torch.autograd.grad((full * coefficients).sum(), (hidden, weight))
    chunked = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk_rows=chunk_rows
    ).logprobs
    actual = torch.autograd.grad((chunked * coefficients).sum(), (hidden, weight))
    torch.testing.assert_close(chunked, full, atol=1e-5, rtol=0)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_gradient_is_right_by_finite_differences() -> None:
    hidden, weight, targets = _problem(torch.float64)
    hidden, weight = hidden[:3].detach(), weight.detach()
    leaf = hidden.clone().requires_grad_()
    token_logprobs(leaf, weight, targets[:3], temperature=0.8).logprobs.sum().backward()
    step = torch.zeros_like(hidden)
    step[1, 2] = 1e-2
    up = token_logprobs(hidden + step, weight, targets[:3], temperature=0.8).logprobs.sum()
    down = token_logprobs(hidden - step, weight, targets[:3], temperature=0.8).logprobs.sum()
    assert float(up - down) / 2e-2 == pytest.approx(float(leaf.grad[1, 2]), abs=1e-3)


def test_temperature_two_halves_the_logits() -> None:
    # logits (2, 0) at temperature 2 are (1, 0): log p = 1 - log(1 + e) = -0.313262
    scores = token_logprobs(
        torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]]), torch.tensor([0]), temperature=2.0
    )
    assert float(scores.logprobs) == pytest.approx(-0.313262, abs=1e-6)


def test_uniform_logits_have_the_entropy_log_v() -> None:
    hidden, weight, targets = _problem()
    scores = token_logprobs(hidden * 0, weight, targets, with_entropy=True)
    assert scores.entropy is not None
    torch.testing.assert_close(scores.entropy, torch.full((ROWS,), math.log(VOCABULARY)))


def test_entropy_of_chunks_equals_the_full_one() -> None:
    hidden, weight, targets = _problem()
    actual = token_logprobs(hidden, weight, targets, with_entropy=True, chunk_rows=5).entropy
    expected = torch.distributions.Categorical(logits=hidden @ weight.T).entropy()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_rows", [3, 1024])
def test_gradients_of_logprobs_and_entropy_equal_those_of_the_full_softmax(
    chunk_rows: int,
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(n, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (8, 11)
    )
    targets = torch.randint(11, (8,), generator=generator)
    scale = torch.rand(8, generator=generator, dtype=torch.float64)

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (logprobs * scale).sum() - 0.3 * (entropy * scale.flip(0)).sum()
        return torch.autograd.grad(loss, (hidden, weight))

    scores = token_logprobs(
        hidden, weight, targets, temperature=0.5, with_entropy=True, chunk_rows=chunk_rows
    )
    assert scores.entropy is not None
    full = torch.log_softmax(hidden @ weight.T / 0.5, dim=-1)
    chosen = full.gather(-1, targets[:, None]).squeeze(-1)
    expected = gradients(chosen, -(full.exp() * full).sum(-1))
    for actual, wanted in zip(gradients(scores.logprobs, scores.entropy), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_biased_and_soft_capped_heads_equal_the_full_softmax(
    with_bias: bool, softcap: float | None, with_entropy: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((8, 6), (11, 6), (11,))
    )
    targets = torch.randint(11, (8,), generator=generator)
    temperature = torch.rand(8, generator=generator, dtype=torch.float64) + 0.5
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    logits = hidden @ weight.T + (bias if with_bias else 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = torch.log_softmax(logits / temperature[:, None].float(), dim=-1)
    expected = full.gather(-1, targets[:, None]).squeeze(-1)
    scores = token_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        with_entropy=with_entropy,
        chunk_rows=3,
        bias=bias if with_bias else None,
        softcap=softcap,
    )
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-6, rtol=0)
    loss, own_loss = expected.cos().sum(), scores.logprobs.cos().sum()
    if scores.entropy is not None:
        loss = loss - (full.exp() * full).sum(-1).sin().sum()
        own_loss = own_loss + scores.entropy.sin().sum()
    wanted, actual = (torch.autograd.grad(x, leaves) for x in (loss, own_loss))
    torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-6)


def test_entropy_is_absent_unless_asked_for() -> None:
    assert token_logprobs(*_problem()).entropy is None


def test_bfloat16_weights_give_float32_logprobs() -> None:
    scores = token_logprobs(*_problem(torch.bfloat16))
    assert scores.logprobs.dtype is torch.float32


def test_no_rows_give_no_logprobs_and_zero_gradient() -> None:
    hidden, weight, targets = _problem()
    token_logprobs(hidden[:0], weight, targets[:0]).logprobs.sum().backward()
    assert float(weight.grad.abs().sum()) == 0.0


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_that_is_not_positive_is_rejected(temperature: float) -> None:
    with pytest.raises(InvalidInput) as caught:
        token_logprobs(*_problem(), temperature=temperature)
    assert caught.value.reason == "INVALID_TEMPERATURE"


@pytest.mark.parametrize("kept_bytes", [0, 2 * 4 * VOCABULARY * 8, 1 << 20])
@pytest.mark.parametrize("of_entropy", [None, 0.0, 0.3])
def test_what_is_kept_and_what_is_computed_again_give_the_same(
    kept_bytes: int, of_entropy: float | None
) -> None:
    hidden, weight, targets = _problem(torch.float64)
    coefficients = torch.linspace(-1, 1, ROWS).double()
    full = (hidden @ weight.T / 0.7).log_softmax(-1)
    chosen = full.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(full.exp() * full).sum(-1)
    whole = (chosen * coefficients).sum() + (of_entropy or 0.0) * entropy.sum()
    expected = torch.autograd.grad(whole, (hidden, weight))
    scores = token_logprobs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        with_entropy=of_entropy is not None,
        chunk_rows=4,
        kept_bytes=kept_bytes,
    )
    loss = (scores.logprobs * coefficients).sum()
    if scores.entropy is not None:
        torch.testing.assert_close(scores.entropy, entropy, atol=1e-7, rtol=1e-7)
    if of_entropy:
        assert scores.entropy is not None
        loss = loss + of_entropy * scores.entropy.sum()
    for _ in range(2):  # the second pass finds nothing kept
        actual = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-7)


def test_bfloat16_gradients_are_right_where_the_policy_is_sure() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 64, generator=generator).bfloat16()
    targets = torch.randint(512, (64,), generator=generator)
    hidden = (0.3 * weight[targets].float()).bfloat16()

    def gradients(dtype: torch.dtype, kept_bytes: int) -> list[torch.Tensor]:
        leaves = [x.to(dtype).clone().requires_grad_() for x in (hidden, weight)]
        scores = token_logprobs(*leaves, targets, kept_bytes=kept_bytes).logprobs
        assert float(scores.detach().exp().mean()) > 0.99
        return [g.double() for g in torch.autograd.grad(scores.sum(), leaves)]

    exact = gradients(torch.float64, 0)
    for kept_bytes in (0, 1 << 30):
        for actual, wanted in zip(gradients(torch.bfloat16, kept_bytes), exact, strict=True):
            assert float((actual - wanted).norm()) < 0.03 * float(wanted.norm())


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_a_frozen_head_gets_no_gradient_and_the_rest_the_same(kept_bytes: int) -> None:
    hidden, weight, targets = _problem(torch.float64)
    scores = token_logprobs(hidden, weight, targets, kept_bytes=kept_bytes).logprobs
    (wanted,) = torch.autograd.grad(scores.sum(), (hidden,))
    scores = token_logprobs(hidden, weight.detach(), targets, kept_bytes=kept_bytes).logprobs
    (actual,) = torch.autograd.grad(scores.sum(), (hidden,))
    assert torch.equal(actual, wanted)


def test_a_token_of_no_probability_has_its_logprob_and_gradient() -> None:
    # logits (200, 0): p of the second underflows float32, its log-prob is -200.
    hidden, weight = torch.tensor([[200.0]]), torch.tensor([[1.0], [0.0]]).requires_grad_()
    logprobs = token_logprobs(hidden, weight, torch.tensor([1])).logprobs
    logprobs.sum().backward()
    assert float(logprobs.detach()) == -200.0
    assert weight.grad.flatten().tolist() == [-200.0, 200.0]
