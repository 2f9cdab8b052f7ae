"""Checkpoints that a job cannot train are named by the preflight, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop_learning.model.checkpoint import require_whole
from dialoop_ops.stack import preflight
from dialoop_services.config.job import JobConfig
from safetensors.torch import load_file, save_file

from benchmarks.servers.families import FAMILIES, make_family

NORM = "model.norm.weight"
EXTRA = "model.extra.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_family("qwen3", tmp_path / "model")


def change_tensors(model: Path, *, drop: str = "", **added: torch.Tensor) -> None:
    path = model / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file({**tensors, **added}, path, metadata={"format": "pt"})


def change_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), encoding="utf-8")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_checkpoint_of_each_family_passes(name: str, tmp_path: Path) -> None:
    require_whole(make_family(name, tmp_path / name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": NORM}, f"it lacks {NORM}."),
        ({EXTRA: torch.zeros(2)}, f"has no place for: {EXTRA}."),
        ({NORM: torch.zeros(3)}, f"it holds in another shape {NORM}."),
        ({"drop": NORM, EXTRA: torch.zeros(2)}, f"it lacks {NORM}; it holds what"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(
    change: dict[str, object], words: str, model: Path
) -> None:
    change_tensors(model, **change)
    with pytest.raises(InvalidConfig) as caught:
        require_whole(model)
    assert caught.value.reason == "MODEL_TENSORS_DIFFER"
    assert words in caught.value.message


def test_experts_of_unequal_shapes_are_named(tmp_path: Path) -> None:
    model = make_family("qwen3_moe", tmp_path / "model")
    change_tensors(model, **{"model.layers.0.mlp.experts.1.down_proj.weight": torch.zeros(3, 3)})
    with pytest.raises(InvalidConfig) as caught:
        require_whole(model)
    assert caught.value.reason == "MODEL_TENSORS_DIFFER"


def test_the_tensors_of_a_quantized_checkpoint_are_left_to_its_quantizer(model: Path) -> None:
    change_tensors(model, drop=NORM)
    change_json(model / "config.json", quantization_config={"quant_method": "mxfp4"})
    require_whole(model)


@pytest.mark.parametrize(
    ("model_type", "words"), [("mamba9", "mamba9"), ("vit", "no causal language model")]
)
def test_an_architecture_that_transformers_cannot_build_is_named(
    model_type: str, words: str, model: Path
) -> None:
    change_json(model / "config.json", model_type=model_type)
    with pytest.raises(InvalidConfig) as caught:
        require_whole(model)
    assert caught.value.reason == "MODEL_UNKNOWN"
    assert words in caught.value.message


def test_config_check_looks_at_the_checkpoint_and_says_what_is_wrong_with_it(model: Path) -> None:
    config = JobConfig.model_validate(
        {"engine": "transformers", "store": "memory", "model": {"directory": str(model)}}
    )
    change_tensors(model, drop=NORM)
    (mistake,) = preflight.mistakes_in(config)
    assert mistake.reason == "MODEL_TENSORS_DIFFER"
    assert NORM in mistake.message
    assert "save_pretrained" in mistake.remedy


def test_a_tokenizer_with_more_ids_than_the_model_embeds_is_refused(model: Path) -> None:
    preflight.check_model(model)
    rows = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
    change_json(model / "config.json", vocab_size=rows - 1)
    with pytest.raises(
        InvalidConfig, match=f"has {rows} ids, and the model embeds {rows - 1}"
    ) as c:
        preflight.check_model(model)
    assert c.value.reason == "TOKENIZER_LARGER"


def test_a_template_without_the_assistants_words_is_refused(model: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    change_json(model / "tokenizer_config.json", chat_template=template)
    with pytest.raises(InvalidConfig, match="without the assistant's words") as caught:
        preflight.check_model(model)
    assert caught.value.reason == "TEMPLATE_HIDES_ANSWERS"


@pytest.mark.parametrize(
    ("fields", "mebibytes"),
    [
        ({}, 32),  # 2 * 4 layers * 2 heads * 128 * 4 bytes * 4096 tokens
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, 16),
        ({"head_dim": 256}, 64),
        ({"sliding_window": 64}, 0),
        ({"kv_lora_rank": 16}, 0),
    ],
)
def test_a_row_that_has_no_room_in_vllms_cache_is_refused_with_what_it_needs(
    fields: dict[str, object], mebibytes: int
) -> None:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    model_config = {**shape, "hidden_size": 512, **fields}

    def check(kv_cache_mib: int) -> None:
        inference = {"max_model_len": 4096, "kv_cache_mib": kv_cache_mib}
        config = JobConfig.model_validate({"engine": "vllm", "inference": inference})
        preflight._check_cache(config, model_config)

    check(max(1, mebibytes))
    if mebibytes:
        with pytest.raises(InvalidConfig, match=f"needs {mebibytes} MiB") as caught:
            check(mebibytes - 1)
        assert caught.value.reason == "ROW_LARGER_THAN_CACHE"
        assert f"kv_cache_mib to {mebibytes} or more" in caught.value.remedy
