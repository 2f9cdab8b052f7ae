"""What `config check` says of a 7B and a 70B model before anything starts, beside the goldens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialoop_ops.stack.commands import _device_lines, _estimates
from dialoop_services.config.file import load_with_origins

ROOT = Path(__file__).parents[4]
GOLDENS = ROOT / "tests" / "goldens"
SHAPES: dict[str, dict[str, Any]] = {
    "7b": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "70b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def write_headers(directory: Path, fields: dict[str, Any]) -> None:
    """A model whose weights are a hole in the file: only headers are read."""
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    keys = hidden // fields["num_attention_heads"] * fields["num_key_value_heads"]
    of_layer = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        **{f"self_attn.{name}_proj": [hidden, hidden] for name in ("q", "o")},
        **{f"self_attn.{name}_proj": [keys, hidden] for name in ("k", "v")},
        **{f"mlp.{name}_proj": [inner, hidden] for name in ("gate", "up")},
        "mlp.down_proj": [hidden, inner],
    }
    shapes = {
        "lm_head.weight": [fields["vocab_size"], hidden],
        "model.embed_tokens.weight": [fields["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(fields["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in of_layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    directory.mkdir(parents=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {**fields, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", SHAPES)
def test_the_plan_of_a_large_model_is_as_before_and_as_the_docs_say(
    name: str, tmp_path: Path
) -> None:
    write_headers(tmp_path / "models" / name, SHAPES[name])
    job = (GOLDENS / f"plan_{name}.toml").read_text("utf-8")
    (tmp_path / "job.toml").write_text(job)
    loaded = load_with_origins(tmp_path / "job.toml", environment={})
    lines = [*_device_lines(loaded.config), *_estimates(loaded)[0]]
    said = "".join(f"{line}\n" for line in lines)
    assert said == (GOLDENS / f"plan_{name}.txt").read_text("utf-8")
    page = (ROOT / "docs" / "scale.md").read_text("utf-8")
    assert job in page
    assert said.partition("mesh ")[2] in page
