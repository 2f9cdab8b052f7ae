"""What a learner writes and reads: the policy's weights, and all that a checkpoint keeps of it."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dialoop.errors import InvalidConfig
from safetensors.torch import load_file, save_file

from services.learning.lora import (
    ADAPTER,
    adapter_tensors,
    has_lora,
    load_adapter,
    merged_tensors,
    save_adapter_config,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from services.learning.models import PolicyModel
    from services.learning.optim import GuardedOptimizer

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """A safetensors file of the whole policy."""

    path: Path
    sha256: str
    num_bytes: int


class LearnerFiles:
    """Writes and reads a policy, its optimisers by name, and the random state."""

    def __init__(
        self,
        policy: PolicyModel,
        optimizers: Mapping[str, GuardedOptimizer],
        orders: random.Random,
        *,
        model_dir: Path,
    ) -> None:
        self._policy = policy
        self._optimizers = dict(optimizers)
        self._orders = orders
        self._model_dir = model_dir

    def export(self, path: Path) -> ExportedWeights:
        """Write the weights as they are now; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        save_file(self._tensors(), temporary, metadata={"format": "pt"})
        temporary.replace(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ExportedWeights(path=path, sha256=digest, num_bytes=path.stat().st_size)

    def load_weights(self, path: Path) -> None:
        """Take weights that `export` wrote; InvalidConfig when they are another model's."""
        tensors = load_file(path)
        own = self._tensors()
        if {k: v.shape for k, v in tensors.items()} != {k: v.shape for k, v in own.items()}:
            raise InvalidConfig(
                f"The weights {path.name} are not of the model in {self._model_dir}.",
                reason="WEIGHTS_MISMATCH",
                remedy="Resume with the model directory the run was started with.",
            )
        self._policy.causal_lm.load_state_dict(tensors, strict=False)
        self._policy.causal_lm.tie_weights()

    def save_weights(self, directory: Path) -> None:
        """Write what is trained to a checkpoint: the weights, or with LoRA a PEFT directory."""
        model = self._policy.causal_lm
        if not has_lora(model):
            self.export(directory / _WEIGHTS)
            return
        tensors = {name: tensor.cpu() for name, tensor in adapter_tensors(model).items()}
        save_file(tensors, directory / ADAPTER, metadata={"format": "pt"})
        save_adapter_config(model, directory, base=self._model_dir)

    def restore_weights(self, directory: Path) -> None:
        """Take what `save_weights` wrote; InvalidConfig when it is another model's."""
        is_adapter, model = (directory / ADAPTER).is_file(), self._policy.causal_lm
        if is_adapter != has_lora(model):
            raise InvalidConfig(
                f"The checkpoint {directory.name} is {'' if is_adapter else 'not '}one of LoRA.",
                reason="WEIGHTS_MISMATCH",
                remedy="Resume with the lora_rank the run was started with.",
            )
        if is_adapter:
            load_adapter(model, load_file(directory / ADAPTER))
        else:
            self.load_weights(directory / _WEIGHTS)

    def save_state(self, path: Path) -> None:
        """Write optimisers and random state, for `load_state`."""
        state = {name: one.state_dict() for name, one in self._optimizers.items()}
        random_state = {
            "torch_random": torch.get_rng_state(),
            "python_random": repr(self._orders.getstate()),
        }
        torch.save({**state, **random_state}, path)

    def load_state(self, path: Path) -> None:
        """Continue as if never stopped."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for name, one in self._optimizers.items():
            one.load_state_dict(state[name])
        torch.set_rng_state(state["torch_random"])
        self._orders.setstate(ast.literal_eval(state["python_random"]))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters by their Hugging Face names, adapters merged; a tied head is not repeated."""
        model = self._policy.causal_lm
        tied = model.config.tie_word_embeddings
        tensors = merged_tensors(model) if has_lora(model) else model.state_dict()
        return {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in tensors.items()
            if not (tied and name == "lm_head.weight")
        }
