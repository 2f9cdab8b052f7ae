"""LoRA adapters of the parity tests' model, and what merging them by hand gives."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dialoop.sequences import PolicyVersion
from safetensors.torch import save_file

from services.inference.publications import Manifest
from tests.parity.test_engines import make_model

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
    """Random A and B for each target; std 0 makes an adapter that adds nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in make_model(seed=0, tied=tied).named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            out_size, in_size = weight.shape
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, in_size, generator=generator) * 0.1
            tensors[f"{key}.lora_B.weight"] = torch.randn(out_size, RANK, generator=generator) * std
    return tensors


def announced(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    number: int,
    name: str = "style",
    **manifest: Any,
) -> Manifest:
    """Write the tensors, and say so."""
    save_file(tensors, path)
    data = path.read_bytes()
    return Manifest(
        policy_version=PolicyVersion(lineage=name, number=number),
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
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
