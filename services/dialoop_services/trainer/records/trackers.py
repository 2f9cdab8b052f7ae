"""Trackers: other places that get the rows of metrics.jsonl.

The trainer always writes metrics.jsonl; `[trackers] tensorboard = true` and the like add others.

class Printed:                                   # [trackers] use = ["my_tracker:Printed"]
    def __init__(self, run: TrackedRun) -> None: ...
    def log(self, row: Mapping[str, Any]) -> None: print(row["train_step"], numbers_of(row))
    def close(self) -> None: ...
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.representations import without_secrets
from dialoop.user_functions import loop_of_users, raised_at, resolve

from dialoop_services.trainer.records.rows import METRICS, is_kept, numbers_of

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is made with.

    project, name: of the run. A job that is started again has the same, and continues the run.
    directory: the run's folder. settings: the trainer's, without the token, addresses, and values
    whose names say that they are secrets, such as the api_key of an environment's options.
    """

    project: str
    name: str
    directory: Path
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """A receiver of every row of metrics.jsonl: kind, train_step, policy_version, values.

    The config names a class or function that takes a TrackedRun and returns one. All of them may be
    async; those that are run on one event loop.
    """

    def log(self, row: Mapping[str, Any]) -> Any:
        """Log a row. Rows come one after the other, in a thread of the tracker's own."""

    def close(self) -> Any:
        """Write what is left."""


class TensorBoard:
    """Event files in the run's folder, which `tensorboard --logdir` shows.

    A warm start has steps of its own, so its numbers are in a folder of their own. After a restore
    a new file begins, at which TensorBoard forgets the numbers of steps that were taken back.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._module = _import_tracker("tensorboardX", setting="tensorboard")
        self._folder = run.directory / "tensorboard"
        self._writers: dict[Path, Any] = {}
        self._first_steps: dict[Path, int] = {}

    def log(self, row: Mapping[str, Any]) -> None:
        """Log every number of the row under the train step."""
        warm_up = self._folder / "warm_start"
        if row["kind"] == "restore":
            self.close()
            step = row["train_step"]
            # What step 0 wrote is written again where nothing was restored.
            self._first_steps = {self._folder: step + 1 if step else 0}
            self._first_steps[warm_up] = row["num_warm_start_steps"] + 1
            return
        folder = warm_up if row["kind"] == "warm_start" else self._folder
        if folder not in self._writers:
            # Without a number of its own a file would replace another of the same second.
            number = len(list(folder.glob("events.*")))
            self._writers[folder] = self._module.SummaryWriter(
                logdir=str(folder),
                flush_secs=5,
                filename_suffix=f".{number:06d}",
                purge_step=self._first_steps.get(folder),
            )
        for name, value in numbers_of(row).items():
            self._writers[folder].add_scalar(name, value, global_step=row["train_step"])

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


class HostedRun:
    """A run of Weights & Biases, or of trackio, which has the same interface.

    A resumed job continues its run: Weights & Biases finds it by id, trackio by name. Nothing can
    be taken out of such a run, so a restore that takes steps back begins another, NAME-2, with the
    numbers that still count.
    """

    def __init__(self, package: str, run: TrackedRun) -> None:
        self._package, self._of = package, run
        self._module = _import_tracker(package, setting=package)
        _, self._number = _counted(run.directory / METRICS)
        self._run = self._open()

    def log(self, row: Mapping[str, Any]) -> None:
        """Log every number and the step as one more, since a step has several rows."""
        if row["kind"] != "restore":
            self._run.log({**numbers_of(row), "train_step": row["train_step"]})
            return
        rows, number = _counted(self._of.directory / METRICS, row)
        if number != self._number:
            self._run.finish()
            self._number = number
            self._run = self._open()
            for kept in rows:
                self.log(kept)

    def close(self) -> None:
        """End the run."""
        self._run.finish()

    def _open(self) -> Any:
        name = self._of.name if self._number == 1 else f"{self._of.name}-{self._number}"
        by_id = {"id": name} if self._package == "wandb" else {}
        settings = {"project": self._of.project, "config": self._of.settings}
        return self._module.init(name=name, resume="allow", **settings, **by_id)


def _counted(
    metrics: Path, restore: Mapping[str, Any] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of metrics.jsonl that count, without restores, and a number.

    The number is 1, and one more for each restore that took rows back. With `restore`, a row of
    the file, they are those up to it: later ones may be there, which are still to be logged.
    """
    kept: list[dict[str, Any]] = []
    number = 1
    if metrics.is_file():
        with metrics.open(encoding="utf-8", newline="\n") as lines:
            for row in (json.loads(line) for line in lines if line.endswith("\n")):
                if row["kind"] != "restore":
                    kept.append(row)
                    continue
                left = [earlier for earlier in kept if is_kept(earlier, row)]
                kept, number = left, number + (len(left) < len(kept))
                if restore is not None and row["time"] == restore["time"]:
                    break
    return kept, number


class GuardedTracker:
    """A tracker in a thread of its own, where it is made, gets the rows in order, and is closed.

    Nobody waits for a row. The first failure ends its use, and so does a row that takes longer than
    `patience_s`, so that a tracker neither holds up nor ends the training.
    """

    def __init__(self, make: Callable[[], Any], *, patience_s: float = 60.0) -> None:
        self._patience_s = patience_s
        # Filled by `log` and `close`, drained by the thread; a row that is late ends it.
        self._rows: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None  # while a row is being logged
        self._has_failed = False
        self._made: Future[Tracker] = Future()
        self._thread = threading.Thread(target=self._run, args=(make,), name="tracker", daemon=True)
        self._thread.start()

    def tracker(self) -> Tracker:
        """Return the tracker once it is made; raise what making it raises, or TimeoutError."""
        return self._made.result(2 * self._patience_s)

    def log(self, row: Mapping[str, Any]) -> None:
        """Have the row logged, unless an earlier one failed."""
        since = self._busy_since
        is_late = since is not None and time.monotonic() - since > self._patience_s
        if is_late and not self._has_failed:
            self._has_failed = True
            text = "A tracker took more than %g s for a row and is left out from now on."
            log.error(text, self._patience_s)
        if not self._has_failed:
            self._rows.put(row)

    def close(self) -> None:
        """Close the tracker, even if it failed, after the rows that it has not logged."""
        self._rows.put(None)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            log.error("A tracker is not closed after %g s and is left behind.", self._patience_s)

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            tracker: Tracker = _wait_for(make())
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._made.set_result(tracker)
        while (row := self._rows.get()) is not None:
            self._busy_since = time.monotonic()
            try:
                if not self._has_failed:
                    _wait_for(tracker.log(row))
            except BaseException:
                self._has_failed = True
                log.exception("A tracker failed and is left out from now on.")
            self._busy_since = None
        try:
            _wait_for(tracker.close())
        except BaseException:
            log.exception("A tracker could not be closed.")


def _wait_for(result: Any) -> Any:
    if not inspect.isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(resolve(result), loop_of_users()).result()


_BUILT_IN: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": partial(HostedRun, "trackio"),
    "wandb": partial(HostedRun, "wandb"),
}
"""The trackers that [trackers] switches on by a key of their own."""


def trackers_of(settings: TrainerSettings) -> tuple[Tracker, ...]:
    """Return the trackers that the settings name.

    Raises InvalidConfig: TRACKER_NOT_FOUND for one of the user's own that cannot be used,
    TRACKER_MISSING for a package that is not installed, TRACKER_REFUSED for a tracker that does not
    start a run.
    """
    run = TrackedRun(
        project=settings.trackers.project,
        name=settings.run,
        directory=settings.run_dir,
        settings=_public_settings(settings),
    )
    chosen = settings.trackers
    makers = {name: maker for name, maker in _BUILT_IN.items() if getattr(chosen, name)}
    for path in chosen.use:
        makers[path] = load_attribute(path, what="tracker", reason=Reason.TRACKER_NOT_FOUND)
    return tuple(_start(name, maker, run) for name, maker in makers.items())


def _start(name: str, maker: Callable[[TrackedRun], Tracker], run: TrackedRun) -> GuardedTracker:
    guarded = GuardedTracker(lambda: maker(run))
    try:
        tracker = guarded.tracker()
    except DialoopError:
        raise
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        log.exception("The tracker %s cannot start.", name)
        raise InvalidConfig(
            f"The tracker {name} in [trackers] cannot start a run ({raised_at(error)}).",
            reason=Reason.TRACKER_REFUSED,
            remedy=f"Correct what the log shows, as by logging in, or leave {name} out.",
        ) from error
    for method in ("log", "close"):
        if not callable(getattr(tracker, method, None)):
            raise InvalidConfig(
                f"The tracker {name} has no method `{method}`.",
                reason=Reason.TRACKER_NOT_FOUND,
                remedy="Give it log(row) and close(), as Tracker in "
                "dialoop_services.trainer.records.trackers says.",
            )
    return guarded


def _public_settings(settings: TrainerSettings) -> dict[str, Any]:
    """Return the settings without the token, this machine's address and the secrets of options."""
    values = settings.model_dump(mode="json", exclude={"token", "host", "port"})
    return without_secrets(values)


def _import_tracker(package: str, *, setting: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InvalidConfig(
            f"trackers.{setting} is true, and the package {package} is not installed.",
            reason=Reason.TRACKER_MISSING,
            remedy=f"Run `pip install {package}`, or set trackers.{setting} to false.",
        ) from error
