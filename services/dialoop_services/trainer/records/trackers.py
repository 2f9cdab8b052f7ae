"""Trackers: other places that get the rows of metrics.jsonl.

The trainer always writes metrics.jsonl; `[trackers] tensorboard = true` and the like add others.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A receiver of every row of metrics.jsonl: kind, train_step, policy_version, values."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a row."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in `directory`, which `tensorboard --logdir` shows."""

    def __init__(self, directory: Path) -> None:
        module = _import_tracker("tensorboardX", setting="tensorboard")
        self._writer = module.SummaryWriter(logdir=str(directory), flush_secs=5)

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

    def __init__(self, package: str, settings: TrainerSettings) -> None:
        module = _import_tracker(package, setting=package)
        by_id = {"id": settings.run} if package == "wandb" else {}
        try:
            self._run = module.init(
                project=settings.trackers.project,
                name=settings.run,
                config=_public_settings(settings),
                resume="allow",
                **by_id,
            )
        except Exception as error:
            log.exception("The tracker %s cannot start.", package)
            raise InvalidConfig(
                f"trackers.{package} is true, and {package} cannot start a run "
                f"({type(error).__name__}).",
                reason=Reason.TRACKER_REFUSED,
                remedy=f"Log in to {package}, or set trackers.{package} to false.",
            ) from error

    def log(self, row: Mapping[str, Any]) -> None:
        """Log every number and the step as one more, because a resumed run goes back in steps."""
        self._run.log({**numbers_of(row), "train_step": row["train_step"]})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class Careful:
    """A tracker whose first failure ends its use, so that it does not end the training."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._has_failed = False

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a row, unless an earlier one failed."""
        if self._has_failed:
            return
        try:
            self._tracker.log(row)
        except Exception:
            self._has_failed = True
            log.exception("A tracker failed and is left out from now on.")

    def close(self) -> None:
        """Close the tracker, even if it failed."""
        try:
            self._tracker.close()
        except Exception:
            log.exception("A tracker could not be closed.")


def trackers_of(settings: TrainerSettings) -> tuple[Tracker, ...]:
    """Return the trackers that the settings name.

    Raises InvalidConfig (TRACKER_MISSING) for a package that is not installed, and
    (TRACKER_REFUSED) for a tracker that does not start a run.
    """
    trackers = []
    if settings.trackers.tensorboard:
        trackers.append(Careful(TensorBoard(settings.run_dir / "tensorboard")))
    trackers += [
        Careful(HostedRun(package, settings))
        for package in ("trackio", "wandb")
        if getattr(settings.trackers, package)
    ]
    return tuple(trackers)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's numbers as {"train/reward": 0.5, "train/by_staleness/0/ratio": 1.0}."""
    label = f"{row['kind']}/{row['label']}" if "label" in row else str(row["kind"])
    skipped = ("time", "train_step", "kind", "label")
    return dict(_numbers({k: v for k, v in row.items() if k not in skipped}, label))


def _numbers(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        path = f"{prefix}/{name}"
        if isinstance(value, dict):
            yield from _numbers(value, path)
        elif isinstance(value, (int, float)):
            yield path, float(value)


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
