"""A group's calls keep to the replica that has its prefix; groups are spread; a crowd spills."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.retry import RetryPolicy
from dialoop.episode import Sample
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import StopReason
from dialoop_services.collector.replicas import Replicas
from dialoop_services.collector.routing import choose, rank

from benchmarks.fleet.routing import InTurn, play_group

VERSION = PolicyVersion(lineage="main", number=0)


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
        choose(f"group-{number}", fleet, num_samples=8).num_running += 8
        mean = (a.num_running + b.num_running) / 2
        assert max(a.num_running, b.num_running) <= max(1.25 * mean, mean + 4)


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


@dataclass
class CachingReplica:
    """Answers, and counts the words of prompts whose prefix it has seen."""

    seen: set[tuple[str, ...]] = field(default_factory=set)
    num_cached: int = 0
    num_words: int = 0

    async def generate(
        self, history: History, *, num_samples: int = 1, **_: Any
    ) -> tuple[Sample, ...]:
        words = tuple(" ".join(message.text for message in history).split())
        self.num_words += len(words)
        lengths = (n for n in range(len(words), 0, -1) if words[:n] in self.seen)
        self.num_cached += next(lengths, 0)
        self.seen |= {words[:n] for n in range(len(words) + 1)}
        await asyncio.sleep(0)
        row = sequence_of(
            [([1], {"source": Source.MODEL, "policy_version": VERSION})], logprobs=np.zeros(1)
        )
        return tuple(
            Sample(
                history=ChatHistory(prompt=history).respond(
                    Message(role="assistant", content=f"answer {number}")
                ),
                sequence=row,
                stop_reason=StopReason.STOP,
            )
            for number in range(num_samples)
        )


async def hit_rate(num_replicas: int, *, in_turn: bool = False) -> tuple[float, list[int]]:
    """Of prompts of eleven groups that are played side by side; and the words of each replica."""
    replicas = {str(number): CachingReplica() for number in range(num_replicas)}
    routed = Replicas(replicas, RetryPolicy(max_attempts=1))
    turns = InTurn(list(replicas.values()))
    await asyncio.gather(
        *(
            play_group(turns if in_turn else routed.of_group(f"g{n}"), 6, random.Random(n))
            for n in range(11)
        )
    )
    num_words = [replica.num_words for replica in replicas.values()]
    return sum(replica.num_cached for replica in replicas.values()) / sum(num_words), num_words


async def test_three_replicas_hit_their_caches_as_one_does_and_share_the_work() -> None:
    single, _ = await hit_rate(1)
    routed, num_words = await hit_rate(3)
    in_turn, _ = await hit_rate(3, in_turn=True)
    assert routed > 0.9 * single > in_turn
    assert min(num_words) > 0.5 * max(num_words)
