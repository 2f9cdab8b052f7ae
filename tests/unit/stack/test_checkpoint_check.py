"""Checkpoints that a job cannot train are named by the preflight, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dialoop.errors import InvalidConfig
from dialoop_learning.lora.base_weights import BaseWeights
from dialoop_learning.model.checkpoint import require_whole
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.weight_files import (
    INDEX,
    holds_known_decoder,
    is_tied,
    num_parameters,
)
from dialoop_learning.parallel.parallel_state import policy_tensors
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
    model = make_family(name, tmp_path / name)
    require_whole(model)
    asked = ("phi2", "glm4", "gpt_oss", "qwen3_moe", "deepseek_v2", "deepseek_v3")
    assert holds_known_decoder(model) is (name not in asked)


def test_a_known_decoder_is_checked_without_torch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*arguments: str, **options: str) -> None:
        raise AssertionError(f"a process with torch was asked {arguments}")

    monkeypatch.setattr(preflight, "_look", look)
    values = {"engine": "transformers", "store": "memory", "model": {"directory": str(model)}}
    preflight.check(JobConfig.model_validate(values))
    assert preflight.gflops_of_this_machine() > 0.1


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
    assert not holds_known_decoder(model)
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


def shard(model: Path) -> None:
    """Write the same model as two files and an index, as save_pretrained does."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{1 + (i > 3)}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == file}, model / file)
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def places_in(model: Path) -> dict[str, str]:
    return json.loads((model / INDEX).read_text("utf-8"))["weight_map"]


def head_of(model: Path, change: float) -> None:
    """Add a head, which is the embedding but for the first number."""
    head = load_file(model / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[0, 0] += change
    change_tensors(model, **{"lm_head.weight": head})


def index(**places: str | None) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        shard(model)
        changed = {**places_in(model), **{n.replace("__", "."): p for n, p in places.items()}}
        kept = {name: file for name, file in changed.items() if file is not None}
        (model / INDEX).write_text(json.dumps({"weight_map": kept}))

    return change


def beside(name: str, *, sharded: bool = False) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        if sharded:
            shard(model)
        save_file({"model.norm.weight": torch.zeros(2)}, model / name)

    return change


def torn(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def in_both_shards(model: Path) -> None:
    shard(model)
    file = model / next(f for n, f in places_in(model).items() if n != NORM)
    other = "model-1.safetensors" if places_in(model)[NORM] != "model-1.safetensors" else file.name
    save_file({**load_file(model / other), NORM: torch.zeros(2)}, model / other)


CONTRADICTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a head of its own under tied embeddings": (lambda m: head_of(m, 0.1), "lm_head.weight"),
    "no head and embeddings that are not tied": (
        lambda m: change_json(m / "config.json", tie_word_embeddings=False),
        "lm_head.weight",
    ),
    "a layer more in config.json": (
        lambda m: change_json(m / "config.json", num_hidden_layers=3, layer_types=None),
        "layers.2",
    ),
    "a layer fewer in config.json": (
        lambda m: change_json(m / "config.json", num_hidden_layers=1, layer_types=None),
        "layers.1",
    ),
    "another width in config.json": (
        lambda m: change_json(m / "config.json", hidden_size=96),
        "another shape",
    ),
    "an index with a file that is not there": (index(a__weight="model-3.safetensors"), "model-3"),
    "an index with a tensor in the wrong file": (
        index(model__norm__weight="model-1.safetensors"),
        NORM,
    ),
    "an index without a tensor": (index(model__norm__weight=None), NORM),
    "an index with a tensor that is nowhere": (index(a__weight="model-1.safetensors"), "a.weight"),
    "an index that is no index": (
        lambda m: (m / INDEX).write_text('{"weight_map": 3}') and None,
        "weight_map",
    ),
    "one tensor in two files": (in_both_shards, NORM),
    "model.safetensors beside an index of others": (
        beside("model.safetensors", sharded=True),
        "names other files",
    ),
    "two files and no index": (beside("consolidated.safetensors"), "consolidated"),
    "shards and no index": (
        lambda m: (shard(m), (m / INDEX).unlink())[1],
        "no model.safetensors.index",
    ),
    "an adapter in the folder": (
        lambda m: (m / "adapter_config.json").write_text("{}") and None,
        "adapter_config.json",
    ),
    "a torn file": (torn, ""),
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_a_checkpoint_that_contradicts_itself_is_refused_by_name(
    contradiction: str, model: Path
) -> None:
    change, words = CONTRADICTIONS[contradiction]
    change(model)
    with pytest.raises(InvalidConfig) as caught:
        require_whole(model)
    assert words in caught.value.message
    assert caught.value.remedy


def test_shards_are_those_of_the_index_whatever_lies_beside_them(model: Path) -> None:
    count = num_parameters(model)
    shard(model)
    save_file({"norm.weight": torch.zeros(64)}, model / "consolidated.safetensors")
    require_whole(model)
    assert num_parameters(model) == count
    assert [path.name for path in BaseWeights.of(model).files] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


@pytest.mark.parametrize("says", [True, None, False])
def test_a_copy_of_the_embedding_as_head_is_tied_where_the_config_says_so(
    says: bool | None, model: Path
) -> None:
    """As transformers loads it: where it is not tied, head and embedding are trained apart."""
    head_of(model, 0.0)
    fields = json.loads((model / "config.json").read_text("utf-8"))
    del fields["tie_word_embeddings"]
    fields |= {} if says is None else {"tie_word_embeddings": says}
    (model / "config.json").write_text(json.dumps(fields))
    policy = load_policy(model)
    assert is_tied(model) is policy.ties_head
    assert says is None or policy.ties_head is says
    assert ("lm_head.weight" in policy_tensors(policy)) is not policy.ties_head
    assert num_parameters(model) == sum(p.numel() for p in policy.parameters())


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
