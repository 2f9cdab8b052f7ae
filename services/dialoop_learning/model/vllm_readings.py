"""Fields of a config.json that vLLM and transformers read otherwise, family by family.

Trainer and reference compute a model as transformers does. Where vLLM ignores a field that
transformers follows, or follows one that transformers ignores, it samples from another model under
the same name, without an error. Compared with vLLM 0.32 by its own code
(`tests/parity/inference/test_vllm_readings.py`); a family that is not here agrees, or was not
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

_Fields = Mapping[str, Any]
_OFF = (None, False, 0)
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """One field, whether a config and the longest row are read alike, and what vLLM does if not."""

    name: str
    agrees: Callable[[_Fields, int], bool]
    instead: str


def require_same_reading(fields: _Fields, *, longest: int, where: str) -> None:
    """Raise InvalidConfig (MODEL_READ_OTHERWISE) where vLLM would compute another model.

    fields: of config.json, or of its part about text. longest: tokens of the longest row; a sliding
    window that is not shorter changes nothing. where: how a message names the model.
    """
    for reading in READINGS.get(str(fields.get("model_type")), ()):
        if not reading.agrees(fields, longest):
            value = fields.get(reading.name)
            stands = "" if value is None else f" has {reading.name} = {value!r:.60}, and"
            raise InvalidConfig(
                f"config.json of {where}{stands or ':'} {reading.instead}, which is not what "
                "transformers does and the trainer trains.",
                reason=Reason.MODEL_READ_OTHERWISE,
                remedy='Set engine = "transformers", or take a model without that.',
            )


def _only(name: str, *values: Any) -> _Reading:
    """Return a field that vLLM takes for the first of these values, whatever it says."""
    instead = f"vLLM computes as with {values[0]!r}, whatever {name} says"
    return _Reading(
        name=name, agrees=lambda fields, _: fields.get(name) in (None, *values), instead=instead
    )


def _foreign(name: str, *values: Any) -> _Reading:
    """Return a field that vLLM follows, and transformers ignores in this family."""
    harmless = values or _OFF
    return _Reading(
        name=name,
        agrees=lambda fields, _: fields.get(name) in (None, *harmless),
        instead=f"vLLM follows {name} in this family",
    )


def _window(fields: _Fields, longest: int) -> int:
    """Return a window that cuts the longest row; 0 where none does."""
    window = fields.get("sliding_window") or 0
    return int(window) if window < longest else 0


def _is_whole_head_rotated(fields: _Fields, _: int) -> bool:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    of_layers = [table for table in rope.values() if isinstance(table, dict)]
    tables = [fields, *(of_layers or [rope])]
    return all(table.get("partial_rotary_factor") in (None, 1) for table in tables)


def _is_head_dim_the_share(fields: _Fields, _: int) -> bool:
    width = fields.get("head_dim")
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    return width is None or not (heads and hidden) or width == hidden // heads


def _are_layers_alike(fields: _Fields, longest: int) -> bool:
    """Say whether all layers have the window, or none: vLLM's Qwen has one for all of them."""
    if not fields.get("use_sliding_window") or not _window(
        {"sliding_window": 4096} | dict(fields), longest
    ):
        return True
    num_layers = int(fields.get("num_hidden_layers") or 0)
    first = int(fields.get("max_window_layers", 28))
    kinds = fields.get("layer_types") or [
        _SLIDING if layer >= first else _FULL for layer in range(num_layers)
    ]
    return len(set(kinds)) < 2


def _is_every_layer_sliding(fields: _Fields, longest: int) -> bool:
    """Say whether transformers' one window for all layers is vLLM's, which follows layer_types."""
    if not _window(fields, longest) or fields.get("use_sliding_window") is False:
        return True
    return set(fields.get("layer_types") or [_SLIDING]) == {_SLIDING}


def _does_it_alternate(fields: _Fields, longest: int) -> bool:
    kinds = fields.get("layer_types")
    if not kinds or not _window({"sliding_window": 128} | dict(fields), longest):
        return True
    alternating = [_FULL if layer % 2 else _SLIDING for layer in range(len(kinds))]
    return kinds in (alternating, [_SLIDING] * len(kinds))


_HEAD_DIM = _Reading(
    name="head_dim",
    agrees=_is_head_dim_the_share,
    instead="vLLM computes heads of hidden_size / num_attention_heads numbers, whatever it says",
)
_ROTATED = _Reading(
    name="partial_rotary_factor",
    agrees=_is_whole_head_rotated,
    instead="vLLM rotates a part of each head by partial_rotary_factor",
)
_IGNORED_WINDOW = _Reading(
    name="sliding_window",
    agrees=lambda fields, longest: (
        not _window(fields, longest) or set(fields.get("layer_types") or [_SLIDING]) != {_SLIDING}
    ),
    instead="vLLM follows the window, shorter than max_model_len",
)
_IGNORED_WINDOWS = replace(
    _IGNORED_WINDOW,
    agrees=lambda fields, longest: (
        not _window(fields, longest) or set(fields.get("layer_types") or ()) == {_FULL}
    ),
)
_LAYERS_ALIKE = _Reading(
    name="layer_types",
    agrees=_are_layers_alike,
    instead="vLLM has no sliding window for some layers alone in this family",
)
_ONE_WINDOW = _Reading(
    name="layer_types",
    agrees=_is_every_layer_sliding,
    instead="vLLM has the sliding window in some layers alone",
)
_BIASES = tuple(map(_foreign, ("attention_bias", "mlp_bias", "bias", "qkv_bias")))
_OUTPUT_BIAS = _Reading(
    name="attention_bias",
    agrees=lambda fields, _: not fields.get("attention_bias"),
    instead="vLLM leaves out the bias of o_proj",
)
_SCALE = _foreign("logit_scale", 1)
_SILU = _only("hidden_act", "silu", "swish")

READINGS: Mapping[str, tuple[_Reading, ...]] = {
    "qwen2": (_HEAD_DIM, _ROTATED, _LAYERS_ALIKE),
    "qwen3": (_ROTATED, _OUTPUT_BIAS, _LAYERS_ALIKE),
    "llama": (_ROTATED, _IGNORED_WINDOWS, *_BIASES[2:], _SCALE),
    "mistral": (_ROTATED, *_BIASES, _SCALE, _foreign("llama_4_scaling")),
    "gemma2": (_ROTATED,),
    "gemma3_text": (_ROTATED, _foreign("use_bidirectional_attention")),
    "phi3": (*_BIASES, _SCALE, _ONE_WINDOW),
    "glm4": (_IGNORED_WINDOW,),
    "granite": (_ROTATED, _IGNORED_WINDOW, _foreign("bias"), _SCALE),
    "gpt_oss": (
        _only("rms_norm_eps", 1e-5),
        _only("swiglu_limit", 7.0),
        _only("swiglu_alpha", 1.702),
        _only("attention_bias", True),
        _only("tie_word_embeddings", False),
        _Reading(
            name="layer_types",
            agrees=_does_it_alternate,
            instead="vLLM has the sliding window in every other layer",
        ),
    ),
    "qwen3_moe": (_ROTATED, _OUTPUT_BIAS, _SILU, _ONE_WINDOW),
    "qwen2_moe": (
        _HEAD_DIM,
        _ROTATED,
        _only("qkv_bias", True),
        _Reading(
            name="use_sliding_window",
            agrees=lambda fields, longest: (
                fields.get("max_window_layers") == 0
                or len(set(fields.get("layer_types") or ())) == 1
                or not fields.get("use_sliding_window")
                or not _window({"sliding_window": 4096} | dict(fields), longest)
            ),
            instead="vLLM has no sliding window for some layers alone in this family",
        ),
    ),
    "mixtral": (_ROTATED, _SILU, _ONE_WINDOW),
    "gemma": (
        _ROTATED,
        _IGNORED_WINDOW,
        _only("attention_bias", False),
        _only("hidden_act", "gelu_pytorch_tanh", "gelu"),
    ),
    "granitemoe": (
        _HEAD_DIM,
        _ROTATED,
        _SILU,
        _IGNORED_WINDOW,
        _only("attention_bias", False),
    ),
    "olmoe": (
        _ROTATED,
        _SILU,
        _IGNORED_WINDOW,
        _only("rms_norm_eps", 1e-5),
        _only("attention_bias", False),
        _only("norm_topk_prob", False),
        _only("clip_qkv", None),
        _only("tie_word_embeddings", False),
    ),
}
"""model_type -> what has to be looked at."""
