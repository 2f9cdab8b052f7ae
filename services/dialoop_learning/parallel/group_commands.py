"""Methods that all ranks run together: the first rank calls one, and the others run it too.

    class Learner:
        def __init__(self, settings, group):
            self.group = group

        @collective(computes=True)
        def train_step(self, rows):              # inside: collective functions over group.ranks
            ...

    with join_ranks(rank=rank, size=size, device=device) as ranks:
        group = RankGroup(ranks, make)          # make(facts, group) returns this rank's Learner
        if ranks.is_first:
            with closing(group):
                run_the_service(group.make(facts))     # it calls learner.train_step(rows)
        else:
            group.serve()                        # returns when the first rank closes

So the trainer's job does not know of ranks. Only the first rank has a queue, a port, a tracker and
a run directory to write. The others need the model's directory and checkpoints, which every rank
reads by itself. The arguments of a call go from the first rank to each other one; of a `StepPlan`
each gets its own share. Only the first rank writes files and draws random orders.

With one process a collective method is a plain method: nothing is encoded.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from dialoop.errors import DialoopError, InvalidInput, PreconditionFailed, Unavailable
from dialoop.reasons import Reason

from dialoop_learning.packing.rows import TokenRow
from dialoop_learning.parallel.ranks import ALONE, RANK_FAILED, Ranks, Store, known_failure
from dialoop_learning.parallel.step_plan import RankShare, StepPlan

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M", bound="Member")

_MAKE, _CLOSE = "dialoop/make", "dialoop/close"
_METHOD = "_collective_method"
_KINDS: dict[str, type[Any]] = {"row": TokenRow, "share": RankShare, "plan": StepPlan}
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

    Arguments are plain JSON values, paths, TokenRows and a StepPlan. Inside another collective
    method it runs on this rank alone, because the others call it too. A method that `computes`
    first waits for the device (see `ask_before_computing`). `check` runs before it on every rank,
    and may not wait for the others. If `check` raises a DialoopError anywhere, the first rank
    raises it and all continue to serve. Any other error ends the run.
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


class RankGroup(Generic[T]):
    """One rank's end of the collective calls; one object per `join_ranks`.

    Ranks wait for the next call without a limit; the timeout of a collective does not count. An
    error other than a refusal leaves them out of step for good: then `failed` gets that error, and
    the process should end.
    """

    def __init__(
        self, ranks: Ranks = ALONE, make: Callable[[str, RankGroup[T]], T] | None = None
    ) -> None:
        self.ranks = ranks
        self._make = make
        self._own: T | None = None
        self._ask: Callable[[], None] | None = None
        self._calling = threading.Lock()
        # The thread inside a collective method; calls that it makes run on this rank alone.
        self._inside: int | None = None
        self._num_calls = 0
        self._is_open = True
        self.failed: Future[None] = Future()

    def ask_before_computing(self, ask: Callable[[], None]) -> None:
        """Call `ask` before every method that computes, from now on; it may block."""
        self._ask = ask

    def make(self, facts: str) -> T:
        """Make the object on all ranks and return the first rank's; for the first rank."""
        with self._enter():
            member: T = self._call(_MAKE, (facts,), {})
        return member

    def run(
        self, member: object, method: _Method, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run a collective method of this rank's object, on all ranks; see `collective`."""
        if self._inside == threading.get_ident():
            return method.run(member, *args, **named)
        if method.computes and self._ask is not None:
            # Before the lock: another thread may have to call `move_to` first.
            self._ask()
        with self._enter():
            if self.ranks.size == 1:
                return method.run(member, *args, **named)
            return self._call(method.name, args, named)

    def serve(self) -> None:
        """Run what the first rank calls, until it closes; for every other rank."""
        store = self.ranks.store
        with self._enter():
            while store is not None and (name := self._next_name(store)) != _CLOSE:
                try:
                    self._take_part(name)
                except _Refusal:
                    continue  # the first rank raises the error

    def close(self) -> None:
        """End `serve` on the other ranks; for the first rank, also after an error."""
        if self.ranks.store is not None and self.ranks.is_first:
            self.ranks.store.set(self._key(), _CLOSE)
        self._is_open = False

    @contextmanager
    def _enter(self) -> Iterator[None]:
        with self._calling:
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside = None

    def _call(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.ranks.is_first:
            raise InvalidInput(
                f"Rank {self.ranks.rank} called {name!r}, which only the first rank may call.",
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
            result = self._take_part(name, [args, named])
        except _Refusal as refusal:
            self._is_open = True
            raise refusal.error from None
        except BaseException as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        if store is not None:
            store.delete_key(key)  # all ranks have read it, since they took part
        self._is_open = True
        return result

    def _take_part(self, name: str, given: list[Any] | None = None) -> Any:
        """Do what every rank does in a call; `given` are the first rank's arguments."""
        self._num_calls += 1
        if given is None:
            args, named = decode(self.ranks.scatter([]))
        else:
            others = [encode(given, rank) for rank in range(1, self.ranks.size)]
            self.ranks.scatter([b"", *others])
            args, named = given
        if name == _MAKE:
            assert self._make is not None, "RankGroup was made without a `make` function"
            self._own = self._make(args[0], self)
            return self._own
        method: _Method = getattr(getattr(type(self._own), name), _METHOD)
        if method.check is not None:
            self._require_agreement(
                name, functools.partial(method.check, self._own, *args, **named)
            )
        return method.run(self._own, *args, **named)

    def _require_agreement(self, name: str, check: Callable[[], object]) -> None:
        """Run `check` on every rank; raise a _Refusal on all of them when one refuses."""
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
                    f"A rank refused {name}. {others[0]}",
                    reason=Reason.RANK_REFUSED,
                    remedy="Give every rank the same settings and files.",
                )
            )

    def _next_name(self, store: Store) -> str:
        """Return the name of the next call; raise Unavailable (RANK_FAILED) if a rank fails first.

        It polls, because the store's own wait writes to stderr when its time is over.
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
    """A check refused a call. All ranks raise it, and continue to serve."""

    def __init__(self, error: DialoopError) -> None:
        super().__init__(str(error))
        self.error = error


def encode(arguments: object, rank: int = 0) -> bytes:
    """Return one line of JSON with the plain values, then the bytes of all tensors.

    Of a StepPlan it is the rank's share alone.
    """
    values = bytearray()

    def plain(value: object) -> dict[str, Any]:
        if isinstance(value, StepPlan):
            value = value.of_rank(rank)
        for name, kind in _KINDS.items():
            if isinstance(value, kind):
                return {name: {field.name: getattr(value, field.name) for field in fields(value)}}
        if isinstance(value, torch.Tensor):
            array = value.numpy()
            start = len(values)
            values.extend(array.tobytes())
            return {"tensor": [str(array.dtype), start, len(values), array.shape]}
        if isinstance(value, Path):
            return {"path": str(value)}
        raise TypeError(f"A {type(value).__name__} cannot be sent to other ranks.")

    return json.dumps(arguments, default=plain).encode() + b"\n" + values


def decode(data: bytes) -> Any:
    """Return the arguments of `encode`, with lists for tuples."""
    head, _, values = data.partition(b"\n")

    def whole(value: dict[str, Any]) -> Any:
        match value:
            case {"row": facts} | {"share": facts} | {"plan": facts}:
                return _KINDS[next(iter(value))](**facts)
            case {"tensor": [dtype, start, end, shape]}:
                array = np.frombuffer(values[start:end], dtype=dtype).reshape(shape)
                return torch.from_numpy(array.copy())
            case {"path": path}:
                return Path(path)
        return value

    return json.loads(head, object_hook=whole)
