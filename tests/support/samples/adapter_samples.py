"""LoRA adapters of the parity tests' model, and what merging them by hand gives."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dialoop.clients.weights import WeightsManifest
from dialoop.sequences import PolicyVersion
from dialoop_learning.model.weight_files import model_shapes
from safetensors.torch import save_file

from tests.support.engine_world import make_model

if TYPE_CHECKING:
    from pathlib import Path

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
RANK, ALPHA = 4, 8


def config_json(**changes: Any) -> str:
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    return json.dumps({**config, **changes})


def adapter_tensors(*, seed: int, tied: bool, std: float = 0.1) -> dict[str, torch.Tensor]:
    """An adapter of the parity tests' model; std 0 makes one that adds nothing."""
    model = make_model(seed=0, tied=tied)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return _random(shapes, seed=seed, std=std)


def adapter_of(model_dir: Path, *, seed: int) -> dict[str, torch.Tensor]:
    """An adapter of a model directory."""
    return _random(model_shapes(model_dir), seed=seed, std=0.1)


def _random(
    shapes: dict[str, tuple[int, ...]], *, seed: int, std: float
) -> dict[str, torch.Tensor]:
    """Random A and B for each target module."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            key = f"base_model.model.{module}"
            down = torch.randn(RANK, shape[1], generator=generator) * 0.1
            tensors[f"{key}.lora_A.weight"] = down
            up = torch.randn(shape[0], RANK, generator=generator) * std
            tensors[f"{key}.lora_B.weight"] = up
    return tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[str, int]:
    """The sha256 and size of the file they make."""
    save_file(tensors, path)
    data = path.read_bytes()
    return hashlib.sha256(data).hexdigest(), len(data)


def make_announcement(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    number: int,
    name: str = "style",
    **manifest: Any,
) -> WeightsManifest:
    """Write the tensors, and say so."""
    sha256, num_bytes = write_tensors(path, tensors)
    return WeightsManifest(
        policy_version=PolicyVersion(lineage=name, number=number),
        sha256=sha256,
        num_bytes=num_bytes,
        path=path.name,
        adapter=name,
        **{"adapter_config_json": config_json(), **manifest},
    )


def merged_model(tensors: dict[str, torch.Tensor], *, seed: int, tied: bool) -> Any:
    """The model with alpha / rank * B @ A added to each weight."""
    model = make_model(seed=seed, tied=tied)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                up = tensors[name.replace(".lora_A.", ".lora_B.")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                parameters[f"{module}.weight"] += ALPHA / RANK * up @ down
    return model


def scores(model: Any, ids: list[int]) -> np.ndarray:
    """Log-probs float32 [len - 1] by a plain forward pass."""
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)
    return rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
