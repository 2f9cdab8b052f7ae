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
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.user_functions import loop_of_users, raised_at, resolve

from dialoop_services.trainer.records.rows import numbers_of

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is made with.

    project, name: of the run. A job that is started again has the same, and continues the run.
    directory: the run's folder. settings: the trainer's, without the token and addresses.
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
        """Log a row. The trainer waits for it."""

    def close(self) -> Any:
        """Write what is left."""


class TensorBoard:
    """Event files in the run's folder, which `tensorboard --logdir` shows."""

    def __init__(self, run: TrackedRun) -> None:
        module = _import_tracker("tensorboardX", setting="tensorboard")
        folder = str(run.directory / "tensorboard")
        self._writer = module.SummaryWriter(logdir=folder, flush_secs=5)

    def log(self, row: Mapping[str, Any]) -> None:
        """Log every number of the row under the train step."""
        for name, value in numbers_of(row).items():
            self._writer.add_scalar(name, value, global_step=row["train_step"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class HostedRun:
    """A run of Weights & Biases, or of trackio, which has the same interface.

    A resumed job continues its run: Weights & Biases finds it by id, trackio by name.
    """

    def __init__(self, package: str, run: TrackedRun) -> None:
        module = _import_tracker(package, setting=package)
        by_id = {"id": run.name} if package == "wandb" else {}
        self._run = module.init(
            project=run.project, name=run.name, config=run.settings, resume="allow", **by_id
        )

    def log(self, row: Mapping[str, Any]) -> None:
        """Log every number and the step as one more, because a resumed run goes back in steps."""
        self._run.log({**numbers_of(row), "train_step": row["train_step"]})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class GuardedTracker:
    """A tracker whose first failure ends its use, so that it does not end the training."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._has_failed = False

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a row, unless an earlier one failed."""
        if self._has_failed:
            return
        try:
            _wait_for(self._tracker.log(row))
        except Exception:
            self._has_failed = True
            log.exception("A tracker failed and is left out from now on.")

    def close(self) -> None:
        """Close the tracker, even if it failed."""
        try:
            _wait_for(self._tracker.close())
        except Exception:
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
    return tuple(GuardedTracker(_start(name, maker, run)) for name, maker in makers.items())


def _start(name: str, maker: Callable[[TrackedRun], Tracker], run: TrackedRun) -> Tracker:
    try:
        tracker: Tracker = _wait_for(maker(run))
    except DialoopError:
        raise
    except Exception as error:
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
    return tracker


def _public_settings(settings: TrainerSettings) -> dict[str, Any]:
    """Return the settings without the token and this machine's address."""
    values: dict[str, Any] = settings.model_dump(mode="json", exclude={"token", "host", "port"})
    return values


def _import_tracker(package: str, *, setting: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InvalidConfig(
            f"trackers.{setting} is true, and the package {package} is not installed.",
            reason=Reason.TRACKER_MISSING,
            remedy=f"Run `pip install {package}`, or set trackers.{setting} to false.",
        ) from error
