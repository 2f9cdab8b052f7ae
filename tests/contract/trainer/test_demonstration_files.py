"""Lines of a demonstrations' file: tools, weights, and what is refused by line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import InvalidConfig
from dialoop.sequences import Source
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_services.trainer.data.demonstrations import demonstration_set, read_demonstrations
from dialoop_services.trainer.settings import TrainerSettings

from tests.support.families import family

ASK = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    file = path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def taught(file: Path, name: str) -> list[list[str]]:
    """The texts that each sequence of the set teaches."""
    directory = family(name).directory
    tokenizer = Tokenizer.from_directory(directory)
    sft = {"file": str(file), "heldout_fraction": 0.0}
    settings = TrainerSettings(model_dir=directory, run_dir=file.parent, mode="sft", sft=sft)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    (*sequences,) = demonstration_set(settings, builder).batch(0)
    return [
        [
            tokenizer.decode(sequence.token_ids[s.start : s.end].tolist())
            for s in sequence.segments
            if s.source is Source.MODEL
        ]
        for sequence in sequences
    ]


def test_a_call_and_its_thought_are_taught(tmp_path: Path) -> None:
    called = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I add.",
        "tool_calls": [CALL],
    }
    file = write(tmp_path, {"messages": [ASK, called], "tools": [TOOL]})
    text = (
        "<think>\nI add.\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    )
    assert taught(file, "qwen3") == [[text]]


def test_a_message_of_weight_0_is_context(tmp_path: Path) -> None:
    wrong = {"role": "assistant", "content": "5", "weight": 0}
    file = write(tmp_path, {"messages": [ASK, wrong, ASK, {**FOUR, "weight": 1}]})
    assert taught(file, "qwen2_5") == [["4<|im_end|>"]]


def test_each_thought_that_a_later_turn_hides_has_a_sequence_of_its_own(tmp_path: Path) -> None:
    thinking = [ASK, {**FOUR, "reasoning_content": "hm"}]
    file = write(tmp_path, {"messages": thinking * 2})
    answer = "<think>\nhm\n</think>\n\n4<|im_end|>"
    assert taught(file, "qwen3") == [[answer], [answer]]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({**FOUR, "reasoning_content": "hm"}, "leaves out the reasoning of message 1"),
        ({**FOUR, "tool_calls": [CALL]}, "the content of message 1"),
    ],
)
def test_what_the_template_hides_is_refused_by_line_and_field(
    tmp_path: Path, message: dict[str, Any], said: str
) -> None:
    file = write(tmp_path, {"messages": [ASK, FOUR]}, {"messages": [ASK, message]})
    with pytest.raises(InvalidConfig, match=r"line 2 of .* cannot be taught") as caught:
        taught(file, "llama3_1")
    assert said in caught.value.message
    assert caught.value.reason == "TEMPLATE_HIDES_ANSWERS"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{**ASK, "weight": 1}, FOUR]}, r"messages\[0\]\.weight is 1"),
        ({"messages": [ASK, {**FOUR, "weight": 0.5}]}, r"messages\[1\]\.weight is 0\.5"),
        ({"messages": [ASK, {**FOUR, "weight": 0}]}, "none of the assistant to learn from"),
        ({"messages": [ASK, {**FOUR, "wieght": 1}]}, "has a field 'wieght'"),
        ({"messages": [ASK, FOUR], "tools": {"a": 1}}, "column 'tools' is {'a': 1}"),
        ({"messages": [ASK, 4]}, "expected a message"),
    ],
)
def test_a_malformed_line_is_refused_by_line_and_field(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    file = write(tmp_path, {"messages": [ASK, FOUR]}, row)
    with pytest.raises(InvalidConfig, match=rf"line 2 of .*chats\.jsonl: .*{said}"):
        read_demonstrations(file)
