"""Checkpoints and their journal: all that a restarted trainer needs to go on as if never stopped.

The journal holds what happened since the newest checkpoint. The trainer writes a line beside the
checkpoint before another service learns of the step. While the next checkpoint is being saved, it
writes each line beside both. On the same groups a train step gives the same
weights bit for bit, so no published policy is taken back.

    {"lineage": "main", "number": 8, "train_step": 7, "trained": ["scored/1/a"], ...}
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Self

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion
from dialoop_learning.rl.staleness import publish_order, version_of_name
from safetensors import SafetensorError

from dialoop_services.runtime.durable import (
    named_failures,
    named_reads,
    sync_file,
    sync_tree,
    whole_file,
    write_json,
)
from dialoop_services.trainer.job.state import JobState
from dialoop_services.trainer.records.records import open_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dialoop_services.trainer.learner.learner import Learner


log = logging.getLogger(__name__)

_JOURNAL = "journal.jsonl"
# What safetensors and torch raise, beside OSError, where a whole file does not get into memory.
_NOT_LOADED = (SafetensorError, RuntimeError, EOFError, UnpicklingError)


@dataclass(slots=True, kw_only=True)
class Saving:
    """A checkpoint on its way to the disk: what is left to do, and the job's state as JSON."""

    directory: Path
    rest: Callable[[], None]
    progress: str = ""
    num_train_steps: int = 0


class Checkpoints:
    """The checkpoint directory of a run, which keeps the newest two.

    With `keep_steps` it also keeps those from which the newest `keep_steps` train steps can be
    repeated, one for each number of train steps.
    """

    def __init__(self, run_dir: Path, *, keep_steps: int = 0) -> None:
        self._root = run_dir / "checkpoints"
        self._keep_steps = keep_steps
        # The folder that this process restored or saved, and the one that is being saved.
        self._current: Path | None = None
        self._begun: Path | None = None
        self._moving = threading.Lock()  # held by who writes the journal, or changes where it is

    @property
    def newest(self) -> Path | None:
        """Return the folder of the newest whole checkpoint; None without one."""
        if self._current is None:
            self._current = next(iter(self._whole_ones()), None)
        return self._current

    def _whole_ones(self) -> list[Path]:
        """Return the folders of checkpoints that were finished, the newest first.

        Where a disk has damaged latest.json, every folder with a progress.json counts.
        """
        if not self._pointer.is_file():
            return []
        with named_reads(self._root):
            folders = [p for p in self._root.iterdir() if (p / "progress.json").is_file()]
        folders.sort(key=_saving_order, reverse=True)
        name = read_json(self._pointer).get("name", "")
        if self._root / name in folders:
            named = self._root / name
            folders = [named, *(path for path in folders if path != named)]
        return [path for path in folders if read_json(path / "progress.json")]

    @property
    def _pointer(self) -> Path:
        return self._root / "latest.json"

    def save(self, learner: Learner, state: JobState) -> Path:
        """Write a checkpoint and return its folder; see `capture`, `begin` and `finish`."""
        saving = self.capture(learner, state)
        self.begin(saving, state)
        return self.finish(saving)

    def capture(self, learner: Learner, state: JobState) -> Saving:
        """Copy the learner as it is now into a new folder; after an error nothing has changed."""
        directory = self._fresh_directory(f"{state.policy_version}-{state.num_train_steps:06d}")
        try:
            return Saving(directory=directory, rest=learner.snapshot(directory))
        except Exception:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def begin(self, saving: Saving, state: JobState) -> None:
        """Keep the job's state as it is now; the journal's lines go to this checkpoint, too.

        Call it where the journal is written, before the next line. One checkpoint is saved at a
        time.
        """
        saving.progress = json.dumps(state.to_json(), indent=2) + "\n"
        saving.num_train_steps = state.num_train_steps
        self._begun = saving.directory

    def finish(self, saving: Saving) -> Path:
        """Bring a checkpoint to the disk and return its folder; it counts once latest.json does so.

        When this returns, a power loss does not lose it. After an error nothing has changed.
        """
        previous, directory = self.newest, saving.directory
        try:
            saving.rest()
            with whole_file(directory / "progress.json") as temporary:
                temporary.write_text(saving.progress, "utf-8")
            with named_failures(directory):
                sync_tree(directory)
            write_json(self._pointer, {"name": directory.name})
        except Exception:
            with self._moving:
                self._begun = None
            shutil.rmtree(directory, ignore_errors=True)
            raise
        with self._moving:
            self._current, self._begun = directory, None
        kept = {directory, previous}
        if self._keep_steps:
            kept |= self._before_steps(saving.num_train_steps - self._keep_steps)
        for other in self._root.iterdir():
            # Only the one that this process restored or saved before is known to be readable.
            if other.is_dir() and other not in kept:
                shutil.rmtree(other)
        return directory

    def add_to_journal(self, line: str) -> None:
        """Add a line to the newest one's journal, and to that of one that is being saved.

        A kill may leave either of them. There is none before the first checkpoint.
        """
        with self._moving:
            for folder in (self.newest, self._begun):
                if folder is not None:
                    _add_line(folder / _JOURNAL, line)

    @property
    def num_unsaved_bytes(self) -> int:
        """Return what a next checkpoint adds to the disk, if it is as large as the newest one.

        While one is saved, it is what is left of that: the oldest makes room for the next.
        """
        newest = 0 if self.newest is None else _size_of(self.newest)
        return max(0, newest - (0 if self._begun is None else _size_of(self._begun)))

    def before_step(self, train_step: int) -> tuple[Path, int] | None:
        """Return the newest whole checkpoint before a train step, and its number of steps."""
        steps = {path: _steps_in(path) for path in self._whole_ones()}
        earlier = [(path, number) for path, number in steps.items() if number < train_step]
        return max(earlier, key=lambda pair: pair[1], default=None)

    def _before_steps(self, first: int) -> set[Path]:
        """Return the checkpoints after `first` train steps, and the newest up to there."""
        newest: dict[int, Path] = {}
        for path in self._whole_ones():  # the newest first
            newest.setdefault(_steps_in(path), path)
        start = max((number for number in newest if number <= first), default=0)
        return {path for number, path in newest.items() if number >= start}

    def restore(self, learner: Learner) -> JobState | None:
        """Load the newest checkpoint that every rank can read, and return its state; None without.

        The ranks agree on it before any of them loads. Only damage passes a checkpoint over: a
        disk that fails, a missing permission or a lack of memory raises PreconditionFailed
        (READ_FAILED). Raises InvalidConfig (NO_CHECKPOINT) where every checkpoint is damaged.
        """
        if not self._pointer.is_file():
            return None
        newest = str(read_json(self._pointer).get("name", "latest.json"))
        damage = "progress.json is missing or damaged"
        for directory in self._whole_ones():
            if damage := learner.damage_in(directory):
                log.error("The checkpoint %s is damaged: %s.", directory.name, damage)
                continue
            with named_reads(directory, *_NOT_LOADED):
                learner.restore(directory)
            if directory.name != newest:
                log.error(
                    "%s cannot be read, so the trainer continues from the checkpoint %s.",
                    newest,
                    directory.name,
                )
            self._current = directory
            return JobState.from_json(read_json(directory / "progress.json"))
        raise InvalidConfig(
            f"No checkpoint in {self._root} can be read by every rank: {damage}.",
            reason=Reason.NO_CHECKPOINT,
            remedy="Put the run's directory where every rank reads it, restore the folder from a "
            "copy, or start a new run with --fresh.",
        )

    def _fresh_directory(self, name: str) -> Path:
        """Make a new directory, so that a kill while writing does not harm the newest one."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        directory = next(self._root / n for n in names if not (self._root / n).exists())
        directory.mkdir(parents=True)
        return directory


def _saving_order(directory: Path) -> tuple[tuple[int, int], int, int, int, str]:
    """Return the place of a checkpoint among those of its run; a damaged one comes first."""
    progress = read_json(directory / "progress.json")
    if "policy_version" not in progress:
        return (-1, -1), 0, 0, 0, directory.name
    order = publish_order(PolicyVersion(**progress["policy_version"]))
    # A second one of the same step has "-2" at its end.
    num_steps = (progress.get(f"num_{kind}_steps", 0) for kind in ("warm_start", "train"))
    return order, *num_steps, len(directory.name), directory.name


def _add_line(path: Path, line: str) -> None:
    is_new = not path.exists()
    with named_failures(path), open_lines(path) as file:
        file.write(line)
        file.flush()
        sync_file(path)
        if is_new:
            sync_file(path.parent)


def _size_of(directory: Path) -> int:
    with suppress(FileNotFoundError):  # it has been replaced, or its files get their names
        return sum(path.stat().st_size for path in directory.rglob("*"))
    return 0


def _steps_in(directory: Path) -> int:
    return int(read_json(directory / "progress.json").get("num_train_steps", 0))


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file says; nothing, with a line in the log, if it is damaged.

    Raises PreconditionFailed (READ_FAILED) where the file cannot be read at all.
    """
    with named_reads(path):
        data = path.read_bytes()
    try:
        content = json.loads(data)
    except ValueError as error:
        log.error("%s cannot be read (%s).", path.name, type(error).__name__)
        return {}
    return content if isinstance(content, dict) else {}


def lineage_after_restore(
    restored: PolicyVersion, *published: PolicyVersion | None
) -> PolicyVersion:
    """Return the version of the restored weights, given versions that others know as published.

    When newer versions were published and are now discarded, their numbers must not return with
    other weights, so a new lineage starts (main, main.1, main.2, ...).
    """
    ages = [publish_order(version) for version in published if version is not None]
    newest_generation, number = max(ages, default=(0, 0))
    if (newest_generation, number) <= publish_order(restored):
        return restored
    base = restored.lineage.partition(".")[0]
    return PolicyVersion(lineage=f"{base}.{newest_generation + 1}", number=restored.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestPolicy:
    """The newest published policy, as `policies/latest.json` names it."""

    version: PolicyVersion
    file_name: str
    sha256: str


def published_policy(run_dir: Path) -> LatestPolicy | None:
    """Return the newest published policy, if there is one.

    Where a disk has damaged latest.json, it is the newest whose weights are there.
    """
    policies = run_dir / "policies"
    pointer = policies / "latest.json"
    if not pointer.is_file():
        return None
    data = read_json(pointer)
    if data:
        return LatestPolicy(
            version=PolicyVersion(lineage=data["lineage"], number=data["number"]),
            file_name=PurePath(data["path"]).name,
            sha256=data["sha256"],
        )
    weights = max(
        policies.glob("*/*.safetensors"),
        key=lambda path: publish_order(version_of_name(path.parent.name)),
        default=None,
    )
    if weights is None:
        return None
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return LatestPolicy(
        version=version_of_name(weights.parent.name),
        file_name=weights.name,
        sha256=digest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """A train step, a publish without one, groups dropped before a step, or an evaluation's result.

    policy_version: the version after it. trained: lease ids. dropped: lease ids by reason.
    candidates: metrics of the groups that were leased for the step, since the queue keeps only some
    of them. figures: what metrics need of groups dropped before the next step. num_in_a_row: groups
    and batches without a signal in a row by then. num_empty_batches: of the whole job by then.
    depth, oldest: as JobState has them by then. evaluated: the train step after which an evaluation
    was due. judged: its result, None if it failed.
    """

    train_step: int
    policy_version: PolicyVersion
    trained: tuple[str, ...] = ()
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    candidates: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[list[dict[str, Any]]] = ()
    num_in_a_row: tuple[int, int] = (0, 0)
    num_empty_batches: int = 0
    depth: int | None = None
    oldest: int | None = None
    evaluated: int | None = None
    judged: float | None = None

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Return all leases of the entry."""
        return self.trained + tuple(i for lease_ids in self.dropped.values() for i in lease_ids)

    @property
    def is_before_a_step(self) -> bool:
        """Return whether it says only what was dropped before a train step."""
        return bool(self.dropped) and not self.trained

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, without what is empty."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        version: PolicyVersion = values.pop("policy_version")
        named = {"lineage": version.lineage, "number": version.number}
        return named | {k: v for k, v in values.items() if v not in ((), [], {}, None)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the entry that `to_json` wrote."""
        values = dict(data)
        version = PolicyVersion(lineage=values.pop("lineage"), number=values.pop("number"))
        dropped = values.pop("dropped", {})
        return cls(
            policy_version=version,
            trained=tuple(values.pop("trained", ())),
            dropped={reason: tuple(leases) for reason, leases in dropped.items()},
            num_in_a_row=tuple(values.pop("num_in_a_row")),
            **values,
        )


class Journal:
    """The entries since the newest checkpoint, in its folder."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def add(self, entry: JournalEntry) -> None:
        """Add a line; when this returns, neither a kill nor a power loss loses it."""
        self._checkpoints.add_to_journal(json.dumps(entry.to_json()) + "\n")

    def entries(self) -> tuple[JournalEntry, ...]:
        """Return the entries since the checkpoint, up to a line that a kill or the disk damaged."""
        newest = self._checkpoints.newest
        path = None if newest is None else newest / _JOURNAL
        if path is None or not path.is_file():
            return ()
        entries: list[JournalEntry] = []
        for line in path.read_text("utf-8", errors="replace").split("\n")[:-1]:
            try:
                entries.append(JournalEntry.from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                log.error("The journal is damaged.", extra={"num_entries": len(entries)})
                break
        return tuple(entries)
