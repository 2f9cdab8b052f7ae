"""Conversations through published chat templates: the same text and tokens as transformers'.

The expected side has the fields in the form that the template reads (`Reads`), so that a template
which wants arguments as text, or reasoning under another key, shows whether Dialoop knows it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jinja2
import pytest
from dialoop.chat import History, Message
from dialoop.errors import DialoopError, InvalidInput
from dialoop.messages import ContentPart
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.tokenizer import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.support.families import FAMILIES, family
from tests.support.families.conversations import chats_for, conversation_of, tool_dict

FEW, MANY = range(10), range(10, 310)
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError)
_TO_MEND = {
    "deepseek_v3_1": "Dialoop puts a thought beside calls, after the template's own `</think>`.",
}


def _families() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=_TO_MEND[name], strict=True))
        if name in _TO_MEND
        else name
        for name in FAMILIES
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_both_libraries_read_the_same_checkpoint(name):
    known = family(name)
    ours = Tokenizer.from_directory(known.directory)
    theirs = PreTrainedTokenizerFast.from_pretrained(known.directory)
    assert ours.chat_template == theirs.chat_template == known.template
    assert ours.vocab_size == len(theirs)
    for kind in ("bos_token", "eos_token", "pad_token"):
        assert ours.special_token(kind) == getattr(theirs, kind)
    ends = {theirs.eos_token, *known.ends}
    assert {ours.decode([number]) for number in ours.end_of_turn_ids} == ends
    assert all(ours.single_token(tag) is not None for tag in known.tags)


@pytest.mark.parametrize("name", _families())
def test_a_few_conversations_render_as_with_transformers(name):
    _compare(name, FEW)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_a_content_are_shown_as_their_text(name):
    """Some templates write a list as JSON or Python, and gemma3 the first part of a system's."""
    tokenizer = Tokenizer.from_directory(family(name).directory)
    template = ChatTemplate.of(tokenizer)
    parts = tuple(ContentPart(type="text", text=text) for text in ("three", "four"))
    num_rendered = 0
    for role in ("system", "user", "assistant", "tool"):
        texts = []
        for content in ("threefour", parts):
            asked = Message(role="user", content="one?")
            said = Message(role=role, content=content)
            history = History((said, asked) if role == "system" else (asked, said))
            with contextlib.suppress(InvalidInput):
                texts.append("".join(template.render(history).split()))  # gemma4 writes blanks
        num_rendered += len(texts)
        assert len(set(texts)) <= 1, role
    assert num_rendered >= 2


@pytest.mark.heavy(reason="300 conversations for each family")
@pytest.mark.parametrize("name", _families())
def test_many_conversations_render_as_with_transformers(name):
    _compare(name, MANY)


def _compare(name: str, seeds: range) -> None:
    known = family(name)
    ours = Tokenizer.from_directory(known.directory)
    theirs = PreTrainedTokenizerFast.from_pretrained(known.directory)
    num_rendered = 0
    for seed in seeds:
        conversation = conversation_of(known, seed)
        chats = chats_for(conversation.messages, known.reads)
        history = History(conversation.messages)
        for opens in (True, False):
            offered = conversation.tools and [tool_dict(tool) for tool in conversation.tools]
            options = {"tools": offered, "add_generation_prompt": opens}
            where = f"{name}, seed {seed}, add_generation_prompt={opens}"
            try:
                text = theirs.apply_chat_template(chats, tokenize=False, **options)
            except _REFUSALS:
                with pytest.raises(DialoopError):
                    history.apply_chat_template(ours, **options)
                continue
            num_rendered += 1
            options["tools"] = conversation.tools
            assert history.apply_chat_template(ours, **options) == text, where
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert history.apply_chat_template(ours, tokenize=True, **options) == ids, where
    assert num_rendered > len(seeds) // 2, "of two for each seed three quarters are refused"
