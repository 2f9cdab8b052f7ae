"""Our named templates against what torchrl 0.14 makes of the same conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dialoop.chat import History
from dialoop.errors import Unsupported
from dialoop.templates.masks import encode_conversation
from dialoop.templates.registry import TemplateRegistry
from dialoop.tokens.tokenizer import Tokenizer

from tests.goldens.samples import CONVERSATIONS, SPECIAL, TOOLS, golden_tokenizer

GOLDENS = Path(__file__).parents[2] / "goldens"
NAMES = ("chatml", "qwen", "falcon", "deepseek", "llama", "dialogpt")
TOKENIZER = Tokenizer(golden_tokenizer(), golden_tokenizer(), dict(SPECIAL))
REGISTRY = TemplateRegistry()
# These formats have no words for tool messages and leave them out; torchrl does too.
WITHOUT_TOOLS = ("falcon", "deepseek", "dialogpt")


def template(name: str):
    return REGISTRY.choose(TOKENIZER, chat_template_name=name)


def rows(name: str):
    goldens = json.loads((GOLDENS / f"{name}.json").read_text("utf-8"))
    assert goldens["made_with"]["torchrl"].startswith("0.14.")
    for key, row in goldens["rows"].items():
        history = History.from_chats(CONVERSATIONS[key.partition("/")[0]])
        yield key, history, TOOLS if key.endswith("/tools") else None, row


def drops_calls(name: str, history: History) -> bool:
    return name != "qwen" and any(message.tool_calls for message in history)


@pytest.mark.parametrize("name", NAMES)
def test_renders_equal_the_reference_byte_for_byte(name):
    for key, history, tools, row in rows(name):
        if drops_calls(name, history):
            with pytest.raises(Unsupported, match="tool calls"):
                template(name).render(history)
            continue
        assert template(name).render(history, tools=tools) == row["opened"], key
        closed = template(name).render(history, tools=tools, add_generation_prompt=False)
        assert closed == row["closed"], key


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_equal_the_reference(name):
    for key, history, _, row in rows(name):
        if "ids" not in row or drops_calls(name, history):
            continue
        encoded = encode_conversation(
            template(name), TOKENIZER, history, add_generation_prompt=False
        )
        assert encoded.token_ids.tolist() == row["ids"], key
        if key == "ends_in_bytes":
            assert sum(row["mask"]) == encoded.assistant_mask.sum() - 3
            continue
        assert encoded.assistant_mask.astype(int).tolist() == row["mask"], key


@pytest.mark.parametrize("name", NAMES)
def test_the_mask_covers_every_byte_of_a_last_character(name):
    """Transformers marks only the first of the tokens that spell a content's last character."""
    history = History.from_chats(CONVERSATIONS["ends_in_bytes"])
    encoded = encode_conversation(template(name), TOKENIZER, history, add_generation_prompt=False)
    written = TOKENIZER.decode(encoded.token_ids[encoded.assistant_mask].tolist())
    assert written.strip() == "ok 🙂"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dialogpt"])
def test_what_was_rendered_reads_back_as_it_was(name):
    for key, history, tools, row in rows(name):
        if drops_calls(name, history) or key.startswith("responses"):
            continue  # tool_responses: no named template writes them as such
        if name in WITHOUT_TOOLS and key in ("tool", "two_tools", "system_later"):
            continue  # the format has no tool messages, and a system message only first
        assert History(template(name).parse(row["closed"])) == history, key
        encoded = encode_conversation(
            template(name), TOKENIZER, history, tools=tools, add_generation_prompt=False
        )
        assert History(template(name).parse_tokens(encoded.token_ids, TOKENIZER)) == history, key


def test_the_defects_of_the_reference_s_parsers_are_real_and_not_ours():
    """Falcon's raises; DeepSeek's keeps the eos_token and drops the system; others strip."""
    falcon = {key: row for key, _, _, row in rows("falcon")}
    assert {row.get("parse_raises") for row in falcon.values()} == {"RuntimeError"}
    deepseek = {key: row for key, _, _, row in rows("deepseek")}
    parsed = deepseek["two_turns"]["parsed"]
    assert [role for role, _, _ in parsed] == ["user", "assistant", "user", "assistant"]
    assert parsed[1][1].endswith("<|endoftext|>")
    for name in ("chatml", "qwen", "llama"):
        whitespace = {key: row for key, _, _, row in rows(name)}["whitespace"]["parsed"]
        assert not any(content.startswith("\n\nHi") for _, content, _ in whitespace)
    qwen = {key: row for key, _, _, row in rows("qwen")}["one_turn"]["parsed"]
    assert qwen[0][:2] == ["system", "You are a helpful assistant."]


def test_include_eos_adds_the_token_that_ends_each_turn_and_no_other():
    history = History.from_chats(CONVERSATIONS["empty_answer"])
    for name, end in (
        ("chatml", "<|im_end|>"),
        ("llama", "<|eot|>"),
        ("deepseek", "<|endoftext|>"),
    ):
        encoded = encode_conversation(
            template(name), TOKENIZER, history, add_generation_prompt=False, include_eos=True
        )
        written = TOKENIZER.decode(encoded.token_ids[encoded.assistant_mask].tolist())
        assert written.strip() == end


def test_the_opening_of_a_turn_is_never_in_the_mask():
    history = History.from_chats(CONVERSATIONS["two_turns"])
    for name in NAMES:
        opened = encode_conversation(template(name), TOKENIZER, history)
        closed = encode_conversation(
            template(name), TOKENIZER, history, add_generation_prompt=False
        )
        assert opened.assistant_mask.sum() == closed.assistant_mask.sum(), name
