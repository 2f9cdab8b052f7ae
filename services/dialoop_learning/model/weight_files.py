"""The safetensors files that hold a model's weights, as its index names them, read without torch.

weight_files(directory)     # those that transformers and vLLM load, nothing that lies beside them
model_shapes(directory)     # {"model.embed_tokens.weight": (32000, 2048), ...}
is_tied(directory)          # whether the head is the embedding

Only headers are read, and the bytes of a head that config.json calls the embedding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason

Shapes = dict[str, tuple[int, ...]]

WEIGHTS, INDEX, HEAD = "model.safetensors", "model.safetensors.index.json", "lm_head.weight"
ADAPTER_CONFIG = "adapter_config.json"
_MAX_HEADER_BYTES, _CHUNK = 100_000_000, 1 << 24
_MAX_NAMED = 3
_LLAMAS = ("llama", "mistral", "granite", "smollm3")
_KNOWN = (*_LLAMAS, "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "olmo3", "phi3")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the files of a model directory: those that its index names, else model.safetensors.

    Raises InvalidConfig: NO_WEIGHTS, MODEL_IS_ADAPTER, MODEL_INCOMPLETE for a file that the index
    names in vain, MODEL_TENSORS_DIFFER where nothing says which of several files are the model.
    """
    if (model_dir / ADAPTER_CONFIG).is_file():
        raise _is_adapter(model_dir)
    present = {file.name for file in model_dir.glob("*.safetensors")}
    if (model_dir / INDEX).is_file():
        named = set(_index_of(model_dir).values())
        if absent := named - present:
            raise InvalidConfig(
                f"{INDEX} in {model_dir} names files that are not there: {some_of(absent)}.",
                reason=Reason.MODEL_INCOMPLETE,
                remedy="Copy or download them, or save the model with save_pretrained.",
            )
        # transformers would load this file, and vLLM those of the index.
        if WEIGHTS in present - named:
            raise _unclear(model_dir, f"it holds {WEIGHTS}, and {INDEX} names other files")
        return tuple(model_dir / name for name in sorted(named))
    if not present:
        raise InvalidConfig(
            f"{model_dir} holds no .safetensors file.",
            reason=Reason.NO_WEIGHTS,
            remedy="Save the model with save_pretrained.",
        )
    if present != {WEIGHTS}:  # vLLM would load them all
        raise _unclear(model_dir, f"it holds {some_of(present)}, and no {INDEX}")
    return (model_dir / WEIGHTS,)


def read_shapes(path: Path) -> Shapes:
    """Return the name and shape of every tensor of a safetensors file."""
    return {name: tuple(tensor["shape"]) for name, tensor in read_header(path).tensors.items()}


def model_shapes(model_dir: Path) -> Shapes:
    """Return the name and shape of every tensor of a model directory (one file or shards).

    Raises InvalidConfig (MODEL_TENSORS_DIFFER) where files and index say different things.
    """
    places: dict[str, str] = {}
    shapes: Shapes = {}
    for file in weight_files(model_dir):
        own = read_shapes(file)
        if twice := own.keys() & places.keys():
            name = min(twice)
            raise _unclear(model_dir, f"both {places[name]} and {file.name} hold {name}")
        places |= dict.fromkeys(own, file.name)
        shapes |= own
    index = _index_of(model_dir) if (model_dir / INDEX).is_file() else places
    if differing := dict(index.items() ^ places.items()):
        raise _unclear(model_dir, f"{INDEX} and its files differ in {some_of(differing)}")
    return shapes


def num_parameters(model_dir: Path) -> int:
    """Return how many numbers the model's parameters hold; tied ones count once."""
    tied = is_tied(model_dir)
    shapes = model_shapes(model_dir)
    return sum(math.prod(shape) for name, shape in shapes.items() if not (tied and name == HEAD))


def is_tied(model_dir: Path) -> bool:
    """Return whether the output head shares the input embedding's weight, as engines load it.

    Raises InvalidConfig (MODEL_TENSORS_DIFFER) where config.json says so and the files hold a head
    of other values: transformers would train that one, and vLLM serve the embedding.
    """
    fields: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    text = fields.get("text_config") or {}
    says = fields.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if HEAD not in model_shapes(model_dir):
        return says is None or bool(says)
    if says is None:
        says = _class_ties(model_dir)
    if says and not _is_embedding(model_dir):
        raise InvalidConfig(
            f"tie_word_embeddings is true in config.json of {model_dir}, and its files hold "
            f"{HEAD} with other values than the embedding's.",
            reason=Reason.MODEL_TENSORS_DIFFER,
            remedy="Set tie_word_embeddings to false in config.json to keep that head, or save the "
            f"model without {HEAD}.",
        )
    return bool(says)


def holds_known_decoder(model_dir: Path) -> bool:
    """Return whether the files hold just what config.json of a decoder of `_KNOWN` has.

    False says nothing: it may be another architecture, of which transformers knows the tensors.
    Raises InvalidConfig as `is_tied`.
    """
    fields: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    kind = str(fields.get("model_type"))
    changed = ("quantization_config", "attention_bias", "mlp_bias", "pruned_heads")
    if kind not in _KNOWN or any(map(fields.get, changed)):
        return False
    try:
        vocab, hidden, inner, layers, heads, key_heads = (int(fields[name]) for name in _SIZES)
        own = kind in ("qwen3", "gemma2", "gemma3_text")  # else the class has another default
        width = int(fields["head_dim"] if own else fields.get("head_dim") or hidden // heads)
    except (KeyError, TypeError, ValueError):
        return False
    of_layer = _layer_of(kind, hidden=hidden, inner=inner, heads=(heads, key_heads), width=width)
    expected: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(layers):
        expected |= {f"model.layers.{number}.{name}": shape for name, shape in of_layer.items()}
    shapes, tied = model_shapes(model_dir), is_tied(model_dir)
    if not tied or HEAD in shapes:
        expected[HEAD] = (vocab, hidden)
    return shapes == expected


def _layer_of(kind: str, *, hidden: int, inner: int, heads: tuple[int, int], width: int) -> Shapes:
    """Return the tensors of a layer; heads: those of queries, and those of keys and values."""
    queries, keys = (number * width for number in heads)
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    gates = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    of_heads: Shapes = {}
    if kind == "phi3":
        attention = {"qkv_proj": (queries + 2 * keys, hidden)}
        gates = {"gate_up_proj": (2 * inner, hidden)}
    if kind == "qwen2":
        of_heads = {f"{name}.bias": (rows,) for name, (rows, _) in attention.items()}
    if kind in ("qwen3", "gemma3_text"):
        of_heads = {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    if kind.startswith("olmo"):
        of_heads = {"q_norm.weight": (queries,), "k_norm.weight": (keys,)}
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    if kind.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    attention |= {"o_proj": (hidden, queries)}
    gates |= {"down_proj": (hidden, inner)}
    return {
        **{f"{name}.weight": (hidden,) for name in norms},
        **{f"self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"self_attn.{name}": shape for name, shape in of_heads.items()},
        **{f"mlp.{name}.weight": shape for name, shape in gates.items()},
    }


def _class_ties(model_dir: Path) -> bool:
    """Return what the architecture says where config.json does not."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    return bool(getattr(config, "tie_word_embeddings", False))


def _is_embedding(model_dir: Path) -> bool:
    """Return whether another tensor, which is the embedding, has the bytes of the head."""
    stored = {
        name: (file, (entry["dtype"], entry["shape"]), entry["data_offsets"])
        for file in weight_files(model_dir)
        for name, entry in read_header(file).tensors.items()
    }
    file, kind, place = stored.pop(HEAD)
    head = _bytes_at(file, place)
    others = (_bytes_at(f, at) for f, its_kind, at in stored.values() if its_kind == kind)
    parts = range(0, len(head), _CHUNK)
    return any(
        all(np.array_equal(head[at : at + _CHUNK], other[at : at + _CHUNK]) for at in parts)
        for other in others
    )


def _bytes_at(file: Path, place: tuple[int, int]) -> np.ndarray:
    """Return the bytes of a tensor, as a map of its file."""
    start, end = place
    return np.memmap(file, np.uint8, "r", read_header(file).data_at + start, (end - start,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a safetensors file says of its tensors, in the order of their data, and of itself.

    data_at: where in the file the data of the first one begins.
    """

    tensors: dict[str, Any]
    metadata: dict[str, str]
    data_at: int


def read_header(path: Path) -> Header:
    """Read a safetensors file's header; raise PreconditionFailed where it has none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if 0 < size <= _MAX_HEADER_BYTES else None
        if not isinstance(header, dict):
            raise ValueError("no header")
        metadata = header.pop("__metadata__", None) or {}
        tensors: dict[str, Any] = {
            name: {
                "dtype": str(entry["dtype"]),
                "shape": [int(size) for size in entry["shape"]],
                "data_offsets": [int(offset) for offset in entry["data_offsets"]],
            }
            for name, entry in header.items()
        }
        ordered = sorted(tensors.items(), key=lambda item: item[1]["data_offsets"])
        return Header(tensors=dict(ordered), metadata=metadata, data_at=8 + size)
    except (ValueError, KeyError, TypeError) as error:
        raise PreconditionFailed(
            f"{path.name} is not a safetensors file.",
            reason=Reason.UNKNOWN_PARAMETERS,
            remedy="Publish with safetensors.torch.save_file.",
        ) from error


def _index_of(model_dir: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index has it."""
    try:
        places = json.loads((model_dir / INDEX).read_text("utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unclear(model_dir, f"{INDEX} has no weight_map of names and files") from error


def _is_adapter(model_dir: Path) -> InvalidConfig:
    try:
        fields = json.loads((model_dir / ADAPTER_CONFIG).read_text("utf-8"))
        base = str(fields["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError):
        base = "a model that it does not name"
    return InvalidConfig(
        f"{model_dir} holds an adapter ({ADAPTER_CONFIG}), trained on {base}, and a job starts "
        "from a whole model.",
        reason=Reason.MODEL_IS_ADAPTER,
        remedy="Merge it with PEFT's merge_and_unload and save_pretrained, or that of a run with "
        "`dialoop export --merged`, and name the new directory.",
    )


def _unclear(model_dir: Path, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"Which weights are the model's in {model_dir} is not clear: {why}.",
        reason=Reason.MODEL_TENSORS_DIFFER,
        remedy="Move what is not the model's elsewhere, or save the model anew with "
        "save_pretrained.",
    )


def some_of(names: Iterable[str]) -> str:
    """Return the first names of many in their order, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - _MAX_NAMED
    return ", ".join(ordered[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
