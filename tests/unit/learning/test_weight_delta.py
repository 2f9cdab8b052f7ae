"""What changed between two files of weights: exact, small, and refused where it does not fit."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.errors import InvalidInput
from dialoop_learning.model import weight_delta
from dialoop_learning.model.weight_delta import apply_delta, write_delta
from dialoop_learning.model.weight_files import read_header
from safetensors import safe_open
from safetensors.torch import save_file

SIZE = 70_001


def save(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def drawn(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    """Numbers of any bits, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size * dtype.itemsize,)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
@pytest.mark.parametrize("part", [0.0, 1e-4, 0.003, 0.1, 0.5, 0.7])
def test_the_new_file_comes_out_byte_for_byte(
    dtype: torch.dtype, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_delta, "_BLOCK", 1000)  # gaps go over the bounds of blocks
    old = {"matrix": drawn(dtype, SIZE, 0), "norm": torch.ones(9), "none": torch.zeros(0, 3)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    changed = torch.rand(SIZE, generator=torch.Generator().manual_seed(1)) < part
    new["matrix"][changed] = drawn(dtype, SIZE, 2)[changed]
    # Few bytes of the whole, so that a matrix of which most has changed goes as one.
    old["rest"] = new["rest"] = torch.arange(2 * SIZE).double()
    new["norm"] = old["norm"].clone()
    new["norm"][-1] = -0.0
    before, after = save(old, tmp_path / "old"), save(new, tmp_path / "new")
    delta = tmp_path / "delta"
    assert write_delta(before, after, delta, {"sha256": "x"})
    header = read_header(delta)
    assert header.metadata == {"sha256": "x"}
    assert "rest" not in header.tensors
    most = min(part * (dtype.itemsize + 2) * 1.1, dtype.itemsize) * SIZE
    assert delta.stat().st_size < most + 2000
    with safe_open(delta, "pt") as file:  # it is a safetensors file as others are
        assert set(file.keys()) == header.tensors.keys()
    digest = apply_delta(delta, before)
    assert before.read_bytes() == after.read_bytes()
    assert digest == hashlib.sha256(after.read_bytes()).hexdigest()


def test_what_would_save_nothing_is_none(tmp_path: Path) -> None:
    old = {"matrix": drawn(torch.bfloat16, SIZE, 0)}
    before = save(old, tmp_path / "old")
    others = {
        "most changed": {"matrix": drawn(torch.bfloat16, SIZE, 1)},
        "another tensor": {**old, "more": torch.zeros(1)},
        "another format": {"matrix": old["matrix"].view(torch.float16)},
        "another shape": {"matrix": old["matrix"][None]},
    }
    for tensors in others.values():
        after = save(tensors, tmp_path / "new")
        assert not write_delta(before, after, tmp_path / "delta", {})


SOME: dict[str, Any] = {
    "m#values": torch.zeros(2, dtype=torch.bfloat16),
    "m#gaps": torch.zeros(2, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"other": torch.zeros(1)},
        {"m": torch.zeros(5, dtype=torch.bfloat16)},
        {"m": torch.zeros(4)},
        {"m#values": SOME["m#values"]},
        {**SOME, "m#values": torch.zeros(2)},
        {**SOME, "m#values": torch.zeros(3, dtype=torch.bfloat16)},
        {**SOME, "m#gaps": torch.tensor([0, 3], dtype=torch.uint8)},
        {**SOME, "m#gaps": torch.tensor([0, 3], dtype=torch.int64)},
    ],
)
def test_changes_that_do_not_fit_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    file = save({"m": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "file")
    with pytest.raises(InvalidInput, match="do not fit") as caught:
        apply_delta(save(wrong, tmp_path / "delta"), file)
    assert caught.value.reason == "MANIFEST_MISMATCH"


def test_a_header_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    file = save({"m": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "file")
    delta = save({"m": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "delta")
    good = delta.read_bytes()
    for place in (b"[0,9]", b"[8,0]", b"[0,6]", b"[1,9]"):
        delta.write_bytes(good.replace(b"[0,8]", place))
        with pytest.raises(InvalidInput, match="do not fit"):
            apply_delta(delta, shutil.copy(file, tmp_path / "copy"))
