"""Presets: the defaults of other libraries' GRPO, as keys of the job file.

with_preset({"preset": "torchtune_grpo", "train": {"objective": {"kl_coeff": 0.05}}})
    # kl_coeff 0.05, and all else as torchtune has it

A key that the file sets itself wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # torchrl 0.14: GRPOLoss (clip 0.2, token mean, entropy bonus 0.01), MCAdvantage by step.
        "torchrl_grpo": {
            "train": {
                "loss": "grpo",
                "objective": {"aggregation": "token", "entropy_coeff": 0.01},
            },
            "scorer": {"advantages_of": "turn"},
        },
        # torchtune: LinearGRPOLoss (kl 0.1, each answer's mean, then their mean) and
        # (r - mean) / (std + 1e-4). Its ratio is to the policy itself, so one update a train step.
        # Its 8 chunks of the output head change no number; Dialoop's head chooses its own chunks.
        "torchtune_grpo": {
            "train": {
                "loss": "grpo",
                "num_minibatches": 1,
                "objective": {
                    "aggregation": "sequence",
                    "kl_coeff": 0.1,
                    "kl_estimator": "k3",
                    "proximal": True,
                },
            },
            "scorer": {
                "reference_logprobs": True,
                "advantage_divisor": "sum",
                "advantage_eps": 1e-4,
            },
        },
    }
)


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a job file with those of its preset under them.

    A preset of an unknown name changes nothing; the check of the key `preset` names it.
    """
    name = values.get("preset")
    return _merge(PRESETS.get(name, {}) if isinstance(name, str) else {}, values)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**under, **over}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _merge(under[key], over[key])
    return merged
