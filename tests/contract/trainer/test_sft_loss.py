"""What SFT trains of calls, thoughts and weights: the tokens and the loss of plain transformers.

What is taught is written here by hand for each template. Everything else is the prompt, as
transformers' own `apply_chat_template` gives it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.chat import History
from dialoop.clients.trainer import Phase
from dialoop.errors import InvalidConfig
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_ops.stack.in_process import in_process
from dialoop_services.trainer.data.demonstrations import demonstration_set
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.servers.families import make_family
from tests.support.families import family
from tests.support.families.conversations import chats_for

NUMBER = {"type": "integer"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    },
}
CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "2+3?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I add.",
        "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "5", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "It is 6.", "weight": 0},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "It is 5.", "reasoning_content": "No.", "weight": 1},
]
"""A call with a thought, a wrong answer that is context, and an answer with a thought."""

_QWEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
_GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>"
)
_HARMONY = (
    '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}'
)
_BEGIN, _END, _CALLS, _CALLS_END, _SEP, _EOS = (
    f"<\uff5c{name}\uff5c>"
    for name in (
        *("tool\u2581call\u2581begin", "tool\u2581call\u2581end", "tool\u2581calls\u2581begin"),
        *("tool\u2581calls\u2581end", "tool\u2581sep", "end\u2581of\u2581sentence"),
    )
)
_FENCED = f'{_BEGIN}function{_SEP}add\n```json\n{{"a": 2, "b": 3}}\n```{_END}'

TAUGHT: dict[str, tuple[str, list[dict[int, str]]]] = {
    "qwen2_5": ("qwen2", [{1: _QWEN, 5: "It is 5.<|im_end|>"}]),
    "qwen3": (
        "qwen3",
        [
            {1: f"<think>\nI add.\n</think>\n\n{_QWEN}"},
            {5: "<think>\nNo.\n</think>\n\nIt is 5.<|im_end|>"},
        ],
    ),
    "llama3_1": (
        "llama3",
        [
            {
                1: '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>',
                5: "It is 5.<|eot_id|>",
            }
        ],
    ),
    "glm4_5": (
        "glm4",
        [{1: f"\n<think>I add.</think>\n{_GLM}"}, {5: "\n<think>No.</think>\nIt is 5.<|user|>"}],
    ),
    "gpt_oss": (
        "gpt_oss",
        [
            {1: f"<|channel|>analysis<|message|>I add.<|end|>{_HARMONY}<|call|>"},
            {
                5: "<|channel|>analysis<|message|>No.<|end|>"
                "<|start|>assistant<|channel|>final<|message|>It is 5.<|return|>"
            },
        ],
    ),
    "deepseek_v3": (
        "deepseek_v3",
        [
            {
                1: f"I add.\n</think>\n\n{_CALLS}{_FENCED}{_CALLS_END}{_EOS}",
                5: f"No.\n</think>\n\nIt is 5.{_EOS}",
            }
        ],
    ),
    "deepseek_v3_1": (
        "deepseek_v3",
        [
            {
                1: f'{_CALLS}{_BEGIN}add{_SEP}{{"a": 2, "b": 3}}{_END}{_CALLS_END}{_EOS}',
                5: f"It is 5.{_EOS}",
            }
        ],
    ),
}
"""The kind of model, and what each sequence teaches, by message: a hidden thought begins one."""


def model_of(name: str, path: Path) -> Path:
    """A tiny model of the family's kind, with its tokenizer and template."""
    directory = family(name).directory
    size = Tokenizer.from_directory(directory).vocab_size
    fields = {"vocab_size": size, "max_position_embeddings": 2048}
    make_family(TAUGHT[name][0], path / name, fields=fields)
    return shutil.copytree(directory, path / name, dirs_exist_ok=True)


def conversation_for(name: str) -> dict[str, Any]:
    """The conversation with what the family's template can show."""
    reads = family(name).reads
    hidden = set() if reads.reasoning else {"reasoning_content"}
    chats = [{k: v for k, v in chat.items() if k not in hidden} for chat in CHAT]
    return {"messages": chats, "tools": [ADD]} if reads.tools else {"messages": chats}


def expected_rows(name: str, row: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """Ids and mask of each sequence, by transformers and what is written above."""
    known = family(name)
    theirs = PreTrainedTokenizerFast.from_pretrained(known.directory)
    bare = [{k: v for k, v in chat.items() if k != "weight"} for chat in row["messages"]]
    chats = chats_for(History.from_chats(bare), known.reads)
    options = {"tools": row.get("tools"), "tokenize": False}
    rows = []
    for taught in TAUGHT[name][1]:
        last = max(taught)
        prompt = theirs.apply_chat_template(chats[:last], add_generation_prompt=True, **options)
        text, at = prompt + taught[last], 0
        encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [False] * len(encoded["input_ids"])
        for own in taught.values():
            start = text.index(own, at)
            at = start + len(own)
            for place, (char, _) in enumerate(encoded["offset_mapping"]):
                mask[place] |= start <= char < at
        rows.append((encoded["input_ids"], mask))
    return rows


@torch.no_grad()
def plain_loss(directory: Path, rows: list[tuple[list[int], list[bool]]]) -> float:
    """The mean over all taught tokens, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    taught = []
    for ids, mask in rows:
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        taught.append(own[torch.tensor(mask[1:])])
    return -float(torch.cat(taught).mean())


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize("name", TAUGHT)
def test_a_file_of_calls_thoughts_and_weights_trains_what_transformers_renders(
    name: str, tmp_path: Path
) -> None:
    directory, row = model_of(name, tmp_path), conversation_for(name)
    sft = {"file": str(write(tmp_path / "chats.jsonl", row)), "heldout_fraction": 0.0}
    settings = TrainerSettings(model_dir=directory, mode="sft", sft=sft, max_row_tokens=4096)
    tokenizer = Tokenizer.from_directory(directory)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    sequences = demonstration_set(settings, builder).batch(0)
    expected = expected_rows(name, row)
    assert [(s.token_ids.tolist(), s.response_mask().tolist()) for s in sequences] == expected
    learner = Learner(settings)
    loss = learner.sft_step(learner.rows_to_imitate(sequences)).loss
    assert loss == pytest.approx(plain_loss(directory, expected), abs=1e-5)


async def test_a_job_trains_the_calls_of_its_file(tmp_path: Path) -> None:
    """The same through `[sft] file`: two lines in one step, as metrics.jsonl has it."""
    directory, row = model_of("qwen3", tmp_path), conversation_for("qwen3")
    short = {**row, "messages": row["messages"][:2]}
    config = {
        "run": "calls",
        "model": {"directory": str(directory)},
        "train": {"mode": "sft", "num_steps": 1, "max_row_tokens": 4096},
        "sft": {
            "file": str(write(tmp_path / "chats.jsonl", row, short)),
            "batch_size": 2,
            "heldout_fraction": 0.0,
        },
        "evaluation": {"num_tasks": 0, "every": 0},
    }
    both = expected_rows("qwen3", row)
    rows = [*both, both[0]]
    loss = plain_loss(directory, rows)
    async with in_process(config, folder=tmp_path) as dialoop, asyncio.timeout(60):
        while (await dialoop.trainer.get_status()).phase is not Phase.DONE:
            await asyncio.sleep(0.05)
    lines = (tmp_path / "calls" / "metrics.jsonl").read_text("utf-8").splitlines()
    (step,) = (line for line in map(json.loads, lines) if line["kind"] == "train")
    assert step["num_trained_tokens"] == sum(sum(mask) for _, mask in rows)
    assert step["loss"] == pytest.approx(loss, abs=1e-5)


def test_tools_that_the_template_does_not_show_are_refused_by_line(tmp_path: Path) -> None:
    row = {**conversation_for("deepseek_v3"), "tools": [ADD]}
    directory = family("deepseek_v3").directory
    sft = {"file": str(write(tmp_path / "chats.jsonl", row)), "heldout_fraction": 0.0}
    settings = TrainerSettings(model_dir=directory, mode="sft", sft=sft)
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(InvalidConfig, match=r"line 1.*the chat template shows none") as caught:
        demonstration_set(settings, TokenBuilder(tokenizer, ChatTemplate.of(tokenizer)))
    assert caught.value.reason == "TOOLS_UNSUPPORTED"
