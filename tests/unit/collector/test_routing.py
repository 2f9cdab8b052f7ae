"""A group's calls keep to the replica that has its prefix; groups are spread; a crowd spills."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dialoop_services.collector.routing import choose, rank


@dataclass
class Place:
    name: str
    num_running: int = 0


def places(*names: str) -> list[Place]:
    return [Place(name) for name in names]


def test_groups_are_spread_and_each_process_ranks_alike():
    fleet = places("a", "b", "c", "d")
    firsts = Counter(rank(f"group-{number}", fleet)[0].name for number in range(4000))
    assert set(firsts) == set("abcd")
    assert all(850 < count < 1150 for count in firsts.values())
    assert rank("group-0", fleet) == rank("group-0", reversed(fleet))


def test_a_replica_that_leaves_or_joins_moves_its_own_groups_alone():
    fleet = places("a", "b", "c")
    for number in range(300):
        key = f"group-{number}"
        order = rank(key, fleet)
        without = [place for place in fleet if place is not order[0]]
        assert rank(key, without) == order[1:]


def test_new_groups_go_past_a_replica_that_has_more_than_its_share():
    a, b = fleet = places("a", "b")
    for number in range(64):
        choose(f"group-{number}", fleet).num_running += 8
        mean = (a.num_running + b.num_running) / 2
        assert max(a.num_running, b.num_running) <= 1.25 * mean + 8


def test_a_conversation_stays_at_home_until_that_is_crowded():
    a, b, c = fleet = places("a", "b", "c")
    a.num_running = 16
    assert choose("g", fleet, home=a) is a, "few are running: waiting costs less than a prefix"
    a.num_running, b.num_running, c.num_running = 44, 20, 21
    assert choose("g", fleet, home=a) is not a
    a.num_running, b.num_running, c.num_running = 40, 30, 30
    assert choose("g", fleet, home=a) is a


def test_a_conversation_whose_home_is_gone_goes_to_the_next_in_its_rank():
    fleet = places("a", "b", "c")
    home, following, *_ = rank("g", fleet)
    rest = [place for place in fleet if place is not home]
    assert choose("g", rest, home=home) is following
