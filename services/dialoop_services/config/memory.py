"""What the processes of a job need, by a formula that is stated here: memory, bytes, products.

shape = ModelShape.of(fields_of_config_json, num_parameters=596_049_920)
training_memory(shape, Training(num_tokens=4096, ...)).total          # bytes of the trainer

The trainer, in bytes. P are the parameters, Pt those that are trained, b the bytes of a parameter,
T the tokens of the longest row, L layers, H their width, Q and K the widths of all queries and of
all keys, I the inner width (of all experts that a token uses), V the vocabulary:

    weights       P b; with autocast 2 P more of its casts, with activation_checkpointing 2 W
    optimiser     2 Pt b
    backward      T L (6 H + 5 Q + 4 K + 4 I) a, where a are the bytes of an activation, b or, with
                  autocast, 3 on average; with activation_checkpointing
                  T L H a + T (6 H + 5 Q + 4 K + 4 I) a instead; and 3 T I a of gradients on the way
    head          2 T H b + 2 chunks of logits + what is kept of probabilities; V H (4 + b) of a
                  head that is trained: its gradients; V H b of one that is not, on a CPU: the copy
                  that the products' library makes of a constant matrix in an order of its own. It
                  is gone before the layers' backward pass, so only the larger of it and of what
                  they need beside what was kept (T (...) a and 3 T I a) counts; of a model of fewer
                  than LARGE_MODEL parameters both, as glibc keeps what its layers freed
    gradients     Pt b + 3 V H b, the second for the embedding's gradient before it is added to the
                  head's, and what AdamW computes of the largest matrix beside its state
    gathered      3 W + 2 V H b where n processes share the model, which divides weights, optimiser
                  and Pt b by n: a layer W that computes, the next one, its gradients, and embedding
                  and head, which stay whole from the forward to the backward pass
    checkpoint    3 Pt b / n on a CPU where n processes share the model: each writes its part from a
                  copy, beside the next step
    process       what Python and torch take

Gradients grow while activations go, so the larger of "backward + head" and "gradients" counts. In
an update of several rows the first row's gradients, Pt b, lie beside the next row's backward pass.

An engine, in bytes: process + P b + keys and values + with vLLM on a CPU V H b for a tied head,
which it keeps packed for its products beside the embedding + with the transformers engine P b of
the next policy, where adapters are published: it is added to the base before sampling pauses.

Files that a process has mapped do not count, such as its libraries and a checkpoint that it reads:
the system takes their pages back where it needs memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dialoop_services.config.engines import NUMBERS_OF_EXPERTS

BYTES_OF: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
"""Bytes of a number."""
LARGE_MODEL = 50_000_000
"""Trainers of so many parameters or more map each large tensor by itself, so that its memory goes
back to the system when it is freed."""
PROCESS_BYTES = 560 << 20
"""What Python, torch and transformers take in one process before it has a model."""
VLLM_BYTES = 1460 << 20
"""What vLLM takes in its two processes before it has a model, on a CPU."""
_KEPT_BYTES = 256 << 20  # learning.model.logprobs keeps so many bytes of probabilities
_CACHED_LOGITS, _LEAST_ROWS = 1 << 20, 128  # of its chunks on a CPU
_LOGITS_AT_ONCE = 2
_MATRICES_AT_ONCE = 3
_FLOAT32, _AUTOCAST = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder.

    queries, keys: widths over all heads. inner: of the MLP, or of all experts that one token uses.
    num_active: parameters that one token is multiplied with.
    """

    num_parameters: int
    num_active: int
    vocab_size: int
    hidden: int
    layers: int
    queries: int
    keys: int
    inner: int

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, num_parameters: int) -> ModelShape | None:
        """Return the shape that a config.json describes; None for one without these fields.

        Latent attention counts with the widths that its heads compute with.
        """
        try:
            hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
            layers, vocab_size = int(fields["num_hidden_layers"]), int(fields["vocab_size"])
            width = int(fields.get("head_dim") or hidden // heads)
            if "kv_lora_rank" in fields:
                width = int(fields["qk_nope_head_dim"]) + int(fields["qk_rope_head_dim"])
            kv_heads = int(fields.get("num_key_value_heads") or heads)
            inner = int(fields["intermediate_size"])
        except (KeyError, TypeError, ValueError):
            return None
        num_active = num_parameters
        experts = next((fields[name] for name in NUMBERS_OF_EXPERTS if fields.get(name)), 0)
        used = int(fields.get("num_experts_per_tok") or 0)
        if experts and used:
            of_expert = int(fields.get("moe_intermediate_size") or inner)
            unused = (int(experts) - used) * 3 * hidden * of_expert * layers
            num_active = max(num_parameters - unused, num_parameters // 100)
            inner = used * of_expert
        return cls(
            num_parameters=num_parameters,
            num_active=num_active,
            vocab_size=vocab_size,
            hidden=hidden,
            layers=layers,
            queries=heads * width,
            keys=kv_heads * width,
            inner=inner,
        )

    @property
    def numbers_of_a_layer(self) -> int:
        """Return the activations of one token that one layer keeps for the backward pass."""
        return 6 * self.hidden + 5 * self.queries + 4 * self.keys + 4 * self.inner

    @property
    def parameters_of_a_layer(self) -> int:
        """Return the mean number of parameters of one layer."""
        return max(0, self.num_parameters - self.vocab_size * self.hidden) // self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained. num_tokens: of the longest packed row, on one process.

    num_processes: among which one copy of the model is divided. num_trained: parameters that are
    trained, all of them or those of adapters; None: all. num_rows: packed rows of an update.
    """

    num_tokens: int
    num_rows: int = 1
    dtype: str = "float32"
    autocast: str = ""
    num_trained: int | None = None
    recomputes: bool = False
    num_processes: int = 1
    is_cpu: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes by what they are for; `total` is their sum."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Return all bytes."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        terms = ((name, size / 2**30) for name, size in self.parts.items() if size)
        return " + ".join(f"{size:.2f} {name}" for name, size in terms)


def training_memory(shape: ModelShape, training: Training) -> Parts:
    """Return the memory of one process of the trainer at its peak, as the formula above has it."""
    each = BYTES_OF[training.dtype]
    share = training.num_processes
    trains_head = training.num_trained is None
    num_trained = shape.num_parameters if trains_head else training.num_trained or 0
    of_head = shape.vocab_size * shape.hidden if trains_head else 0
    summed = num_trained * each // share
    backward = _activations(shape, training) + _head(shape, training, of_head)
    backward += summed if training.num_rows > 1 else 0
    gradients = summed + _MATRICES_AT_ONCE * of_head * each
    largest = "backward" if backward > gradients else "gradients"
    whole = 3 * shape.parameters_of_a_layer + 2 * shape.vocab_size * shape.hidden
    return Parts(
        parts={
            "process": PROCESS_BYTES,
            "weights": shape.num_parameters * each // share,
            "optimiser": 2 * num_trained * each // share,
            "gathered": whole * each if share > 1 else 0,
            "checkpoint": 3 * num_trained * each // share if share > 1 and training.is_cpu else 0,
            largest: max(backward, gradients),
        }
    )


def _activations(shape: ModelShape, training: Training) -> int:
    each = BYTES_OF[training.dtype]
    if training.autocast and training.dtype == "float32":
        each = _AUTOCAST  # norms stay in float32
    of_layer = training.num_tokens * shape.numbers_of_a_layer * each
    on_the_way = 3 * training.num_tokens * shape.inner * each
    is_constant = training.num_trained is not None and training.is_cpu
    ordered = shape.vocab_size * shape.hidden * each if is_constant else 0
    is_returned = shape.num_parameters >= LARGE_MODEL
    halves = 0
    if training.autocast and training.dtype == "float32":  # the backward pass needs weights as cast
        halves = 2 * shape.parameters_of_a_layer * (1 if training.recomputes else shape.layers)
    if training.recomputes:
        kept = training.num_tokens * shape.layers * shape.hidden * each
        in_turn = of_layer + on_the_way
    else:
        kept, in_turn = shape.layers * of_layer, on_the_way
    return kept + (max(in_turn, ordered) if is_returned else in_turn + ordered) + halves


def _head(shape: ModelShape, training: Training, of_head: int) -> int:
    each = BYTES_OF[training.dtype]
    rows = max(_LEAST_ROWS, _CACHED_LOGITS // shape.vocab_size) if training.is_cpu else 1024
    rows = min(rows, training.num_tokens)
    logits = _LOGITS_AT_ONCE * rows * shape.vocab_size * _FLOAT32
    states = 2 * training.num_tokens * shape.hidden * each
    return logits + _KEPT_BYTES + states + of_head * (_FLOAT32 + each)


def engine_memory(
    shape: ModelShape,
    *,
    process: int,
    dtype: str,
    key_bytes: int,
    num_devices: int = 1,
    packs_head: bool = False,
) -> Parts:
    """Return the memory of an engine that samples or scores, as the formula above has it."""
    head = shape.vocab_size * shape.hidden * BYTES_OF[dtype] if packs_head else 0
    return Parts(
        parts={
            "process": process,
            "weights": shape.num_parameters * BYTES_OF[dtype] // num_devices,
            "packed head": head,
            "keys and values": key_bytes,
        }
    )


def key_bytes(shape: ModelShape, *, dtype: str, num_tokens: int) -> int:
    """Return the bytes of keys and values of so many tokens: 2 L K for each."""
    return 2 * shape.layers * shape.keys * BYTES_OF[dtype] * num_tokens


def training_products(shape: ModelShape, training: Training) -> float:
    """Return the floating-point operations of one pass forward and backward over a row.

    6 for each parameter and token, and 12 Q for each pair of a token and one before it and layer;
    a third more with recomputation. A frozen model has no products for gradients of its weights.
    """
    tokens = training.num_tokens
    factor = 6 if training.num_trained is None else 4
    factor += 2 if training.recomputes else 0
    pairs = tokens * tokens / 2
    return factor * (shape.num_active * tokens + 2 * shape.layers * shape.queries * pairs)
