"""Methods that all ranks run together: the first rank calls one, and the others follow.

    class Learner:
        def __init__(self, settings, group):
            self.group = group

        @collective(computes=True)
        def train_step(self, rows):              # inside: collective functions over group.ranks
            ...

    with joined_ranks(rank=rank, size=size, device=device) as ranks:
        group = RankGroup(ranks, make)          # make(facts, group) returns this rank's Learner
        if ranks.is_first:
            with closing(group):
                run_the_service(group.make(facts))     # it calls learner.train_step(rows)
        else:
            group.serve()                        # returns when the first rank closes

So the trainer's job needs to know nothing of ranks. Only the first rank has a queue, a port, a
tracker and a run directory to write. The others need the model's directory and checkpoints, which
every rank reads by itself. Inside a collective method: `own_rows` for this rank's share of the
sequences, then the collective `update(..., ranks=ranks)`, `score_rows`, `gathered_weights`,
`gathered_optimizer`. Files are written by the first rank alone. Random orders are drawn on every
rank from one seed.

With one process a collective method is a plain method: nothing is encoded.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from dialoop.errors import DialoopError, InvalidInput, PreconditionFailed, Unavailable
from dialoop.reasons import Reason

from dialoop_services.learning.packing.rows import TokenRow
from dialoop_services.learning.parallel.ranks import ALONE, RANK_FAILED, Ranks, known_failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dialoop_services.learning.parallel.ranks import Store

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M", bound="Member")

_MAKE, _CLOSE = "dialoop/make", "dialoop/close"
_METHOD = "_collective_method"
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.05


class Member(Protocol):
    """An object of which every rank has one."""

    group: RankGroup[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    name: str
    run: Callable[..., Any]
    check: Callable[..., object] | None
    computes: bool


class _Decorator(Protocol):
    def __call__(
        self, run: Callable[Concatenate[M, P], R], /
    ) -> Callable[Concatenate[M, P], R]: ...


def collective(*, computes: bool = False, check: Callable[..., object] | None = None) -> _Decorator:
    """Make a method run on all ranks when the first one calls it; its result is the first rank's.

    Arguments are plain JSON values, paths and TokenRows. Called inside another collective method it
    runs on this rank alone: the others are in the same place. A method that `computes` first waits
    for the device (see `ask_before_computing`). `check` runs before it on every rank, and may not
    wait for the others: a DialoopError of it is raised on the first rank, and all go on. Any other
    error ends the run.
    """

    def decorate(run: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        method = _Method(name=run.__name__, run=run, check=check, computes=computes)

        @functools.wraps(run)
        def call(member: M, /, *args: P.args, **named: P.kwargs) -> R:
            result: R = member.group.run(member, method, args, named)
            return result

        setattr(call, _METHOD, method)
        return call

    return decorate


def collective_methods(kind: type) -> frozenset[str]:
    """The names of a class's collective methods."""
    return frozenset(name for name, value in vars(kind).items() if hasattr(value, _METHOD))


class RankGroup(Generic[T]):
    """One rank's end of the calls; one object per `joined_ranks`.

    Ranks wait for the next call as long as it takes, whatever the timeout of a collective.
    """

    def __init__(
        self, ranks: Ranks = ALONE, make: Callable[[str, RankGroup[T]], T] | None = None
    ) -> None:
        self.ranks = ranks
        self._make = make
        self._own: T | None = None
        self._ask: Callable[[], None] | None = None
        self._calling = threading.Lock()
        # The thread that is in a collective method; what it calls needs no other rank's attention.
        self._inside: int | None = None
        self._num_calls = 0
        self._is_open = True

    def ask_before_computing(self, ask: Callable[[], None]) -> None:
        """From now on, call `ask` before anything is computed; it may block."""
        self._ask = ask

    def make(self, facts: str) -> T:
        """Make the object on all ranks, from the first; returns the first rank's."""
        with self._entered():
            made: T = self._call(_MAKE, (facts,), {})
        return made

    def run(
        self, member: object, method: _Method, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run a collective method of this rank's object, on all ranks; see `collective`."""
        if self._inside == threading.get_ident():
            return method.run(member, *args, **named)
        if method.computes and self._ask is not None:
            # Before the lock: another thread may have to call `move_to` first.
            self._ask()
        with self._entered():
            if self.ranks.size == 1:
                return method.run(member, *args, **named)
            return self._call(method.name, args, named)

    def serve(self) -> None:
        """Run what the first rank calls, until it closes; for every other rank."""
        store = self.ranks.store
        with self._entered():
            while store is not None and (name := self._next_name(store)) != _CLOSE:
                try:
                    self._take_part(name)
                except _Refusal:
                    continue  # the first rank raises it

    def close(self) -> None:
        """Let the others leave `serve`; from the first rank, also after an error."""
        if self.ranks.store is not None and self.ranks.is_first:
            self.ranks.store.set(self._key(), _CLOSE)
        self._is_open = False

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._calling:
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside = None

    def _call(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.ranks.is_first:
            raise InvalidInput(
                f"Rank {self.ranks.rank} cannot call {name!r}.",
                reason=Reason.NOT_THE_FIRST_RANK,
                remedy="Call collective methods from the first rank; the others serve.",
            )
        if not self._is_open:
            raise Unavailable(
                "The ranks are closed or out of step.",
                reason=Reason.RANKS_OUT_OF_STEP,
                remedy="Resume from the last checkpoint.",
            )
        self._is_open = False
        store, key = self.ranks.store, self._key()
        if store is not None:
            store.set(key, name)
        try:
            result = self._take_part(name, encode([args, named]))
        except _Refusal as refusal:
            self._is_open = True
            raise refusal.error from None
        if store is not None:
            store.delete_key(key)  # all have read it: they took part
        self._is_open = True
        return result

    def _take_part(self, name: str, data: bytes = b"") -> Any:
        """Do what every rank does in a call; the data are the first rank's."""
        self._num_calls += 1
        args, named = decode(self.ranks.broadcast(data))
        if name == _MAKE:
            assert self._make is not None, "only a group that knows how is asked to make"
            self._own = self._make(args[0], self)
            return self._own
        method: _Method = getattr(getattr(type(self._own), name), _METHOD)
        if method.check is not None:
            self._require_agreement(
                name, functools.partial(method.check, self._own, *args, **named)
            )
        return method.run(self._own, *args, **named)

    def _require_agreement(self, name: str, check: Callable[[], object]) -> None:
        """Raise a _Refusal on every rank where one of them refuses."""
        refused: DialoopError | None = None
        try:
            check()
        except DialoopError as error:
            refused = error
        texts = self.ranks.gather(None if refused is None else str(refused))
        if refused is not None:
            raise _Refusal(refused)
        others = [f"Rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if others:
            raise _Refusal(
                PreconditionFailed(
                    f"{name} was refused. {others[0]}",
                    reason=Reason.RANK_REFUSED,
                    remedy="Give every rank the same settings and files.",
                )
            )

    def _next_name(self, store: Store) -> str:
        """The name of the next call; Unavailable (RANK_FAILED) when another rank failed instead.

        Asks again and again, as the store's own wait complains on stderr when its time is over.
        """
        wait_s = _SHORTEST_WAIT_S
        while not store.check([self._key()]):
            failure = known_failure(self.ranks)
            if failure is not None:
                raise Unavailable(failure, reason=RANK_FAILED, remedy="Resume all ranks.")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return store.get(self._key()).decode()

    def _key(self) -> str:
        return f"dialoop/call/{self._num_calls}"


class _Refusal(Exception):
    """A check refused a call: all ranks know, and go on."""

    def __init__(self, error: DialoopError) -> None:
        super().__init__(str(error))
        self.error = error


def encode(arguments: object) -> bytes:
    """Return one line of JSON with what is plain, then the values of all tensors."""
    values = bytearray()

    def plain(value: object) -> dict[str, Any]:
        if isinstance(value, TokenRow):
            return {"row": {field.name: getattr(value, field.name) for field in fields(value)}}
        if isinstance(value, torch.Tensor):
            array = value.numpy()
            start = len(values)
            values.extend(array.tobytes())
            return {"tensor": [str(array.dtype), start, len(values)]}
        if isinstance(value, Path):
            return {"path": str(value)}
        raise TypeError(f"Other ranks cannot be given a {type(value).__name__}.")

    return json.dumps(arguments, default=plain).encode() + b"\n" + values


def decode(data: bytes) -> Any:
    """Return what `encode` was given, with lists for tuples."""
    head, _, values = data.partition(b"\n")

    def whole(value: dict[str, Any]) -> Any:
        match value:
            case {"row": facts}:
                return TokenRow(**facts)
            case {"tensor": [dtype, start, end]}:
                return torch.from_numpy(np.frombuffer(values[start:end], dtype=dtype).copy())
            case {"path": path}:
                return Path(path)
        return value

    return json.loads(head, object_hook=whole)
