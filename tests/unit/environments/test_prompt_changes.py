"""What a step added, from what its caller sent, in each mode; and what makes it a retry."""

from __future__ import annotations

import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments import Text, Tokens
from dialoop.environments.sessions.records import added_to, content_of, full_of

HI, YES, MORE = (Message(role=role, content="x") for role in ("user", "assistant", "tool"))
MODES = {
    "history": (ChatHistory, History((HI,)), History((YES,)), History((MORE,))),
    "text": (Text, "ab", "c", "d"),
    "tokens": (Tokens, (1, 2), (3,), (4,)),
}


def join(*parts):
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.extend(part) if isinstance(whole, History) else whole + part
    return whole


@pytest.mark.parametrize("mode", MODES)
def test_every_form_of_an_answer_is_one_step_and_adds_the_same(mode):
    kind, prompt, response, more = MODES[mode]
    full = join(prompt, response)
    for answered in (
        kind(response=response),
        kind(prompt=prompt, response=response),
        kind(full=full),
        kind(prompt=prompt, response=response, full=full),
    ):
        assert full_of(prompt, answered) == full
        assert content_of(prompt, answered) == response
        assert added_to(full_of(prompt, answered), join(full, more)) == more
        assert not added_to(full_of(prompt, answered), full)


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_continue_the_prompt_is_another_step(mode):
    kind, prompt, response, more = MODES[mode]
    for answered in (
        kind(prompt=more, response=response),
        kind(full=join(more, response)),
        kind(prompt=prompt),
        kind(),
    ):
        assert content_of(prompt, answered) is answered


@pytest.mark.parametrize("mode", MODES)
def test_a_changed_past_adds_nothing_that_can_be_said(mode):
    _, prompt, response, more = MODES[mode]
    full = join(prompt, response)
    for after in (prompt, join(prompt, more), join(prompt, more, more)):
        assert added_to(full, after) is None
