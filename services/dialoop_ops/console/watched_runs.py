"""The runs that a console shows: their indexes by name, kept up to date by a thread.

The thread runs while the context of `WatchedRuns([Path("runs/demo")])` is open, and reads while
somebody looks: a console that nobody has open costs a run nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Self

from dialoop.errors import InvalidInput, NotFound
from dialoop.tokens.tokenizer import Tokenizer

from dialoop_ops.runs import RunIndex
from dialoop_ops.runs.run_config import tokenizer_of

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_LOOKED_S = 30.0
"""For so long after a question the indexes are kept up to date."""
_RUN_FILES = ("run.json", "metrics.jsonl", "trajectories.jsonl")


class WatchedRuns:
    """Indexes of several runs, read on every second while the context is open."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        """Name the runs by their folders; NotFound for a folder that is no run's."""
        for run_dir in run_dirs:
            if not any((run_dir / name).is_file() for name in _RUN_FILES):
                raise NotFound(
                    f"{run_dir} is not the directory of a run.",
                    remedy="Name directories with a run.json, such as runs/demo.",
                )
        names = _distinct_names(run_dirs)
        self.indexes = {n: RunIndex(d) for n, d in zip(names, run_dirs, strict=True)}
        self._stopping = threading.Event()
        self._is_looked_at = threading.Event()
        self._looked_at, self._looked_for = -math.inf, ""
        self._thread = threading.Thread(target=self._read_on, name="console-index", daemon=True)
        self._tokenizer = lru_cache(maxsize=16)(tokenizer_of)

    def __enter__(self) -> Self:
        for index in self.indexes.values():
            index.refresh(0)  # so that the first question finds tables
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._is_looked_at.set()
        self._thread.join()
        for index in self.indexes.values():
            index.close()

    def keep_reading(self) -> None:
        """Keep the indexes up to date for a while, because somebody looks."""
        self._looked_at = time.monotonic()
        self._is_looked_at.set()

    def index_of(self, name: str) -> RunIndex:
        """Return a run's index; NotFound for a name that is not on the console."""
        self.keep_reading()
        self._looked_for = name
        if name not in self.indexes:
            raise NotFound(
                f"There is no run '{name[:80]}' on this console.",
                remedy=f"Choose one of {', '.join(self.indexes)}.",
            )
        return self.indexes[name]

    def indexes_of(self, names: Iterable[str]) -> dict[str, RunIndex]:
        """Return the indexes of several runs; InvalidInput for none."""
        chosen = {name: self.index_of(name) for name in names}
        if not chosen:
            raise InvalidInput("No run is named.", remedy="Add ?run=NAME.")
        return chosen

    def tokenizer_of(self, name: str) -> Tokenizer | None:
        """Return the tokenizer of a run, or None where it is gone."""
        return self._tokenizer(self.index_of(name).run_dir)

    def _nobody_looks(self) -> bool:
        return time.monotonic() - self._looked_at > _LOOKED_S

    def _read_on(self) -> None:
        sizes: dict[str, int] = {}
        while not self._stopping.is_set():
            if self._nobody_looks():
                self._is_looked_at.clear()
                if self._nobody_looks():  # nor since the line above
                    self._is_looked_at.wait()
                continue
            has_moved = False
            # What somebody looks at comes first: to read many runs for the first time takes long.
            runs = sorted(self.indexes.items(), key=lambda each: each[0] != self._looked_for)
            for name, index in runs:
                try:
                    num_bytes = index.refresh().num_bytes
                except Exception:  # a run that cannot be read must not end the others' updates
                    log.exception("The index of %s could not be brought up to date.", name)
                    continue
                has_moved |= sizes.get(name) != num_bytes
                sizes[name] = num_bytes
                if self._stopping.is_set():
                    return
            if not has_moved:
                self._stopping.wait(_EVERY_S)


def _distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the folders' names, with a number behind those that are taken."""
    names: list[str] = []
    for run_dir in run_dirs:
        name = plain = run_dir.resolve().name
        count = 1
        while name in names:
            count += 1
            name = f"{plain}-{count}"
        names.append(name)
    return names
