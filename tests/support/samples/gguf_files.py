"""Small Llamas in GGUF files, as llama.cpp writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from dialoop_learning.model.tiny import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEADS, KEY_HEADS = 4, 2


def llama(
    *, tied: bool = True, num_positions: int = 128, initializer_range: float = 0.02
) -> LlamaForCausalLM:
    """Return a Llama of two small layers with seeded random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_tokenizer().get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=num_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and weights as llama.cpp has them: halves of queries and keys are interleaved."""
    yield "token_embd.weight", model.model.embed_tokens.weight.detach().numpy()
    yield "output_norm.weight", model.model.norm.weight.detach().numpy()
    if not model.config.tie_word_embeddings:
        yield "output.weight", model.lm_head.weight.detach().numpy()
    for number, layer in enumerate(model.model.layers):
        for name, weight in layer.state_dict().items():
            stem = name.removesuffix(".weight")
            array = weight.numpy()
            if stem in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = HEADS if stem.endswith("q_proj") else KEY_HEADS
                halves = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
                array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
            yield f"blk.{number}.{BLOCK[stem]}.weight", array


def write(
    path: Path,
    model: LlamaForCausalLM,
    *,
    template: str,
    architecture: str = "llama",
    splits: str = "gpt-2",
) -> Path:
    """Write the model with the tiny tokenizer and a chat template, and return the path."""
    made = json.loads(tiny_tokenizer().to_str())
    added = {token["id"]: token["content"] for token in made["added_tokens"]}
    words = {number: word for word, number in made["model"]["vocab"].items()} | added
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list([words[number] for number in range(len(words))])
    kinds = [3 if number in added else 1 for number in range(len(words))]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in made["model"]["merges"]])
    ends = {text: number for number, text in added.items()}
    writer.add_eos_token_id(ends["<|im_end|>"])
    writer.add_bos_token_id(ends["<|im_start|>"])
    writer.add_chat_template(template)
    for name, array in tensors(model):
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
