"""One rank drives the others: it calls, and all ranks run the same collective function.

    with joined_ranks(rank=rank, size=size, device=device) as ranks:
        learner = Learner(settings, ranks)
        commands = GroupCommands(ranks, {"train_step": lambda data: train_step_of(learner, data)})
        if ranks.is_first:
            with closing(commands):
                run_the_service(commands)      # leases, publishes, serves: commands.call(...)
        else:
            commands.serve()                   # returns when the first rank closes

    def train_step_of(learner, data):
        rows = learner.rows_to_train(decode(data))      # may refuse: all ranks go on
        return lambda: learner.train(rows)              # collective; an error ends the run

So the trainer's job needs to know nothing of ranks: dialoop_services.trainer.learner.ranked_learner
has Learner's methods, encodes the arguments (sequences as protobuf bytes, the rest as JSON), calls,
and returns what its own rank answered. Only the first rank has a queue, a port, a tracker and a run
directory to write. The others need the model's directory and checkpoints, which every rank reads by
itself. Inside a command: `own_rows` for this rank's share of the sequences, then the collective
`update(..., ranks=ranks)`, `score_rows`, `gathered_weights`, `gathered_optimizer`. Files are
written by the first rank alone. Random orders are drawn on every rank from one seed.

With one process `call` runs the function and nothing else. Calls come from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopError, InvalidInput, PreconditionFailed, Unavailable

from dialoop_services.learning.parallel.ranks import RANK_FAILED, known_failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_services.learning.parallel.ranks import Ranks, Store

Command = Callable[[bytes], Callable[[], Any]]
"""Reads the bytes of a call, or refuses them with a DialoopError, and says what is to be done.

Reading may not wait for other ranks; what is to be done may.
"""

_CLOSE = "dialoop/close"
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.05


class GroupCommands:
    """The commands of one rank, one object per `joined_ranks`.

    Ranks wait for the next call as long as it takes, whatever the timeout of a collective.
    """

    def __init__(self, ranks: Ranks, commands: Mapping[str, Command]) -> None:
        self._ranks = ranks
        self._commands = dict(commands)
        self._num_calls = 0
        self._is_open = True

    def call(self, name: str, data: bytes = b"") -> Any:
        """Run a command on all ranks, from the first; what it gave on the first.

        Raises what the command refused with, on this rank or (RANK_REFUSED) on another. Any other
        error leaves the ranks out of step: no further call is taken (RANKS_OUT_OF_STEP).
        """
        if not self._ranks.is_first or name not in self._commands:
            raise InvalidInput(
                f"Rank {self._ranks.rank} cannot call {name!r}.",
                reason="UNKNOWN_COMMAND",
                remedy=f"Call one of {', '.join(self._commands)} from the first rank.",
            )
        if not self._is_open:
            raise Unavailable(
                "The ranks are closed or out of step.",
                reason="RANKS_OUT_OF_STEP",
                remedy="Resume from the last checkpoint.",
            )
        self._is_open = False
        store, key = self._ranks.store, self._key()
        if store is not None:
            store.set(key, name)
        try:
            result = self._run(name, data)
        except _Refusal as refusal:
            self._is_open = True
            raise refusal.error from None
        if store is not None:
            store.delete_key(key)  # all have read it: they ran the command
        self._is_open = True
        return result

    def serve(self) -> None:
        """Run what the first rank calls, until it closes; for every other rank."""
        store = self._ranks.store
        while store is not None and (name := self._next_name(store)) != _CLOSE:
            try:
                self._run(name, b"")
            except _Refusal:
                continue  # the first rank tells its caller

    def close(self) -> None:
        """Let the others leave `serve`; from the first rank, also after an error."""
        if self._ranks.store is not None and self._ranks.is_first:
            self._ranks.store.set(self._key(), _CLOSE)
        self._is_open = False

    def _run(self, name: str, data: bytes) -> Any:
        """Read and, when no rank refuses, do; the part of a call that every rank runs."""
        self._num_calls += 1
        data = self._ranks.broadcast(data)
        try:
            act, refused = self._commands[name](data), None
        except DialoopError as error:
            act, refused = None, error
        told = self._ranks.gather(None if refused is None else str(refused))
        if refused is not None:
            raise _Refusal(refused)
        others = [f"Rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if act is None or others:
            raise _Refusal(
                PreconditionFailed(
                    f"{name} was refused. {others[0]}",
                    reason="RANK_REFUSED",
                    remedy="Give every rank the same settings and files.",
                )
            )
        return act()

    def _next_name(self, store: Store) -> str:
        """The name of the next call; Unavailable (RANK_FAILED) when another rank failed instead.

        Asks again and again, as the store's own wait complains on stderr when its time is over.
        """
        wait_s = _SHORTEST_WAIT_S
        while not store.check([self._key()]):
            told = known_failure(self._ranks)
            if told is not None:
                raise Unavailable(told, reason=RANK_FAILED, remedy="Resume all ranks.")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return store.get(self._key()).decode()

    def _key(self) -> str:
        return f"dialoop/call/{self._num_calls}"


class _Refusal(Exception):
    """A command was refused while reading: all ranks know, and go on."""

    def __init__(self, error: DialoopError) -> None:
        super().__init__(str(error))
        self.error = error
