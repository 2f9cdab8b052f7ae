"""The tensors that TRL and torchrl were given, as our losses read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dialoop_learning.loss.losses import LossInputs

from tests.goldens.losses_samples import GROUP_SIZE, variant

if TYPE_CHECKING:
    from dialoop_learning.loss.losses import Loss


def peer_goldens(peer: str) -> dict[str, Any]:
    """tests/goldens/losses_<peer>.json: made_with, tensors, cases, advantages."""
    path = Path(__file__).parents[2] / "goldens" / f"losses_{peer}.json"
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def peer_inputs(golden: dict[str, Any], name: str, **fields: Any) -> LossInputs:
    """The 36 positions of the case called `name` in float64, untrained ones and padding included.

    The sampler is the policy before the step, as in the peers, and known to be another where
    TRL's case says so.
    """
    settings = golden["cases"][name]["settings"]
    tensors = variant(golden["tensors"], settings.get("variant", "plain"))
    trained = torch.tensor(tensors["trained"])
    rows, width = trained.shape
    prompt = torch.arange(rows) // GROUP_SIZE
    of_prompt = torch.stack([trained[prompt == p].sum() for p in prompt]).double()

    def flat(key: str) -> torch.Tensor:
        return torch.tensor(tensors[key], dtype=torch.float64).flatten()

    is_sampler_known = settings.get("use_vllm", False)
    tensors_of_all: dict[str, Any] = {
        "sequence_index": torch.arange(rows).repeat_interleave(width),
        "loss_mask": trained.flatten(),
        "num_tokens": int(trained.sum()),
        "num_sequences": rows,
        "num_prompts": rows // GROUP_SIZE,
        "prompt_num_tokens": of_prompt.repeat_interleave(width),
        "inference_logprobs": flat("sampler" if is_sampler_known else "old"),
        "proximal_logprobs": flat("old") if is_sampler_known else None,
        "ref_logprobs": flat("ref"),
        "advantages": flat("advantages").repeat_interleave(width),
        "entropy": flat("entropy").requires_grad_(),
    }
    policy = flat("policy").requires_grad_()
    return LossInputs(policy_logprobs=policy, **(tensors_of_all | fields))


def of_sequences(inputs: LossInputs, kept: list[int]) -> LossInputs:
    """The same, but only these sequences are trained on, and counted."""
    mask = inputs.loss_mask & torch.isin(inputs.sequence_index, torch.tensor(kept))
    policy = inputs.policy_logprobs.detach().clone().requires_grad_()
    return replace(
        inputs,
        policy_logprobs=policy,
        loss_mask=mask,
        num_tokens=int(mask.sum()),
        num_sequences=len(kept),
    )


def loss_and_gradient(objective: Loss, inputs: LossInputs) -> tuple[float, torch.Tensor]:
    """Our loss, and its gradient by the policy's log-probs, [36]."""
    loss = objective(inputs).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.policy_logprobs.grad is not None
    return float(loss.detach()), inputs.policy_logprobs.grad


def theirs(golden: dict[str, Any], name: str) -> tuple[float, torch.Tensor]:
    """A peer's loss and gradient, [36]; columns that it was not given are 0."""
    case = golden["cases"][name]
    gradient = torch.tensor(case["gradient"], dtype=torch.float64)
    width = len(golden["tensors"]["policy"][0])
    padded = torch.nn.functional.pad(gradient, (0, width - gradient.shape[1]))
    return case["loss"], padded.flatten()


def assert_same(ours: tuple[float, torch.Tensor], peers: tuple[float, torch.Tensor]) -> None:
    """Losses to 1e-9 and gradients to 1e-9 of the greatest."""
    assert abs(ours[0] - peers[0]) <= 1e-9 * max(1.0, abs(peers[0]))
    scale = max(1.0, float(peers[1].abs().max()))
    torch.testing.assert_close(ours[1], peers[1], rtol=0, atol=1e-9 * scale)
