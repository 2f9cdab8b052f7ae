"""A history is a frozen run of messages: what follows it leaves it as it was."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.errors import InvalidHistory
from hypothesis import given
from hypothesis import strategies as st

MESSAGES = [Message(role="user", content=text) for text in "abc"]
PARTS = st.lists(st.lists(st.sampled_from(MESSAGES), max_size=3), max_size=6)
ENDS = st.none() | st.integers(-12, 12)
STEPS = st.none() | st.sampled_from([-2, -1, 1, 2])


def grown(parts: list[list[Message]]) -> list[History]:
    """Return a history of nothing and what it becomes with each part."""
    histories = [History()]
    for part in parts:
        histories.append(histories[-1].extend(part))
    return histories


@given(PARTS, ENDS, ENDS, STEPS)
def test_it_means_what_a_tuple_means(
    parts: list[list[Message]], start: int | None, stop: int | None, step: int | None
):
    history = grown(parts)[-1]
    flat = tuple(message for part in parts for message in part)
    for cut in (slice(start, stop, step), slice(start, stop)):
        assert history[cut] == History(flat[cut])
    for index in range(-len(flat), len(flat)):
        assert history[index] is flat[index]
    for index in (len(flat), -len(flat) - 1):
        with pytest.raises(IndexError):
            _ = history[index]
    assert len(history) == len(flat)
    assert history == History(flat)
    assert hash(history) == hash(History(flat))
    assert list(reversed(history)) == list(reversed(flat))
    assert copy.deepcopy(pickle.loads(pickle.dumps(history))) == History(flat)


@given(PARTS, PARTS)
def test_it_starts_with_what_it_grew_from_and_with_nothing_else(
    parts: list[list[Message]], others: list[list[Message]]
):
    mine, other = grown(parts), grown(others)[-1]
    assert all(mine[-1].starts_with(before) for before in mine)
    is_start = mine[-1].messages[: len(other)] == other.messages
    assert mine[-1].starts_with(other) == is_start


@given(PARTS, PARTS, PARTS)
def test_full_is_checked_against_prompt_and_response(
    first: list[list[Message]], second: list[list[Message]], third: list[list[Message]]
):
    prompt, response, full = (grown(parts)[-1] for parts in (first, second, third))
    ChatHistory(prompt=prompt, response=response, full=prompt.extend(response))
    if full.messages == (*prompt.messages, *response.messages):
        ChatHistory(prompt=prompt, response=response, full=full)
    else:
        with pytest.raises(InvalidHistory):
            ChatHistory(prompt=prompt, response=response, full=full)


def test_it_is_frozen_and_has_no_other_attributes():
    history = History(tuple(MESSAGES))
    with pytest.raises(dataclasses.FrozenInstanceError):
        history.messages = ()  # type: ignore[misc]
    with pytest.raises(AttributeError, match="'History' object has no attribute 'mesages'"):
        _ = history.mesages  # type: ignore[attr-defined]
    assert history.append(MESSAGES[0]) == History((*MESSAGES, MESSAGES[0]))
    assert history == History(tuple(MESSAGES))
