"""What the transformers engine does with its model in a thread: load it, score, copy weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from dialoop.errors import InternalError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dialoop_services.inference.transformers_engine.keys import DECODING_ATTENTION
from dialoop_services.inference.weights.parameters import HEAD

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_services.inference.transformers_engine.adapters import AdaptedModel
    from dialoop_services.inference.weights.loadable import Adapter, PolicyAdapter
    from dialoop_services.learning.lora.base_weights import BaseWeights


def load_model(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model of a directory, which nobody trains."""
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(DECODING_ATTENTION)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def score(model: AdaptedModel, token_ids: list[int], adapter: Adapter | None) -> torch.Tensor:
    """Log-probs float32 [L - 1] of given ids from position 1 on."""
    with model.rows_of([adapter]):
        output = model(input_ids=torch.tensor([token_ids]), use_cache=False)
    logits = output.logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]


@torch.inference_mode()
def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
    """Replace all weights in place; InternalError when the names are not the model's."""
    if tied:
        tensors.pop(HEAD, None)
    outcome = model.load_state_dict(tensors, strict=False)
    missing = set(outcome.missing_keys) - ({HEAD} if tied else set())
    if missing or outcome.unexpected_keys:
        raise InternalError("The model's parameter names are not those of its files.")


def summed(base: BaseWeights, adapter: PolicyAdapter) -> dict[str, torch.Tensor]:
    """The base weights with an adapter added."""
    return dict(base.with_adapter(load_file(adapter.path), scaling=adapter.scaling))
