"""What is refused as read otherwise is computed otherwise by vLLM, and what is admitted is not.

Fields of each family are varied one by one. vLLM's own model code and transformers' compute the
same row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers.families import FAMILIES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.heavy(reason="compares some sixty models of each family"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[3]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"sliding_window": 5}
USED = {**WINDOW, "use_sliding_window": True}
VARIED: dict[str, dict[str, Any]] = {
    "as it is": {},
    **{f"{name}={value!r}": {name: value} for name, values in {
        "head_dim": (64, 16, None),
        "hidden_act": ("gelu", "gelu_pytorch_tanh", "relu"),
        "hidden_activation": ("gelu",),
        "rms_norm_eps": (0.5,),
        "layer_norm_eps": (0.5,),
        "rope_theta": (100.0,),
        "partial_rotary_factor": (0.5, 0.25, 1.0),
        "attention_bias": (True, False),
        "mlp_bias": (True,),
        "bias": (True,),
        "qkv_bias": (True, False),
        "tie_word_embeddings": (True, False),
        "query_pre_attn_scalar": (100,),
        "attn_logit_softcapping": (0.5, None),
        "final_logit_softcapping": (0.5, None),
        "use_bidirectional_attention": (True,),
        "qk_norm": (True,),
        "use_qk_norm": (True,),
        "qk_layernorm": (True,),
        "logit_scale": (0.5,),
        "logits_scaling": (7.0,),
        "embedding_multiplier": (3.0,),
        "residual_multiplier": (0.3,),
        "attention_multiplier": (0.6,),
        "num_key_value_heads": (4, 1),
        "no_rope_layers": ([0, 1],),
        "norm_topk_prob": (True, False),
        "decoder_sparse_step": (2,),
        "mlp_only_layers": ([0],),
        "rope_local_base_freq": (50.0,),
        "swiglu_limit": (1.0,),
        "swiglu_alpha": (3.0,),
        "num_experts_per_tok": (1,),
        "sliding_window": (5, 40, None),
        "pretraining_tp": (2,),
    }.items() for value in values},
    "a part of a head, in the table": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "another theta": {"rope_parameters": {**ROPE, "rope_theta": 100.0}},
    "linear": {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_parameters": YARN},
    "yarn with a factor": {"rope_parameters": {**YARN, "attention_factor": 1.5}},
    "yarn with scales": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "yarn with bounds": {"rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0}},
    "a window that is used": USED,
    "a window in all layers": {**USED, "max_window_layers": 0},
    "a window in none": {**USED, "max_window_layers": 2},
    "a window from the second layer on": {**USED, "max_window_layers": 1},
    "layers of two kinds": {**USED, "layer_types": [SLIDING, FULL]},
    "and all of them said to be full": {
        **USED, "layer_types": [SLIDING, FULL], "max_window_layers": 2
    },
    "the other way round": {**USED, "layer_types": [FULL, SLIDING]},
    "full layers": {**WINDOW, "layer_types": [FULL, FULL]},
    "full layers and a window in use": {**USED, "layer_types": [FULL, FULL]},
    "sliding layers": {**WINDOW, "layer_types": [SLIDING, SLIDING]},
    "a temperature": {"llama_4_scaling": {"original_max_position_embeddings": 4, "beta": 0.5}},
}  # fmt: skip
MOST = 1e-3


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("deepseek")])
def test_what_is_refused_differs_and_what_is_admitted_agrees(family: str) -> None:
    program = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.vllm_twin", family], cwd=ROOT,
        input=json.dumps(VARIED), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert program.returncode == 0, program.stderr[-2000:]
    answers = {each.pop("name"): each for each in map(json.loads, program.stdout.splitlines())}
    assert answers.keys() == VARIED.keys()
    assert answers["as it is"].get("difference", 1.0) < MOST
    silent = {
        name: answer
        for name, answer in answers.items()
        if not answer.get("refusal", "-") and not answer.get("difference", 0.0) < MOST
    }
    assert not silent, "vLLM computes another model, and nobody says so"
    needless = {
        name: answer
        for name, answer in answers.items()
        if answer.get("refusal") and answer.get("difference", 1.0) < MOST
    }
    assert not needless, "refused, and computed alike"
