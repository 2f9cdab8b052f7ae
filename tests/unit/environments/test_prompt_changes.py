"""What a step changes in a prompt, and the digest by which client and service compare prompts."""

from __future__ import annotations

import json

from dialoop.chat import ChatHistory, History, Message, ToolCall
from dialoop.environments.modes import Text
from dialoop.environments.sessions.prompts import (
    PromptChain,
    change_of,
    change_of_step,
    full_of,
)


def test_the_digest_of_a_plain_message_is_that_of_its_sorted_json():
    messages = (
        Message(role="user", content='a "quote", \n, \u00e9, \U0001f600 and \ud800'),
        Message(
            role="assistant", content="x", tool_calls=(ToolCall(name="f", arguments_json="{}"),)
        ),
        Message(role="assistant", content="cut", is_complete=False, name="n"),
    )
    for message in messages:
        text = json.dumps(message.to_chat(), sort_keys=True, separators=(",", ":")) + "\n"
        as_text = PromptChain.of(text).digest.digest
        assert PromptChain.of(History((message,))).digest.digest == as_text


def test_a_change_that_is_found_in_one_comparison_is_that_of_the_general_way():
    hi, yes, more, other = (Message(role="user", content=text) for text in "abcd")
    before, response = History((hi,)), History((yes,))
    sent = [
        ChatHistory(response=response),
        ChatHistory(prompt=before, response=response),
        ChatHistory(full=History((hi, yes))),
        ChatHistory(response=History()),
    ]
    afters = [(), (hi,), (hi, yes), (hi, yes, more), (hi, other, more), (other, yes), (hi, more)]
    for answered in sent:
        for after in map(History, afters):
            change = change_of_step(before, answered, after)
            full = full_of(before, answered)
            assert change == change_of(full, after)
            assert change.apply(full) == after
    assert change_of_step("ab", Text(response="c"), "abcd").added == "d"


def test_a_chain_follows_what_grows_and_begins_anew_where_the_past_has_changed():
    hi, yes, other = (Message(role="user", content=text) for text in "abc")
    chain = PromptChain.of(History((hi,)))
    for after in ((hi, yes), (other, yes), ()):
        followed = chain.follow(History((hi,)), History(after))
        assert followed.digest == PromptChain.of(History(after)).digest
