from __future__ import annotations

import re

import pytest
from dialoop.chat import History, Message
from dialoop.errors import AlreadyExists, InvalidInput, NotFound
from dialoop.templates.declared_parser import TemplateParser
from dialoop.templates.masks import encode_conversation
from dialoop.templates.registry import TemplateRegistry
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_extras.compat import names as compat

from tests.goldens.samples import LLAMA, SPECIAL, golden_tokenizer

PLAIN = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}|{% endfor %}"
HELLO = History.from_chats(
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]
)


def parse_llama_text(text: str) -> History:
    messages: list[Message] = []
    pattern = r"<s>\[INST\]\s*(.*?)\s*\[/INST\]\s*(.*?)</s>"
    for question, answer in re.findall(pattern, text, re.DOTALL):
        messages.append(Message(role="user", content=question.strip()))
        messages.append(Message(role="assistant", content=answer.strip()))
    return History(tuple(messages))


def tokenizer(name: str = "", chat_template: str | None = None) -> Tokenizer:
    engine = golden_tokenizer()
    engine.add_special_tokens(["<s>", "</s>"])
    config = {**SPECIAL, "name_or_path": name, "chat_template": chat_template}
    return Tokenizer(engine, engine.__class__.from_str(engine.to_str()), config)


def test_the_document_s_llama_example_renders_masks_and_reads_back():
    """The reference finds its built-in parser first, and masks `</s>` and the opening's blank."""
    registry = TemplateRegistry()
    info = registry.add_chat_template(
        "llama", LLAMA, parse_llama_text, ["llama", "meta-llama"], replace=True
    )
    assert (info.version, info.invertible) == (2, True)
    ours = tokenizer("meta-llama/Llama-2-7b-chat-hf")
    template = registry.choose(ours)
    for opens in (True, False):
        encoded = encode_conversation(template, ours, HELLO, add_generation_prompt=opens)
        assert ours.decode(encoded.token_ids[encoded.assistant_mask].tolist()) == "Hi there!"
        ended = encode_conversation(
            template, ours, HELLO, include_eos=True, add_generation_prompt=opens
        )
        assert ours.decode(ended.token_ids[ended.assistant_mask].tolist()) == "Hi there!</s>"
    text = HELLO.apply_chat_template(ours, registry=registry, add_generation_prompt=False)
    assert History.from_text(text, ours, registry=registry) == HELLO
    same = TemplateRegistry()
    compat.add_chat_template(same, "llama", LLAMA, parse_llama_text, ["llama"])
    assert same.info("llama").digest == info.digest


def test_registering_the_same_again_changes_nothing():
    registry = TemplateRegistry()
    first = registry.add_chat_template("plain", PLAIN)
    assert registry.add_chat_template("plain", PLAIN) == first
    assert first.version == 1


@pytest.mark.parametrize("name", ["plain", "qwen", "chatml_format"])
def test_other_content_under_a_name_is_a_conflict_unless_it_replaces(name):
    registry = TemplateRegistry()
    registry.add_chat_template("plain", PLAIN)
    with pytest.raises(AlreadyExists) as caught:
        registry.add_chat_template(name, PLAIN + " ")
    assert caught.value.reason == "TEMPLATE_CONFLICT"
    assert registry.add_chat_template(name, PLAIN + " ", replace=True).version == 2


def test_a_registry_leaves_others_as_they_are():
    TemplateRegistry().add_chat_template("plain", PLAIN)
    with pytest.raises(NotFound) as caught:
        TemplateRegistry().get("plain")
    assert caught.value.reason == "TEMPLATE_NOT_FOUND"


@pytest.mark.parametrize(
    "source", ["{{ messages }}", "{% generation %}", "{% for %}", "x" * (1 << 19)]
)
def test_a_template_that_shows_no_generation_or_does_not_parse_is_refused(source):
    with pytest.raises(InvalidInput) as caught:
        TemplateRegistry().add_chat_template("bad", source)
    assert caught.value.reason == "TEMPLATE_INVALID"


@pytest.mark.parametrize("name", ["", "a/b", "n" * 200])
def test_a_name_that_no_path_can_carry_is_refused(name):
    with pytest.raises(InvalidInput):
        TemplateRegistry().add_chat_template(name, PLAIN)


@pytest.mark.parametrize(
    "spelling", ["{% generation %}", "{%- generation %}", "{%- generation -%}", "{%generation%}"]
)
def test_every_spelling_of_a_generation_block_is_accepted(spelling):
    """The reference accepts only the first."""
    source = (
        f"{{% for m in messages %}}{spelling}{{{{ m.content }}}}{{% endgeneration %}}{{% endfor %}}"
    )
    assert TemplateRegistry().add_chat_template("plain", source).version == 1


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/Qwen2.5-0.5B", "qwen"),
        ("tiiuae/falcon-7b-instruct", "falcon"),
        ("deepseek-ai/deepseek-coder-6.7b-base", "deepseek"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek"),  # the reference says qwen
        ("microsoft/DialoGPT-medium", "dialogpt"),
        ("meta-llama/Llama-4-Scout", "llama"),
        ("facebook/opt-125m", "chatml"),
        ("", "chatml"),
    ],
)
def test_a_tokenizer_without_a_template_gets_its_family_s(name, family):
    assert TemplateRegistry().choose(tokenizer(name)).name == family


def test_the_order_of_choice_is_source_name_own_custom_family():
    registry = TemplateRegistry()
    registry.add_chat_template("mine", PLAIN, model_family_keywords=["QWEN"])
    own = tokenizer("Qwen/Qwen3", chat_template="own {{ messages | length }}")
    assert (
        registry.choose(own, chat_template="given", chat_template_name="falcon").source == "given"
    )
    assert registry.choose(own, chat_template_name="falcon").name == "falcon"
    assert registry.choose(own).source == "own {{ messages | length }}"
    assert registry.choose(tokenizer("Qwen/Qwen3")).name == "mine"
    assert TemplateRegistry().choose(tokenizer("Qwen/Qwen3")).name == "qwen"


def test_the_own_template_renders_and_parses_or_neither_direction_pretends():
    own = tokenizer(
        "Qwen/Qwen3", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    text = HELLO.apply_chat_template(own)
    with pytest.raises(Exception, match="has no parser to read it back"):
        History.from_text(text, own)


def test_the_list_has_every_name_once_with_digest_and_version():
    registry = TemplateRegistry()
    parser = TemplateParser(message_pattern=r"(?P<role>)(?P<content>.*?)\|")
    registry.add_chat_template("plain", PLAIN, parser)
    infos = {info.name: info for info in registry.list()}
    names = {"chatml", "qwen", "falcon", "deepseek", "llama", "dialogpt", "plain"}
    assert infos.keys() == names
    assert len({info.digest for info in infos.values()}) == len(names)
    assert [name for name, info in infos.items() if not info.invertible] == ["dialogpt"]
