"""A config.json that vLLM and transformers read otherwise is refused before anything starts."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_learning.model.vllm_readings import READINGS, require_same_reading
from dialoop_ops.stack.preflight import mistakes_in
from dialoop_services.config.file import parse_config
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.vllm_engine.environment import prepare

from benchmarks.servers.families import (
    FAMILIES,
    VLLM_CPU_REFUSES,
    family_config,
    make_family,
)

SHARE = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
WINDOW = {"sliding_window": 32}
ALTERNATE = ["sliding_attention", "full_attention"]
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads wider than their share": ("qwen2", {"head_dim": 64}, "hidden_size / num_attention"),
    "heads narrower": ("qwen2_moe", {"head_dim": 16}, "hidden_size / num_attention"),
    "a part of a head": ("qwen3", {"partial_rotary_factor": 0.5}, "rotates a part"),
    "in a table": ("mistral", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates"),
    "in a layer's table": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
        "rotates",
    ),
    "a bias of the output": ("qwen3", {"attention_bias": True}, "bias of o_proj"),
    "a window in llama": ("llama", WINDOW, "follows the window"),
    "windows in some layers": (
        "qwen2",
        WINDOW | {"use_sliding_window": True, "layer_types": ALTERNATE},
        "some layers alone",
    ),
    "windows from a layer on": (
        "qwen3",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        "some layers alone",
    ),
    "one window for layers of two kinds": ("phi3", WINDOW | {"layer_types": ALTERNATE}, "alone"),
    "layers out of turn": (
        "gpt_oss",
        WINDOW | {"layer_types": ALTERNATE[::-1]},
        "every other layer",
    ),
    "another epsilon": ("gpt_oss", {"rms_norm_eps": 1e-6}, "as with 1e-05"),
    "another activation": ("qwen3_moe", {"hidden_act": "gelu"}, "as with 'silu'"),
    "attention to both sides": ("gemma3_text", {"use_bidirectional_attention": True}, "follows"),
}
ADMITTED: dict[str, tuple[str, dict[str, Any]]] = {
    "the share, said": ("qwen2", {"head_dim": 32}),
    "no width": ("qwen2", {"head_dim": None}),
    "wide heads where vLLM reads them": ("qwen3", {"head_dim": 64}),
    "a window that is off": ("qwen2", WINDOW | {"use_sliding_window": False}),
    "a window that is long enough": ("llama", {"sliding_window": 128}),
    "a window everywhere": ("mistral", WINDOW),
    "a whole head": ("llama", {"partial_rotary_factor": 1.0}),
    "a family that nobody compared": ("falcon", {"head_dim": 64}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_vllm_reads_otherwise_is_refused_with_what_it_does(what: str) -> None:
    model_type, fields, instead = REFUSED[what]
    with pytest.raises(InvalidConfig, match=instead) as caught:
        require_same_reading(
            SHARE | {"model_type": model_type} | fields, longest=128, where="models/mine"
        )
    assert caught.value.reason is Reason.MODEL_READ_OTHERWISE
    assert "models/mine" in caught.value.message
    assert 'engine = "transformers"' in caught.value.remedy


@pytest.mark.parametrize("what", ADMITTED)
def test_what_both_read_alike_is_admitted(what: str) -> None:
    model_type, fields = ADMITTED[what]
    require_same_reading(SHARE | {"model_type": model_type} | fields, longest=128, where="m")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_docs_is_admitted_as_it_is_saved(name: str, tmp_path: Path) -> None:
    fields = json.loads((make_family(name, tmp_path) / "config.json").read_text())
    require_same_reading(fields, longest=512, where=name)
    assert fields["model_type"] in READINGS or name in {
        *VLLM_CPU_REFUSES, "phi2", "olmo2", "olmo3", "smollm3",  # as transformers' own code
    }  # fmt: skip


def test_a_model_that_is_made_leaves_its_family_as_it_was() -> None:
    """transformers writes into the tables that it is given."""
    before = deepcopy(FAMILIES["llama3"].fields)
    family_config("llama3", {"partial_rotary_factor": 0.5})
    assert FAMILIES["llama3"].fields == before


def test_the_preflight_says_so_for_vllm_alone(tmp_path: Path) -> None:
    """Before, it was found at the first publish, after the warm start."""
    directory = make_family("qwen2", tmp_path, fields={"head_dim": 16})

    def reasons(engine: str) -> set[Any]:
        values = {"engine": engine, "model": {"directory": str(directory)}}
        return {each.reason for each in mistakes_in(parse_config(values, source="job.toml"))}

    assert Reason.MODEL_READ_OTHERWISE in reasons("vllm")
    assert Reason.MODEL_READ_OTHERWISE not in reasons("transformers")


async def test_a_replica_that_is_started_by_hand_says_so_too(tmp_path: Path) -> None:
    prepare()
    pytest.importorskip("vllm")
    from dialoop_services.inference.vllm_engine.options import engine_args

    directory = make_family("qwen2", tmp_path, fields={"head_dim": 16})
    with pytest.raises(InvalidConfig, match="head_dim = 16") as caught:
        engine_args(directory, EngineOptions(max_model_len=64))
    assert caught.value.reason is Reason.MODEL_READ_OTHERWISE
