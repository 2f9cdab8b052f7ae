"""Say who waits for whom and since when, from what each service says it waits for.

A service names what it waits for itself: an answer, groups, room on a disk. Groups come through the
queue, so the ledger's counts say whose turn it is. Following these from the trainer on leads to the
service that holds everything up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dialoop.clients.replay import LedgerCounts, ReplayStats
from dialoop.waits import STALL_S, Wait

_MAX_CHAIN = 8
_QUEUE = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """One service that waits for another.

    seconds: for how long. count: how many of its calls wait. because: what the target waits for in
    its turn, and so on; empty for the service that waits for nobody, which is the cause.
    """

    waiter: str
    target: str
    what: str
    seconds: float
    count: int = 1
    because: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """Return the end of the chain, which is what holds everything before it up."""
        return self.because[-1] if self.because else f"{self.target} ({self.what})"

    @property
    def is_stall(self) -> bool:
        """Return whether the wait is long enough to be told."""
        return self.seconds >= STALL_S

    def __str__(self) -> str:
        """Return one line: "trainer waits for collector (groups to train), 35 s"."""
        calls = f", {self.count} calls" if self.count > 1 else ""
        line = f"{self.waiter} waits for {self.target} ({self.what}{calls}), {self.seconds:.0f} s"
        return " <- ".join((line, *self.because))


def blocked_by(
    waits: Mapping[str, Sequence[Wait]],
    *,
    silent: Collection[str],
    names: Mapping[str, str],
    stats: ReplayStats | None,
) -> tuple[Blocked, ...]:
    """Return what waits, the longest first; idle services are left out.

    waits: by service. silent: the services that do not serve. names: the service at an address.
    """
    longest: dict[tuple[str, str, str], Blocked] = {}
    for waiter, own in waits.items():
        for wait in own:
            if wait.is_idle:
                continue
            target, what = _target_of(wait, names, stats)
            key = (waiter, target, what)
            if key not in longest or longest[key].seconds < wait.seconds:
                longest[key] = Blocked(
                    waiter=waiter, target=target, what=what, seconds=wait.seconds, count=wait.count
                )
    everything = sorted(longest.values(), key=lambda each: -each.seconds)
    return tuple(replace(each, because=_chain(each, everything, silent)) for each in everything)


def _target_of(wait: Wait, names: Mapping[str, str], stats: ReplayStats | None) -> tuple[str, str]:
    """Return whom a wait is for: the service at its address, or the one whose turn it is."""
    if wait.target == _QUEUE and stats is not None:
        if wait.what == "groups of an evaluation":
            return _whose_turn(stats.evaluation, wait.what, stats)
        if wait.what == "groups to train":
            return _whose_turn(stats.training, wait.what, stats)
    return names.get(wait.target, wait.target), wait.what


def _whose_turn(counts: LedgerCounts, what: str, stats: ReplayStats) -> tuple[str, str]:
    """Return which service has to work until a group comes out of the queue."""
    if stats.is_full:
        return _QUEUE, f"{what}: its memory is full"
    if counts.num_groups_unscored:
        return "scorer", f"{what}: {counts.num_groups_unscored} unscored"
    if counts.num_groups_leased:
        return "collector", f"{what}: {counts.num_groups_leased} playing"
    if counts.num_tasks_offered:
        return "collector", f"{what}: {counts.num_tasks_offered} tasks offered, none playing"
    return "collector", f"{what}: no task is offered"


def _chain(
    blocked: Blocked, everything: Sequence[Blocked], silent: Collection[str]
) -> tuple[str, ...]:
    """Return what the target waits for, what that one waits for, and so on to the cause."""
    chain: list[str] = []
    seen, target = {blocked.waiter}, blocked.target
    while target not in seen and len(chain) < _MAX_CHAIN:
        seen.add(target)
        if target in silent:
            chain.append(f"{target} does not serve")
            break
        further = next((each for each in everything if each.waiter == target), None)
        if further is None:
            break
        chain.append(f"{target} waits for {further.target} ({further.what})")
        target = further.target
    return tuple(chain)
