"""Products by oneDNN: what torch computes, forward and backward, and torch's own where not ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dialoop_learning.model import products
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.products import OneDnnLinear, product
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow, pack_rows
from torch.nn.functional import linear

from tests.support.waiting import PATIENCE_S


def watch_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what goes to oneDNN from now on."""
    shapes: list[tuple[int, ...]] = []
    own = products._onednn

    def record(
        inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        shapes.append(tuple(inputs.shape))
        return own(inputs, weight, bias)

    monkeypatch.setattr(products, "_onednn", record)
    return shapes


@pytest.mark.parametrize(
    ("machine", "vendor", "flags", "library"),
    [
        ("x86_64", "AuthenticAMD", ("avx2", "avx512f"), "oneDNN"),
        ("x86_64", "AuthenticAMD", ("avx2",), "torch"),  # MKL leaves nothing unused there
        ("x86_64", "GenuineIntel", ("avx2", "avx512f"), "torch"),
        ("x86_64", "", (), "torch"),
        ("aarch64", "", (), "torch"),
    ],
)
def test_the_processor_decides_whose_products_are_faster(
    machine: str, vendor: str, flags: tuple[str, ...], library: str
) -> None:
    assert products.faster_library(machine, vendor, flags) == library


def test_where_torchs_products_are_faster_they_are_taken_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = watch_shapes(monkeypatch)
    cpu = torch.device("cpu")
    assert products.library_of(torch.device("cuda")) == "torch"
    for is_faster, name in ((True, "oneDNN"), (False, "torch")):
        monkeypatch.setattr(products, "_AVAILABLE", is_faster)
        assert products.library_of(cpu) == name
        with products.linear_products(cpu):
            linear(torch.randn(3, 8), torch.randn(4, 8))
    assert len(shapes) == 1


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_torchs(rows: int, transposed: bool) -> None:
    torch.manual_seed(rows)
    left, right = torch.randn(rows, 33), torch.randn(33, 19)
    if transposed:
        left, right = torch.randn(33, rows).T, torch.randn(19, 33).T
    expected = (left.double() @ right.double()).float()
    torch.testing.assert_close(product(left, right), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (1, 40, 24), (2, 3, 24)])
def test_a_linear_layer_and_its_gradients_are_torchs(
    shape: tuple[int, ...], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 11, bias=with_bias)
    inputs = torch.randn(shape, requires_grad=True)
    grad = torch.randn(*shape[:-1], 11)
    expected = torch.autograd.grad(layer(inputs), [inputs, *layer.parameters()], grad)
    shapes = watch_shapes(monkeypatch)
    with OneDnnLinear():
        out = layer(inputs)
    assert len(shapes) == products._AVAILABLE
    torch.testing.assert_close(out, layer(inputs), rtol=1e-5, atol=1e-6)
    actual = torch.autograd.grad(out, [inputs, *layer.parameters()], grad)
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_no_factor_is_copied_for_a_gradient_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_AVAILABLE", True)
    shapes = watch_shapes(monkeypatch)
    layer = torch.nn.Linear(24, 11, bias=False)
    with OneDnnLinear():
        layer(torch.randn(5, 24, requires_grad=True)).backward(torch.randn(5, 11))
    assert shapes == [(5, 24), (5, 11)]  # the layer, and the gradient of its inputs


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer = torch.nn.Linear(8, 4).requires_grad_(requires_grad=False)
    inputs = torch.randn(3, 8, requires_grad=True)
    with OneDnnLinear():
        layer(inputs).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand(3, 8))


def test_other_formats_no_rows_and_autocast_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = watch_shapes(monkeypatch)
    weight = torch.randn(4, 8)
    with OneDnnLinear():
        assert linear(torch.randn(0, 8), weight).shape == (0, 4)
        assert linear(torch.randn(3, 8).double(), weight.double()).dtype is torch.float64
        assert linear(torch.randn(3, 8).bfloat16(), weight.bfloat16()).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(torch.randn(3, 8), weight).dtype is torch.bfloat16
    assert shapes == []


def test_checkpointed_layers_are_computed_anew_by_the_same_products(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, seed=3)
    row = TokenRow.from_demonstration([5, 6, 7, 8, 9], [False] + [True] * 4)
    gradients = []
    for thrifty, offloads in ((False, False), (True, False), (False, True), (True, True)):
        policy = load_policy(tmp_path)
        policy.offloads = offloads
        if thrifty:
            policy.checkpoint_activations()
        policy(pack_rows([row])).logprobs.sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    plain, *others = gradients
    for other in others:
        assert all(torch.equal(mine, its) for mine, its in zip(plain, other, strict=True))


GROWTH = """
import resource, torch
from dialoop_learning.model.products import product
def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
weight = torch.randn(128, 2048)
product(torch.randn(1024, 128), weight)
before = peak_mb()
for rows in range(400, 1000, 2):
    product(torch.randn(rows, 128), weight)
print(peak_mb() - before)
"""


@pytest.mark.skipif(not products._AVAILABLE, reason="products are not oneDNN's here")
def test_rows_of_ever_other_lengths_keep_no_memory() -> None:
    # Unbounded, oneDNN keeps a buffer for each of the 300 lengths: 1.6 GB.
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("_CACHE_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH],
        env=inherited | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert float(done.stdout) < 500
