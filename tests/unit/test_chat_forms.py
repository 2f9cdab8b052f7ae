"""Chat histories as text and tokens, batches by columns, and templates of the whole process."""

from __future__ import annotations

import dialoop
import pytest
from dialoop.chat import ChatHistory, Histories, History, Message
from dialoop.errors import AlreadyExists, InvalidHistory, PreconditionFailed
from dialoop.templates.registry import DEFAULT_REGISTRY
from dialoop.testing import byte_tokenizer

BYTES = byte_tokenizer()
ANSWERED = ChatHistory(prompt=[{"role": "user", "content": "3+4?"}]).respond(
    Message(role="assistant", content="7")
)


@pytest.fixture
def _own_templates(monkeypatch):
    monkeypatch.setattr(DEFAULT_REGISTRY, "_entries", {})


def test_a_chat_history_renders_its_parts():
    text = ANSWERED.to_text(BYTES)
    assert text.prompt == "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    assert text.response == "7<|im_end|>\n"
    assert text.full == text.prompt + text.response
    assert ANSWERED.to_text(chat_template_name="chatml").full == text.full
    assert ChatHistory(prompt=ANSWERED.prompt).to_text(BYTES).full is None


def test_a_chat_history_encodes_its_parts():
    tokens, text = ANSWERED.to_tokens(BYTES), ANSWERED.to_text(BYTES)
    assert BYTES.decode(tokens.prompt) == text.prompt
    assert BYTES.decode(tokens.response) == text.response
    assert tokens.full == tokens.prompt + tokens.response


def test_a_template_that_rewrites_the_prompt_has_no_response():
    source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for form in (ANSWERED.to_text, ANSWERED.to_tokens):
        with pytest.raises(PreconditionFailed) as caught:
            form(BYTES, chat_template=source)
        assert caught.value.reason == "PROMPT_NOT_PREFIX"


def test_columns_make_a_history_or_a_batch():
    chat = History.from_columns(role=["user", "assistant"], content=["a", "b"])
    assert chat == History(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    both = History.from_columns(role=[["user", "assistant"], ["user"]], content=[["a", "b"], ["c"]])
    assert both == Histories((chat, History([{"role": "user", "content": "c"}])))
    for wrong in ({"role": ["user"], "content": []}, {"role": "user", "content": "abcd"}):
        with pytest.raises(InvalidHistory):
            History.from_columns(**wrong)


@pytest.mark.usefixtures("_own_templates")
def test_a_template_can_be_added_for_the_whole_process():
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}|{% endgeneration %}{% endfor %}"
    )
    dialoop.add_chat_template("bars", source, lambda text: [Message(role="user", content=text)])
    assert ANSWERED.full.apply_chat_template(chat_template_name="bars") == "3+4?|7|"
    assert History.from_text("x", chat_template_name="bars")[0].text == "x"
    with pytest.raises(AlreadyExists):
        dialoop.add_chat_template("bars", source + " ")
