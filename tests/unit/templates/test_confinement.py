"""Templates that nobody trusts run in a process with limits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from dialoop.chat import History, Message
from dialoop.errors import AlreadyExists, CapacityExhausted, InvalidInput
from dialoop.templates import registry as registry_module
from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.confinement import MAX_TEXT, TemplateConfinement, TemplateLimits
from dialoop.templates.declared_parser import MAX_PATTERN, TemplateParser
from dialoop.templates.registry import TemplateRegistry, named_template

BLOCK = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
TIME_S = 0.5
HISTORY = History(
    (
        Message(role="system", content="s"),
        Message(role="user", content="1+2 \U0001f600"),
        Message(role="assistant", content="3"),
    )
)
PARSER = TemplateParser(message_pattern=r"\[(?P<role>\w+)\](?P<content>.*?)(?:\[/\]|$)")


@pytest.fixture(scope="module")
def confinement() -> Iterator[TemplateConfinement]:
    limits = TemplateLimits(time_s=TIME_S, max_memory_bytes=128 << 20, max_processes=1)
    confinement = TemplateConfinement(limits)
    yield confinement
    confinement.close()


@pytest.fixture
def registry(confinement: TemplateConfinement) -> TemplateRegistry:
    return TemplateRegistry(confinement)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 1000000000 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x'.ljust(5000000) }}",
    ],
)
def test_a_source_without_bound_is_refused_within_the_limit(registry, source):
    begin = time.monotonic()
    with pytest.raises(InvalidInput) as caught:
        registry.add_chat_template("evil", source + BLOCK)
    assert caught.value.reason == "TEMPLATE_LIMIT"
    assert "Register one that does less" in caught.value.remedy
    assert time.monotonic() - begin < 10 * TIME_S
    assert not registry.is_confined("evil")  # nothing was registered


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "TEMPLATE_INVALID"),
        ("{% if %}", "TEMPLATE_INVALID"),
        ("plain", "TEMPLATE_INVALID"),
    ],
)
def test_a_source_that_does_not_compile_is_invalid(registry, source, reason):
    with pytest.raises(InvalidInput) as caught:
        registry.add_chat_template("bad", source if source == "plain" else source + BLOCK)
    assert caught.value.reason == reason


def test_a_source_that_recurses_is_refused_when_it_renders(registry):
    source = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}" + BLOCK
    registry.add_chat_template("deep", source)
    with pytest.raises(InvalidInput) as caught:
        registry.get("deep").render(HISTORY)
    assert caught.value.reason == "TEMPLATE_REFUSED"
    with pytest.raises(InvalidInput) as caught:
        ChatTemplate(source).render(HISTORY)  # a trusted one too
    assert caught.value.reason == "TEMPLATE_REFUSED"


def test_a_template_that_turns_slow_later_is_stopped_when_it_renders(registry):
    source = "{% if messages | length > 1 %}{{ 9 ** (9 ** messages | length ** 9) }}{% endif %}"
    registry.add_chat_template("later", source + BLOCK, PARSER)
    with pytest.raises(InvalidInput) as caught:
        registry.get("later").render(HISTORY)
    assert caught.value.reason == "TEMPLATE_LIMIT"
    assert registry.get("later").render(HISTORY.messages[:1]) == "s"  # the next process answers


def test_a_text_beyond_the_limit_is_refused(registry):
    source = "{{ 'x' * (messages | length - 1) * " + str(MAX_TEXT) + " }}" + BLOCK
    registry.add_chat_template("long", source)
    with pytest.raises(InvalidInput) as caught:
        registry.get("long").render(HISTORY)
    assert caught.value.reason == "TEMPLATE_LIMIT"


def test_a_confined_template_writes_masks_and_reads_back_as_in_this_process(registry):
    source = named_template("qwen").source + "{# mine #}"
    info = registry.add_chat_template("mine", source)
    assert info.invertible
    theirs, ours = registry.get("mine"), ChatTemplate(source)
    assert theirs.render_blocks(HISTORY) == ours.render_blocks(HISTORY)
    text = ours.render(HISTORY, add_generation_prompt=False)
    assert theirs.parse(text) == ours.parse(text)
    options = {"continue_final_message": True}
    assert theirs.render(HISTORY, **options) == ours.render(HISTORY, **options)
    assert registry.add_chat_template("mine", source).version == 1  # the same again


def test_a_pattern_that_backtracks_for_ever_is_stopped(registry):
    pattern = r"(?P<role>x)(?P<content>(a+)+)$"
    source = "{{ 'x' }}" + BLOCK
    registry.add_chat_template("slow", source, TemplateParser(message_pattern=pattern))
    with pytest.raises(InvalidInput) as caught:
        registry.get("slow").parse("x" + "a" * 60 + "b")
    assert caught.value.reason == "TEMPLATE_LIMIT"
    registry.add_chat_template("slow", source, TemplateParser(message_pattern=pattern))
    with pytest.raises(AlreadyExists):
        registry.add_chat_template("slow", source, PARSER)


def test_a_confined_parser_says_what_its_pattern_does_not_read(registry):
    registry.add_chat_template("pipes", "[{{ 1 }}]" + BLOCK, PARSER)
    assert registry.get("pipes").parse("[user]hi[/]") == PARSER.parse("[user]hi[/]", {})
    with pytest.raises(InvalidInput) as caught:
        registry.get("pipes").parse("nothing")
    assert caught.value.reason == "NOT_PARSEABLE"


@pytest.mark.parametrize(
    "pattern", ["(" * 4000, r"x{1,99999999999999}", "(?P<role>x)" * MAX_PATTERN, "("]
)
def test_a_pattern_that_does_not_compile_is_invalid(pattern):
    with pytest.raises(InvalidInput) as caught:
        TemplateParser(message_pattern=pattern)
    assert caught.value.reason == "TEMPLATE_INVALID"


def test_a_pattern_that_compiles_for_ever_is_stopped(registry):
    pattern = "(?i)(?P<role>x)(?P<content>y)" + "[\x00-\uffff]" * 800
    with pytest.raises(InvalidInput) as caught:
        registry.require_compilable(pattern)
    assert caught.value.reason == "TEMPLATE_LIMIT"
    registry.require_compilable(PARSER.message_pattern)
    with pytest.raises(InvalidInput) as caught:
        registry.require_compilable("(")
    assert caught.value.reason == "TEMPLATE_INVALID"


def test_a_template_that_writes_no_text_is_refused(registry):
    registry.add_chat_template("surrogate", "{{ '\\ud800' }}" + BLOCK)
    with pytest.raises(InvalidInput) as caught:
        registry.get("surrogate").render(HISTORY)
    assert caught.value.reason == "TEMPLATE_REFUSED"


def test_the_process_has_no_variables_of_this_one(confinement, monkeypatch):
    monkeypatch.setenv("DIALOOP_TOKEN", "secret")
    call = TemplateConfinement(TemplateLimits(max_processes=1))
    call.require_renderable(BLOCK)
    (process,) = call._call._idle
    with open(f"/proc/{process._process.pid}/environ", "rb") as file:  # noqa: PTH123
        assert b"secret" not in file.read()
    pid = process._process.pid
    call.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_registry_holds_so_many_templates(registry, monkeypatch):
    monkeypatch.setattr(registry_module, "MAX_TEMPLATES", 1)
    registry.add_chat_template("a", BLOCK)
    with pytest.raises(CapacityExhausted):
        registry.add_chat_template("b", BLOCK)
    registry.add_chat_template("a", BLOCK + " ", replace=True)
