"""A history that continues another one keeps it instead of a copy, and means the same."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

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


@given(PARTS, ENDS, ENDS, STEPS, st.integers(0, 6))
def test_it_means_what_a_copy_means(
    parts: list[list[Message]], start: int | None, stop: int | None, step: int | None, num_read: int
):
    histories = grown(parts)
    flat = tuple(message for part in parts for message in part)
    for history in histories[:num_read]:
        _ = history.messages
    for cut in (slice(start, stop, step), slice(start, stop)):
        assert histories[-1][cut].messages == flat[cut]
    for index in range(-len(flat), len(flat)):
        assert grown(parts)[-1][index] is flat[index]
    for index in (len(flat), -len(flat) - 1):
        with pytest.raises(IndexError):
            _ = grown(parts)[-1][index]
    assert len(histories[-1]) == len(flat)
    assert histories[-1] == History(flat)
    assert hash(histories[-1]) == hash(History(flat))
    assert list(reversed(grown(parts)[-1])) == list(reversed(flat))
    assert copy.deepcopy(pickle.loads(pickle.dumps(grown(parts)[-1]))) == History(flat)


@given(PARTS, PARTS, st.booleans())
def test_what_was_added_is_found_by_identity_and_by_content(
    parts: list[list[Message]], others: list[list[Message]], is_read: bool
):
    mine, other = grown(parts), grown(others)[-1]
    for before in (*mine, *grown(parts), other):
        if is_read:
            _ = mine[-1].messages
        flat = History(mine[-1].messages)
        expected = flat.messages[len(before) :] if flat.starts_with(before) else None
        assert expected is not None or flat.messages[: len(before)] != before.messages
        again = grown(parts)[-1]
        assert again.added_to(before) == mine[-1].added_to(before) == expected
        assert again.starts_with(before) == (expected is not None)


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


def test_a_turn_copies_nothing_and_a_long_conversation_ends():
    history = History(MESSAGES * 1_000)
    tracemalloc.start()
    try:
        for _ in range(1_000):
            history = history.append(MESSAGES[1])
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 1_000_000  # copies would take 28,000,000
    for _ in range(100_000):
        history = history.append(MESSAGES[1])
    assert len(history) == 104_000
    del history  # a chain of as many histories is freed, without recursion


def test_a_history_that_was_read_keeps_no_earlier_one():
    history = History(MESSAGES)
    gc.collect()
    before = sum(type(each) is History for each in gc.get_objects())
    for _ in range(1_000):
        history = history.append(MESSAGES[1])
        assert history.messages[-1] is MESSAGES[1]
    gc.collect()
    assert sum(type(each) is History for each in gc.get_objects()) <= before + 10


def test_threads_read_the_same_messages():
    for _ in range(200):
        history = grown([[message] for message in MESSAGES * 20])[-1]
        start = threading.Barrier(4)

        def look(history: History = history, start: threading.Barrier = start) -> bool:
            start.wait()
            same = history[-30:].messages == tuple(MESSAGES * 10)
            return same and history.messages == tuple(MESSAGES * 20)

        with ThreadPoolExecutor(4) as threads:
            assert all(work.result() for work in [threads.submit(look) for _ in range(4)])


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="'History' object has no attribute 'mesages'"):
        _ = History().mesages  # type: ignore[attr-defined]
