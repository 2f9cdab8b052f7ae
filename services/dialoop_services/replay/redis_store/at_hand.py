"""Keep the payloads that this process gave to Redis last, so that leases need not read them again.

at_hand = PayloadsAtHand(max_bytes=64 << 20)
mark = at_hand.add(b"members")    # goes to Redis beside the payload, which keeps it in the ledger
at_hand.complete(mark, b"head")   # the group is in the queue: its head precedes its payloads
at_hand.take(mark)                # (b"head", b"members"); a lease of the group gave its marks

A mark is "<keeper>/<number>". A group whose members came apart has several, joined by commas.
"""

from __future__ import annotations

import secrets

# Bytes that an entry takes beside its payload and head.
_OVERHEAD = 300


class PayloadsAtHand:
    """Payloads and heads by number; above `max_bytes` the oldest go.

    Redis compares marks with `keeper` and `since`. So it asks for nothing of another process or of
    an earlier life of this one, and for little that is gone.
    """

    def __init__(self, max_bytes: int) -> None:
        self.keeper = secrets.token_hex(8)
        self.since = 1
        """The number from which on all payloads are at hand that were not taken."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._last = 0
        self._payloads: dict[int, bytes] = {}
        # By the smallest number of a group.
        self._heads: dict[int, bytes] = {}

    def add(self, payload: bytes) -> str:
        """Keep a payload, unless it is empty or too large; return its mark."""
        size = _OVERHEAD + len(payload)
        if not payload or size > self._max_bytes:
            return f"{self.keeper}/0"
        self._last += 1
        self._payloads[self._last] = payload
        self._num_bytes += size
        self._make_room()
        return f"{self.keeper}/{self._last}"

    def complete(self, marks: str, head: bytes) -> None:
        """Note the beginning of a group whose members have these marks."""
        number = min(_numbers(marks))
        if number in self._payloads:
            self._heads[number] = head
            self._num_bytes += len(head)
            self._make_room()

    def take(self, marks: str) -> tuple[bytes, ...]:
        """Return a group in parts and forget it; nothing where a part is not known."""
        numbers = _numbers(marks)
        payloads = [self._heads.get(min(numbers)), *map(self._payloads.get, numbers)]
        for number in numbers:
            self._remove(number)
        parts = tuple(part for part in payloads if part is not None)
        return parts if len(parts) == len(payloads) else ()

    def _make_room(self) -> None:
        while self._num_bytes > self._max_bytes:
            self._remove(self.since)
            self.since += 1

    def _remove(self, number: int) -> None:
        payload = self._payloads.pop(number, None)
        if payload is not None:
            self._num_bytes -= _OVERHEAD + len(payload) + len(self._heads.pop(number, b""))


def _numbers(marks: str) -> list[int]:
    return [int(mark.rpartition("/")[2]) for mark in marks.split(",")]
