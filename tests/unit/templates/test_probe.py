"""What templates are found to do: published ones, and ones that raise, loop or write nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialoop.chat import History, Message, ToolCall
from dialoop.errors import InvalidInput
from dialoop.templates.chat_template import ChatTemplate, ended_as_written
from dialoop.templates.confinement import TemplateConfinement, TemplateLimits
from dialoop.templates.probe import DROPPED, KEPT, REFUSED, TemplateProfile, turn_ends
from dialoop.testing import byte_tokenizer
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_ops.cli.main import main
from transformers import PreTrainedTokenizerFast

from tests.support.families import FAMILIES, family

ASK = Message(role="user", content="one?")


def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_directory(family(name).directory)


def profile_of(name: str) -> TemplateProfile:
    return ChatTemplate.of(tokenizer_of(name)).profile


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_is_the_one_that_the_family_reads(name: str) -> None:
    reads, profile = family(name).reads, profile_of(name)
    form = profile.form
    assert (profile["call.name"].verdict == KEPT) == reads.calls
    if reads.calls:
        assert form.arguments_as_text == (reads.arguments == "text")
        assert form.no_content == reads.content_of_calls
        assert form.call_ids == reads.call_ids or name == "mistral"
    if reads.tools:
        assert profile["tools, name"].verdict == KEPT


def test_a_tokenizer_ends_turns_as_its_template_does_or_else_as_its_files_say() -> None:
    plain = tokenizer_of("qwen2_5_base")
    ended = ended_as_written(plain)
    texts = [ended.decode([token]) for token in ended.end_of_turn_ids]
    assert texts == ["<|im_end|>", "<|endoftext|>"]
    bare = byte_tokenizer()
    without = Tokenizer(bare._trusting, bare._literal, {"eos_token": "<|im_end|>"})
    assert ended_as_written(without) is without


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_template_ends_turns_as_its_checkpoint_stops(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ends = turn_ends(ChatTemplate.of(tokenizer).profile, tokenizer)
    written = {tokenizer.decode([token]) for token in (ends.answer, ends.call) if token is not None}
    assert written
    # The files of a base model with a chat template name another end.
    assert written <= {*family(name).ends, *(["<|im_end|>"] if name == "qwen2_5_base" else [])}


@pytest.mark.parametrize(
    ("name", "field", "verdict"),
    [
        ("deepseek_v3", "mark of a later call", DROPPED),
        ("qwen3", "mark of a later call", KEPT),
        ("mistral", "mark of a later call", KEPT),
        ("qwen3", "reasoning", KEPT),
        ("qwen3", "reasoning, later", DROPPED),
        ("qwen2_5", "reasoning", DROPPED),
        ("gemma", "system", REFUSED),
        ("phi3", "tool answer", DROPPED),
        ("gpt_oss", "several calls", DROPPED),
        ("llama3_1", "several calls", REFUSED),
        ("llama3_1", "content of a call", DROPPED),
        ("deepseek_v3", "tools, name", DROPPED),
        ("kimi_k2", "call.name", KEPT),
    ],
)
def test_what_a_published_template_does_is_told(name: str, field: str, verdict: str) -> None:
    assert profile_of(name)[field].verdict == verdict


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', '{"city":  "Oslo"}'])
def test_arguments_that_a_template_joins_to_text_are_given_as_text(arguments: str) -> None:
    """verl-project/verl 7664: DeepSeek's template adds them with `+`."""
    call = ToolCall(id="c", name="lookup", arguments_json=arguments)
    history = History((ASK, Message(role="assistant", tool_calls=(call,))))
    template = ChatTemplate.of(tokenizer_of("deepseek_v3_1"))
    assert arguments in template.render(history)


def test_a_thought_before_a_call_is_given_under_the_templates_own_name() -> None:
    """ggml-org/llama.cpp 19701: gpt-oss's template reads `thinking`."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chats = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "", "thinking": "I need f.", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
    ]
    history = History.from_chats(chats)
    assert history[1].reasoning == "I need f."
    text = ChatTemplate.of(tokenizer_of("gpt_oss")).render(history)
    assert "analysis<|message|>I need f.<|end|>" in text


@pytest.mark.parametrize("include_eos", [True, False])
def test_masks_of_thoughts_and_calls_are_what_the_assistant_wrote(include_eos: bool) -> None:
    """verl-project/verl 7807, OpenRLHF 1080: no newline behind the end, no opening of the next."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chain = History.from_chats(
        [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "c"},
            {"role": "assistant", "content": "seven", "reasoning_content": "ah"},
        ]
    )
    encoded = chain.apply_chat_template(
        PreTrainedTokenizerFast.from_pretrained(family("qwen3").directory),
        add_generation_prompt=False,
        return_assistant_tokens_mask=True,
        include_eos=include_eos,
    )
    masked = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    end = "<|im_end|>" if include_eos else ""
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    first = f"<think>\nhm\n</think>\n\n{called}{end}"
    assert tokenizer_of("qwen3").decode(masked) == f"{first}<think>\nah\n</think>\n\nseven{end}"


def test_ids_of_calls_are_as_the_template_wants_them_and_answers_follow_them() -> None:
    calls = tuple(
        ToolCall(id=f"call_{n}_of_a_long_id", name=name, arguments_json="{}")
        for n, name in enumerate(("f", "g"))
    )
    answer = Message(role="tool", content="7", tool_call_id=calls[1].id)
    history = History((ASK, Message(role="assistant", tool_calls=calls), answer))
    text = ChatTemplate.of(tokenizer_of("kimi_k2")).render(history)
    assert "functions.f:0" in text
    assert text.count("functions.g:1") == 2
    assert ChatTemplate.of(tokenizer_of("mistral")).render(history).count("_of_a_long_id") == 0


def test_a_template_that_loops_is_stopped_once() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    confinement = TemplateConfinement(TemplateLimits(time_s=0.2))
    template = ChatTemplate(source, make_renderer=confinement.renderer)
    with pytest.raises(InvalidInput) as caught:
        _ = template.profile
    assert caught.value.reason == "TEMPLATE_LIMIT"
    confinement.close()


def test_the_command_prints_a_table_and_refuses_a_model_without_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "check", str(family("gpt_oss").directory)]) == 0
    shown = capsys.readouterr().out
    assert "calls: harmony" in shown
    assert "ends of turn: <|return|> <|call|>" in shown
    (tmp_path / "tokenizer.json").write_bytes(
        (family("gpt_oss").directory / "tokenizer.json").read_bytes()
    )
    assert main(["model", "check", str(tmp_path)]) == 2
    assert "has no chat template" in capsys.readouterr().err
