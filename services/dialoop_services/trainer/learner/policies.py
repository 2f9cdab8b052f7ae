"""The models that a trainer's process holds: the policy that it trains, and SFT's reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_learning.lora.layers import add_lora
from dialoop_learning.loss.facts import facts_of
from dialoop_learning.model.policy import DTYPES, PolicyModel, blank_policy, load_policy
from dialoop_learning.parallel.loading import spread
from dialoop_learning.parallel.ranks import ALONE, Ranks

from dialoop_services.config.memory import LARGE_MODEL
from dialoop_services.config.tables import ModelSection
from dialoop_services.runtime.process import set_allocator

if TYPE_CHECKING:
    from dialoop_services.trainer.settings import TrainerSettings

MAPPED_BYTES = 8 << 20
"""Size from which on a large model's tensors are mapped by themselves, so that freeing one gives it
back. glibc would raise its bound to 32 MiB, and the hidden states of 4,000 tokens at a width of
1,024 have 16: with recomputed activations a step at Qwen3-0.6B's shape took half as much again.
Each page is touched anew, which is little beside what a large model computes on it."""


def policy_of(settings: TrainerSettings, ranks: Ranks = ALONE) -> PolicyModel:
    """Return the model that the settings describe, or this rank's part of it.

    Raise InvalidConfig without its device.
    """
    if settings.device == "cuda":
        require_cuda_devices(1)
    if ranks.size > 1:
        policy = blank_policy(settings.model_dir, dtype=settings.dtype)
    else:
        # The trainer may not have its turn on a shared device yet.
        device = ranks.device if settings.device_lock is None else "cpu"
        policy = load_policy(settings.model_dir, dtype=settings.dtype, device=device)
    model = settings.model
    if model.lora_rank:
        add_lora(
            policy.causal_lm,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            targets=model.lora_targets,
        )
    if settings.activation_checkpointing:
        policy.checkpoint_activations()
    policy.take_balance(settings.objective.router_balance_coeff)
    policy.offloads = settings.activation_offload
    policy.autocast = DTYPES[settings.autocast] if settings.autocast else None
    policy.take_kernel(settings.logprob_kernel, device=torch.device(settings.device))
    if sum(parameter.numel() for parameter in policy.parameters()) >= LARGE_MODEL:
        set_allocator(mapped_bytes=MAPPED_BYTES)
    return policy if ranks.size == 1 else spread(policy, settings.model_dir, ranks)


def require_cuda_devices(number: int) -> None:
    """Raise InvalidConfig (NEEDS_CUDA) where there are fewer CUDA devices than processes here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < number:
        raise InvalidConfig(
            f"The trainer's device is cuda, and this machine has {count or 'no'} CUDA device"
            f"{'' if count < 2 else 's'} for {number}.",
            reason=Reason.NEEDS_CUDA,
            remedy='Set device = "cpu" or fewer num_processes in [train], or run where they are.',
        )


def reference_of(settings: TrainerSettings, ranks: Ranks = ALONE) -> PolicyModel | None:
    """Return the starting model as SFT's frozen reference, or None; RL's is in the scorer."""
    facts = facts_of(settings.demonstration_loss)
    if settings.mode == "rl" or not (settings.objective.kl_coeff or facts.needs_reference):
        return None
    plain = {
        "model": ModelSection(),
        "activation_checkpointing": False,
        "activation_offload": False,
    }
    return policy_of(settings.model_copy(update=plain), ranks)
