"""The weights that a LoRA run starts from, with an adapter added: W + alpha / rank B A.

base = BaseWeights.of(model_dir)
base.digest()                                              # "sha256:9f86d08...", for any copy
dict(base.with_adapter(load_file(path), scaling=2.0))      # what `merging` makes in the trainer
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dialoop_learning.lora.adapter_config import AdapterConfig
from dialoop_learning.lora.layers import ADAPTER, factors_of, merged_weight
from dialoop_learning.model.weight_files import (
    ADAPTER_CONFIG,
    HEAD,
    Shapes,
    is_tied,
    read_shapes,
    weight_files,
)

BASE_DIGEST = "base_digest"
"""Key under which an adapter's file holds the digest of its base weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """The safetensors files of one model; with `tied` the head is the embedding, and left out."""

    files: tuple[Path, ...]
    tied: bool

    @classmethod
    def of(cls, model_dir: Path) -> BaseWeights:
        """Return all files of a model directory; InvalidConfig as for `weight_files`."""
        return cls(files=weight_files(model_dir), tied=is_tied(model_dir))

    def shapes(self) -> Shapes:
        """Return the shape of every tensor by name, from the files' headers."""
        return {name: shape for file in self.files for name, shape in read_shapes(file).items()}

    def digest(self) -> str:
        """Return the SHA-256 of names, types, shapes and bytes in the order of names.

        How the tensors are divided into files does not matter. It reads all bytes, which takes
        about a second per gigabyte.
        """
        summed = hashlib.sha256()
        with ExitStack() as opened:
            files = [opened.enter_context(safe_open(f, framework="pt")) for f in self.files]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            for name in sorted(places):
                if not (self.tied and name == HEAD):
                    stored = places[name].get_slice(name)
                    header = json.dumps([name, stored.get_dtype(), stored.get_shape()])
                    summed.update(header.encode())
                    tensor: Tensor = places[name].get_tensor(name)
                    summed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return f"sha256:{summed.hexdigest()}"

    def with_adapter(
        self, adapter: Mapping[str, Tensor], *, scaling: float, device: str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the model by name, with the adapter added, in the adapter's dtype.

        Tensors come one at a time, on `device`, so that no device has to hold them all.
        """
        dtype = next(iter(adapter.values())).dtype
        for file in self.files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    if self.tied and name == HEAD:
                        continue
                    tensor: Tensor = opened.get_tensor(name)
                    # The trainer holds the base in this dtype, and replicas must serve its sum.
                    tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
                    if factors := factors_of(adapter, name):
                        down, up = (factor.to(device) for factor in factors)
                        tensor = merged_weight(tensor, down, up, scaling)
                    yield name, tensor


def adapted_tensors(
    directory: Path, base: BaseWeights, *, digest: str
) -> Iterator[tuple[str, Tensor]]:
    """Return the policy that a PEFT directory makes of its base, as it was served.

    Its tensors come one at a time, by name, so that nobody has to hold a second copy of the model.
    Raises PreconditionFailed (BASE_MISMATCH) where the adapter's file names another base than
    `digest`, and InvalidInput or Unsupported for a config that is not plain LoRA's.
    """
    path = directory / ADAPTER
    with safe_open(path, framework="pt") as file:
        base_digest = (file.metadata() or {}).get(BASE_DIGEST, "")
    if base_digest:  # files that PEFT wrote have none
        require_base(digest, base_digest)
    config = AdapterConfig.from_json((directory / ADAPTER_CONFIG).read_text("utf-8"))
    return base.with_adapter(load_file(path), scaling=config.scaling)


def require_base(digest: str, expected: str) -> None:
    """Raise PreconditionFailed (BASE_MISMATCH) when an adapter belongs to other weights."""
    if digest != expected:
        raise PreconditionFailed(
            f"The adapter was trained on weights {_short(expected)}, these are {_short(digest)}.",
            reason=Reason.BASE_MISMATCH,
            remedy="Start with the model directory that the adapter's run began with.",
        )


def _short(digest: str) -> str:
    return digest[:19] or "without a digest"
