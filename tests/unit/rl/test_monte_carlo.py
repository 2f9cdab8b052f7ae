import math
from dataclasses import replace
from pathlib import Path

import pytest
from dialoop import testing
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import Failure, Owner, Reward, Trajectory, Turn
from dialoop_learning.rl.monte_carlo import (
    step_advantages,
    trajectory_advantages,
    with_turn_advantages,
)
from dialoop_learning.rl.selection import TopKWindow, best_of, with_best_alone

VERSION = PolicyVersion(lineage="main", number=0)
HALF_ROOT = math.sqrt(0.5)


def _trajectory(name: str, *rewards: float) -> Trajectory:
    """One sampled token in the first turn, two in the second, ..."""
    pieces = [([5, 6], {"source": Source.PROMPT})]
    for turn in range(len(rewards)):
        sampled = {"source": Source.MODEL, "turn": turn, "policy_version": VERSION}
        pieces.append((list(range(turn + 1)), sampled))
        pieces.append(([9], {"source": Source.TEMPLATE, "turn": turn}))
    return testing.trajectory(
        trajectory_id=name,
        turns=tuple(
            Turn(message_start=0, num_messages=1, rewards=(Reward(name="r", value=value),))
            for value in rewards
        ),
        sequences=(sequence_of(pieces),),
    )


def test_steps_of_zero_and_one_are_minus_and_plus_half_the_root_of_two() -> None:
    advantages = step_advantages([[0.0], [1.0]])
    assert advantages[0] == pytest.approx([-HALF_ROOT])
    assert advantages[1] == pytest.approx([HALF_ROOT])


def test_steps_are_normalised_over_all_steps_so_that_long_trajectories_weigh_more() -> None:
    # rewards 0, 0, 0 | 1: mean 0.25, std 0.5
    advantages = step_advantages([[0.0, 0.0, 0.0], [1.0]])
    assert advantages == [pytest.approx([-0.5, -0.5, -0.5]), pytest.approx([1.5])]


def test_equal_steps_have_no_advantage() -> None:
    assert step_advantages([[0.3, 0.3], [0.3]]) == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize(
    ("aggregate", "returns"), [("sum", (1.0, 3.0)), ("max", (1.0, 2.0)), ("mean", (0.5, 1.5))]
)
def test_a_trajectory_has_one_number_for_all_its_steps(
    aggregate: str, returns: tuple[float, float]
) -> None:
    assert returns[0] < returns[1]
    advantages = trajectory_advantages([[0.0, 1.0], [1.0, 2.0]], aggregate=aggregate)  # type: ignore[arg-type]
    assert advantages == [pytest.approx([-HALF_ROOT] * 2), pytest.approx([HALF_ROOT] * 2)]


def test_a_group_of_one_is_a_named_error_however_many_steps_it_has() -> None:
    for compute in (step_advantages, trajectory_advantages):
        with pytest.raises(InvalidInput) as caught:
            compute([[0.0, 1.0]])
        assert caught.value.reason == "GROUP_TOO_SMALL"


def test_each_sampled_token_has_its_turns_advantage() -> None:
    group = testing.group(_trajectory("a", 0.0, 0.0), _trajectory("b", 0.0, 1.0))
    scored = with_turn_advantages(group, group_size=2)
    advantages = scored.trajectories[1].sequences[0].token_advantages.tolist()
    assert advantages == pytest.approx([-0.5, 1.5, 1.5])


def test_a_partial_group_has_no_turn_advantages() -> None:
    with pytest.raises(PreconditionFailed):
        with_turn_advantages(testing.group(_trajectory("a", 0.0)), group_size=2)


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        ([0.1, 0.4, 0.5, 0.9, 0.7], (3, 4)),  # five distinct, k = 3: two are above the median
        ([1.0, 1.0, 1.0], ()),
        ([0.0, 1.0, 1.0, 0.0], (1, 2)),
        ([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 2.0], (7, 1, 2)),
    ],
)
def test_the_best_are_strictly_above_the_median(rewards: list[float], best: tuple[int]) -> None:
    assert best_of(rewards, k=3) == best


def test_more_than_a_group_has_cannot_be_selected() -> None:
    for k in (0, 3):
        with pytest.raises(InvalidInput) as caught:
            best_of([0.0, 1.0], k=k)
        assert caught.value.reason == "TOP_K_TOO_LARGE"


def test_only_the_best_are_imitated_and_the_group_stays_whole() -> None:
    group = testing.group(_trajectory("a", 0.0), _trajectory("b", 1.0), _trajectory("c", 0.5))
    selected = with_best_alone(group, k=2)
    assert [t.sequences[0].advantage for t in selected.trajectories] == [0.0, 1.0, 0.0]


def test_selecting_twice_gives_the_same() -> None:
    """Nothing is kept between calls: upstream's queue gave every later window the top again."""
    group = testing.group(_trajectory("a", 0.0), _trajectory("b", 1.0))
    assert with_best_alone(group, k=1) == with_best_alone(group, k=1)


def test_the_best_of_a_window_of_turns_come_once_and_the_next_window_begins_empty() -> None:
    window = TopKWindow(num_turns=5, k=3)
    rewards = (0.1, 0.4, 0.5, 0.9, 0.7)
    chosen = [window.add(_trajectory(str(index), r)) for index, r in enumerate(rewards)]
    assert [[t.trajectory_id for t in best] for best in chosen] == [[], [], [], [], ["3", "4"]]
    assert [window.add(_trajectory("more", 9.0)) for _ in range(4)] == [()] * 4
    assert window.add(_trajectory("last", 9.0)) == (), "among equal rewards none is best"


def test_a_window_counts_turns_and_sums_or_averages_their_rewards() -> None:
    long, short = _trajectory("long", 0.5, 0.5, 0.5), _trajectory("short", 1.0)
    for aggregate, best in (("sum", "long"), ("mean", "short")):
        window = TopKWindow(num_turns=4, k=2, aggregate=aggregate)  # type: ignore[arg-type]
        assert window.add(long) == ()
        assert [t.trajectory_id for t in window.add(short)] == [best]


def test_each_task_has_a_window_unless_a_key_says_otherwise() -> None:
    other = replace(_trajectory("b", 1.0), task_key="another task")
    window = TopKWindow(num_turns=2, k=1)
    assert (window.add(_trajectory("a", 0.0)), window.add(other)) == ((), ())
    window = TopKWindow(num_turns=2, k=1, key=lambda _: "all")
    assert (window.add(_trajectory("a", 0.0)), window.add(other)) == ((), (other,))


def test_what_a_tool_cut_short_is_in_no_window() -> None:
    window = TopKWindow(num_turns=1, k=1)
    failure = Failure(owner=Owner.TOOL, reason="TOOL_TIMEOUT", message="late")
    assert window.add(replace(_trajectory("a", 1.0), failures=(failure,))) == ()
    with pytest.raises(InvalidInput, match="k is 3, and the window has 2 turns"):
        TopKWindow(num_turns=2, k=3)


def test_the_window_of_the_docs_gives_what_is_to_be_imitated() -> None:
    page = (Path(__file__).parents[3] / "docs" / "losses.md").read_text("utf-8")
    code = page.split("<!-- test: top_k_window -->\n```python\n")[1].split("```")[0]
    played = [_trajectory(str(index), index / 64) for index in range(64)]
    imitated: list[Trajectory] = []
    exec(code, {"played": played, "imitate": imitated.append})
    assert [t.trajectory_id for t in imitated] == [str(index) for index in range(63, 55, -1)]
