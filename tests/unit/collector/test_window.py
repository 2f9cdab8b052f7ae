"""How many groups a collector plays at once, by how long answers wait in the engines' queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dialoop_services.collector.window import LOOK_S, Window

Wait = Callable[[int], float]


def sizes(size: int | Literal["auto"], num_looks: int, waits: Wait) -> list[int]:
    """Return the window after each look; `waits` says what share of an answer's time is waiting.

    The window is always full.
    """
    clock = [0.0]
    window = Window(size, lambda: clock[0])
    found = []
    for _ in range(num_looks):
        clock[0] += LOOK_S
        window.saw(waits(window.size), 1.0)
        window.room(window.size)
        found.append(window.size)
    return found


def engine(capacity: int) -> Wait:
    """An engine that decodes so many groups; what is beyond that waits as long as they take."""
    return lambda size: max(0.0, size - capacity) / size


def test_a_window_doubles_until_answers_wait_and_then_stays_about_there() -> None:
    found = sizes("auto", 200, engine(100))
    assert found[:4] == [32, 64, 128, 96]
    assert all(94 <= size <= 126 for size in found[4:]), "the queue holds a fifth at the most"


def test_a_window_that_is_too_large_from_the_start_shrinks_but_not_to_nothing() -> None:
    assert sizes("auto", 30, engine(8))[-1] in range(6, 12)
    assert sizes("auto", 30, lambda _: 1.0)[-1] == 2


def test_a_number_stays_what_it_is() -> None:
    assert set(sizes(7, 30, engine(100)) + sizes(7, 30, lambda _: 1.0)) == {7}


def test_nothing_changes_without_answers_or_while_there_is_room_left() -> None:
    clock = [0.0]
    window = Window("auto", lambda: clock[0])
    for _ in range(10):
        clock[0] += LOOK_S
        assert window.room(16) == 0
    for _ in range(10):
        clock[0] += LOOK_S
        window.saw(0.0, 1.0)
        assert window.room(15) == 1


def test_a_look_lasts_for_some_answers() -> None:
    clock = [0.0]
    window = Window("auto", lambda: clock[0])
    window.saw(0.0, 1.0)
    clock[0] = LOOK_S / 2
    assert window.room(16) == 0
    clock[0] = LOOK_S
    assert window.room(16) == 16
