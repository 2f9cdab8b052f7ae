"""What torchrl's own losses and MCAdvantage make of the goldens' tensors.

Nothing of torchrl is replaced but the policy, which answers with the goldens' log-probs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.goldens.losses_samples import TURN_REWARDS, variant

CLIP, CLIP_HIGH = 0.25, 0.5
"""Clips that float32 holds exactly, as torchrl keeps them in it."""

GRPO_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_epsilon": CLIP},
    "grpo_by_sequence": {"clip_epsilon": CLIP, "aggregation": "prompt_mean"},
    "dapo": {"class": "DAPO", "clip_epsilon": [CLIP, CLIP_HIGH]},
    "cispo": {"class": "CISPOLoss", "clip_epsilon": [CLIP, CLIP_HIGH]},
    "entropy": {"clip_epsilon": CLIP, "entropy_bonus": True, "entropy_coeff": 0.0625},
    "kl_to_ref": {"clip_epsilon": CLIP, "kl_to_ref_coeff": 0.125},
    "kl_to_inference": {"clip_epsilon": CLIP, "kl_to_inference_coeff": 0.125},
    "kl_mask": {"clip_epsilon": CLIP, "kl_mask_threshold": 0.0625},
    "wild": {"clip_epsilon": CLIP, "variant": "wild"},
}
"""GRPOLoss's settings, and ours: which class, which variant of the tensors."""

SFT_CASES: dict[str, dict[str, Any]] = {
    "sft": {"reduction": "mean"},
    "sft_of_sums": {"reduction": "mean", "normalize_by_seq_length": False},
    "sft_sum": {"reduction": "sum", "normalize_by_seq_length": False},
    "sft_kl": {"reduction": "mean", "kl_to_ref_coeff": 0.125},
    "minor_sft": {"loss_function": "minor_sft", "beta": 0.5},
    "minor_sft_of_sums": {
        **{"loss_function": "minor_sft", "beta": 0.5, "normalize_by_seq_length": False},
    },
    "distill": {"class": "DistillationLoss"},
    "distill_forward": {"class": "DistillationLoss", "kl_direction": "forward"},
}

ADVANTAGE_CASES: dict[str, dict[str, Any]] = {
    "step": {},
    "sum": {"trajectory_return": "sum"},
    "max": {"trajectory_return": "max"},
    "mean": {"trajectory_return": "mean"},
    "almost_uniform": {"trajectory_return": "sum", "rewards": [[0.0], [5e-7]]},
}


def torchrl_results(tensors: dict[str, Any]) -> dict[str, Any]:
    """Every case by name: its settings, the loss, and its gradient by the policy's log-probs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = {name: _loss_of_grpo(tensors, case) for name, case in GRPO_CASES.items()}
        cases |= {name: _loss_of_sft(tensors, case) for name, case in SFT_CASES.items()}
        advantages = {name: _advantages(case) for name, case in ADVANTAGE_CASES.items()}
    return {"cases": cases, "advantages": advantages}


class _GivenTokens(torch.distributions.Distribution):
    """A distribution that knows the log-prob of one answer: the goldens'."""

    def __init__(self, logprobs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__(logprobs.shape, validate_args=False)
        self.logprobs, self.entropies, self.mask = logprobs, entropy, mask

    def log_prob(self, _tokens: torch.Tensor) -> torch.Tensor:
        return self.logprobs

    def entropy(self) -> torch.Tensor:
        return self.entropies


class _GivenPolicy(torch.nn.Module):
    """A policy whose log-probs and entropies are leaves."""

    in_keys = (("tokens", "full"),)
    tokenizer = object()

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.tensors = tensors
        self.logprobs = torch.nn.Parameter(_double(tensors["policy"]))
        self.entropy = torch.nn.Parameter(_double(tensors["entropy"]))

    def get_dist(self, _tensordict: Any, **_options: Any) -> _GivenTokens:
        mask = torch.tensor(self.tensors["trained"])
        return _GivenTokens(self.logprobs, self.entropy, mask)

    _get_sft_dist = get_dist

    def forward(self, tensordict: Any) -> Any:
        """The log-probs of whole sequences, as they are: of different lengths."""
        from tensordict import TensorDict, lazy_stack

        rows = [
            TensorDict({"log_probs": TensorDict({"full": row[:length]})})
            for row, length in zip(self.logprobs, self.tensors["lengths"], strict=True)
        ]
        assert len(rows) == len(tensordict)
        return lazy_stack(rows)


def _loss_of_grpo(tensors: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    from tensordict import TensorDict
    from torchrl.objectives import llm

    tensors = variant(tensors, case.get("variant", "plain"))
    settings = {k: v for k, v in case.items() if k not in ("class", "variant")}
    policy = _GivenPolicy(tensors)
    kind = getattr(llm, case.get("class", "GRPOLoss"))
    clip = settings.pop("clip_epsilon")
    loss = kind(
        policy,
        clip_epsilon=tuple(clip) if isinstance(clip, list) else clip,
        **({"entropy_bonus": False} | settings),
    ).double()
    shape = torch.tensor(tensors["tokens"]).shape
    batch = TensorDict(
        {
            "tokens": {"full": torch.tensor(tensors["tokens"])},
            "log_probs": {"full": _double(tensors["old"])},
            "next": {"ref_log_probs": {"full": _double(tensors["ref"])}},
            "advantage": _double(tensors["advantages"])[:, None, None].expand(*shape, 1),
        },
        batch_size=shape[0],
    )
    return _result(case, policy, loss(batch))


def _loss_of_sft(tensors: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    from torchrl.objectives import llm

    settings = {k: v for k, v in case.items() if k != "class"}
    policy = _GivenPolicy(tensors)
    kind = getattr(llm, case.get("class", "SFTLoss"))
    output = kind(policy, tokenizer=policy.tokenizer, **settings)(_demonstrations(tensors))
    return _result(case, policy, output)


def _demonstrations(tensors: dict[str, Any]) -> Any:
    """Sequences as they are, of different lengths; the reference is 0 where nobody trains."""
    from tensordict import TensorDict, lazy_stack

    rows = []
    for index, length in enumerate(tensors["lengths"]):
        trained = torch.tensor(tensors["trained"][index][:length])
        ref = torch.where(trained, _double(tensors["ref"][index][:length]), 0.0)
        masks = {
            "all_assistant_mask": trained,
            "all_attention_mask": torch.ones_like(trained),
        }
        rows.append(
            TensorDict(
                {
                    "history": {"full": torch.zeros(1)},
                    "masks": masks,
                    "next": {"ref_log_probs": {"full": ref}, "teacher_log_probs": {"full": ref}},
                }
            )
        )
    return lazy_stack(rows)


def _result(case: dict[str, Any], policy: _GivenPolicy, output: Any) -> dict[str, Any]:
    """All their loss terms together, and each of them."""
    terms = {
        field.name: output.get(field.name)
        for field in type(output).fields()
        if field.name.startswith("loss_") and output.get(field.name) is not None
    }
    total = torch.stack([term.sum() for term in terms.values()]).sum()
    total.backward()
    assert policy.logprobs.grad is not None
    result = {"settings": case, "loss": float(total.detach())}
    result["terms"] = {name: float(term.detach()) for name, term in terms.items()}
    result["gradient"] = policy.logprobs.grad.tolist()
    if policy.entropy.grad is not None:
        result["entropy_gradient"] = policy.entropy.grad.tolist()
    return result


def _advantages(case: dict[str, Any]) -> list[list[float]]:
    """MCAdvantage of each trajectory's turns, in the order they were given."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import MCAdvantage

    settings = dict(case)
    rewards = settings.pop("rewards", TURN_REWARDS)
    transform = MCAdvantage(grpo_size=len(rewards), prompt_key="group", **settings)
    result = None
    for turns in rewards:
        length = len(turns)
        done = torch.arange(length) == length - 1
        step = {"reward": _double(turns)[:, None], "done": done[:, None]}
        trajectory = TensorDict(
            {"group": torch.zeros(length, dtype=torch.int64), "next": step}, batch_size=length
        )
        result = transform.inv(trajectory)
    assert result is not None
    flat = iter(result["advantage"].flatten().tolist())
    return [[next(flat) for _ in turns] for turns in rewards]


def _double(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
