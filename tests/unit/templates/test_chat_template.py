from __future__ import annotations

import pytest
from dialoop.chat import History, Message
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.templates.chat_template import ChatTemplate


def user(text: str) -> History:
    return History((Message(role="user", content=text),))


def test_a_template_without_the_roles_of_a_conversation_says_so():
    template = ChatTemplate("{{ raise_exception('no system role') }}")
    with pytest.raises(InvalidInput, match="no system role"):
        template.render(user("x"))


def test_a_broken_template_names_its_line():
    with pytest.raises(InvalidConfig, match="line 2"):
        ChatTemplate("\n{% for %}")


def test_generation_blocks_are_accepted():
    template = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    assert template.render(user("hi")) == "hi"
