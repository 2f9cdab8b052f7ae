"""Which replica gets a call: the one that holds the conversation's prefix, spilling by load.

A group's name ranks the replicas (rendezvous hashing), so its calls begin at one of them and groups
are spread. A replica that joins or leaves moves only the groups that rank it first. The members of
a group share their prompt, so they share the replica too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from dialoop_services.hosting.server import GrpcServer

# A new group begins at the first in its rank that has at most so many times the mean with it.
_EVEN = 1.25
# One that has a prefix somewhere leaves it only for this: its computation costs less than the wait.
_CROWDED, _FEW = 1.5, 16


C = TypeVar("C")


@dataclass(slots=True, eq=False)
class Destination(Generic[C]):
    """A replica: its name in the registry or its address, what calls it, and samples from here."""

    name: str
    client: C
    num_running: int = 0


D = TypeVar("D", bound=Destination[Any])


def renewed(
    known: Iterable[D],
    clients: Mapping[str, C] | Iterable[C],
    make: Callable[[str, C], D],
    numbers: Iterator[int],
) -> list[D]:
    """Return a destination for each client; what is known of those that stay is kept.

    numbers: for clients without a name.
    """
    if not isinstance(clients, Mapping):
        clients = {f"unnamed {next(numbers)}": client for client in clients}
    present = {id(place.client): place for place in known}
    return [present.get(id(client)) or make(name, client) for name, client in clients.items()]


def rank(key: str, places: Iterable[D]) -> list[D]:
    """Return the destinations in the key's order, the same in every process.

    The order of those that stay is the same after others have joined or left.
    """

    def score(place: D) -> bytes:
        return hashlib.blake2b(f"{key}\0{place.name}".encode(), digest_size=8).digest()

    return sorted(places, key=score, reverse=True)


def choose(key: str, places: Iterable[D], home: D | None = None, *, num_samples: int = 1) -> D:
    """Return where a call for so many samples goes: home if that is not crowded, else by rank.

    `home` holds the prefix of the conversation; None before its first answer.
    """
    order = rank(key, places)
    num_running = sum(place.num_running for place in order)
    mean = num_running / len(order)
    if home is not None and home in order and home.num_running <= max(_FEW, _CROWDED * mean):
        return home
    share = _EVEN * (num_running + num_samples) / len(order)
    even = (place for place in order if place.num_running + num_samples <= share)
    return next(even, None) or min(order, key=lambda place: place.num_running)


@dataclass(slots=True)
class RoutingCounts:
    """What was sent where, by replica, for the metrics."""

    num_samples: Counter[str] = field(default_factory=Counter)
    num_moved: Counter[str] = field(default_factory=Counter)
    num_kept_tokens: Counter[str] = field(default_factory=Counter)

    def show_on(self, server: GrpcServer) -> None:
        """Show the counts among the metrics of a service."""
        server.show(
            "dialoop_replica_samples",
            "Samples that a replica was asked for.",
            "replica",
            lambda: self.num_samples,
        )
        server.show(
            "dialoop_conversations_moved",
            "Calls that a replica got although another one has the conversation's prefix.",
            "replica",
            lambda: self.num_moved,
        )
        server.show(
            "dialoop_continued_tokens",
            "Tokens after which a replica went on with an answer whose own replica was gone.",
            "replica",
            lambda: self.num_kept_tokens,
        )
