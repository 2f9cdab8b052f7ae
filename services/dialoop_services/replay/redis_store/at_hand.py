"""Keep the payloads that this process gave to Redis last, so that leases need not read them again.

at_hand = PayloadsAtHand(max_bytes=64 << 20)
mark = at_hand.add(payload)      # goes to Redis beside the payload, which keeps it in the ledger
at_hand.complete(mark, head)     # the group is in the queue: `head` precedes its payloads
parts = at_hand.take(mark)       # a lease of the group gave its marks

A mark is "<keeper>/<number>". A group whose members came apart has several, joined by commas.
"""

from __future__ import annotations

import secrets


class PayloadsAtHand:
    """Payloads by number; above `max_bytes` the oldest go.

    Redis compares marks with `keeper` and `since`. So marks of another process, of an earlier life
    of this one, or of payloads that are gone are never asked for.
    """

    def __init__(self, max_bytes: int) -> None:
        self.keeper = secrets.token_hex(4)
        self.since = 1
        """The smallest number of which the payload is at hand, unless it was taken."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._last = 0
        self._payloads: dict[int, bytes] = {}
        # By the smallest number of a group.
        self._heads: dict[int, bytes] = {}

    def add(self, payload: bytes) -> str:
        """Keep a payload, unless it is too large; return its mark."""
        if len(payload) > self._max_bytes:
            return f"{self.keeper}/0"
        self._last += 1
        self._payloads[self._last] = payload
        self._num_bytes += len(payload)
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._payloads)))
        self.since = next(iter(self._payloads), self._last + 1)
        return f"{self.keeper}/{self._last}"

    def complete(self, marks: str, head: bytes) -> None:
        """Note the beginning of a group whose members have these marks."""
        number = min(_numbers(marks))
        if number in self._payloads:
            self._heads[number] = head

    def take(self, marks: str) -> tuple[bytes, ...]:
        """Return a group in parts and forget it; nothing where a part is not known."""
        numbers = _numbers(marks)
        payloads = [self._heads.get(min(numbers)), *map(self._payloads.get, numbers)]
        for number in numbers:
            self._remove(number)
        parts = tuple(part for part in payloads if part is not None)
        return parts if len(parts) == len(payloads) else ()

    def _remove(self, number: int) -> None:
        self._num_bytes -= len(self._payloads.pop(number, b""))
        self._heads.pop(number, None)


def _numbers(marks: str) -> list[int]:
    return [int(mark.rpartition("/")[2]) for mark in marks.split(",")]
