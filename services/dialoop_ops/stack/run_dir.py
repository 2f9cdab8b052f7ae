"""Make, resume or replace the folder of a run, runs/<name>/, and let one stack at a time use it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dialoop
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig

_MARK = "run.json"
_PRIVATE = 0o700
"""Mode of a new run's folder. One that is resumed keeps the mode that its owner gave it."""
_MAPPINGS = ("options", "loss_options")
"""Keys whose values are mappings with names of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """The folder of a run. `run_id` is part of its keys in the queue.

    Every fresh run gets a new run_id, so that a shared Redis never mixes two runs with one name.
    """

    path: Path
    run_id: str
    is_resumed: bool = False
    changes: tuple[str, ...] = ()
    """What differs in the config of a resumed run: "train.loss: grpo, now dapo"."""

    @property
    def logs(self) -> Path:
        """Return the folder with one log file per service."""
        return self.path / "logs"

    @property
    def job_file(self) -> Path:
        """Return the job file that the services of the run read."""
        return (self.path / "job.toml").resolve()

    @property
    def policies(self) -> Path:
        """Return the folder of published weights."""
        return self.path / "policies"

    def saved_progress(self) -> dict[str, Any] | None:
        """Return the progress in the newest checkpoint; None where there is none yet."""
        checkpoints = self.path / "checkpoints"
        try:
            name = json.loads((checkpoints / "latest.json").read_text("utf-8"))["name"]
            text = (checkpoints / name / "progress.json").read_text("utf-8")
            progress: dict[str, Any] = json.loads(text)
        except (OSError, ValueError, KeyError):
            return None
        return progress

    def model(self, config: JobConfig) -> Path:
        """Return the model to start from: the user's, or the tiny one made here."""
        return Path(config.model.directory) if config.model.directory else self.path / "model"


@contextmanager
def open_run(
    root: Path,
    config: JobConfig,
    *,
    fresh: bool,
    reuse: bool = False,
    started_with: Mapping[str, Any] | None = None,
) -> Iterator[RunDir]:
    """Lock the run's folder and yield it; InvalidConfig when it is in use or not to be changed.

    An existing run is resumed when it has a checkpoint (or `reuse`), and replaced when `fresh`.
    run.json keeps `started_with` beside the config; that of the last start counts.
    """
    start = {} if started_with is None else {"started_with": started_with}
    path = root / config.run
    root.mkdir(parents=True, exist_ok=True)
    with _lock_run(root / f".{config.run}.lock", path):
        yield _prepare(path, config, start, fresh=fresh, reuse=reuse)


def _prepare(
    path: Path, config: JobConfig, start: Mapping[str, Any], *, fresh: bool, reuse: bool
) -> RunDir:
    if path.exists() and any(path.iterdir()):
        _require_ours(path)
        # A run without metrics ended before it learned anything, so nothing is lost.
        if not fresh and (path / "metrics.jsonl").is_file():
            return _resume(path, config, start, reuse=reuse)
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(_PRIVATE)  # whatever the umask: it holds the queue, with all conversations
    run_id = f"{config.run}-{uuid.uuid4().hex[:8]}"
    _write_mark(path, {"run_id": run_id, "started": time.time(), **start}, config)
    return RunDir(path=path, run_id=run_id)


def mark_run(root: Path, config: JobConfig, *, run_id: str) -> None:
    """Write run.json of a run that no stack of this machine locks, as one in containers.

    The commands that read a run need it. What an earlier start wrote stays, but for the config.
    """
    path = root / config.run
    path.mkdir(exist_ok=True)
    try:
        earlier = json.loads((path / _MARK).read_text("utf-8"))
    except FileNotFoundError:
        earlier = {"started": time.time()}
    _write_mark(path, {**earlier, "run_id": run_id}, config)


def _write_mark(path: Path, mark: Mapping[str, Any], config: JobConfig) -> None:
    content = {**mark, "config": config.model_dump(mode="json")}
    fresh = path / f"{_MARK}.tmp"
    fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path / _MARK)


def _require_ours(path: Path) -> None:
    if not (path / _MARK).is_file():
        raise InvalidConfig(
            f"{path} exists and is not a run of Dialoop: it has no {_MARK}.",
            reason=Reason.NOT_A_RUN,
            remedy="Choose another name with --run. Dialoop does not change that folder.",
        )


def _resume(path: Path, config: JobConfig, start: Mapping[str, Any], *, reuse: bool) -> RunDir:
    if not (reuse or (path / "checkpoints" / "latest.json").is_file()):
        raise InvalidConfig(
            f"{path} exists and has no checkpoint to resume from.",
            reason=Reason.RUN_EXISTS,
            remedy="Choose another name with --run, or replace it with --fresh.",
        )
    mark = json.loads((path / _MARK).read_text("utf-8"))
    changes = _changes(mark.get("config", {}), config.model_dump(mode="json"))
    _write_mark(path, {**mark, **start}, config)
    return RunDir(path=path, run_id=mark["run_id"], is_resumed=True, changes=changes)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], table: str = "") -> tuple[str, ...]:
    """Return a sentence part for each key whose value differs; ports do not count."""
    changes: list[str] = []
    for key in (key for key in now if key != "ports"):
        old, new = before.get(key), now[key]
        path = f"{table}.{key}" if table else key
        if isinstance(old, dict) and isinstance(new, dict) and key not in _MAPPINGS:
            changes += _changes(old, new, path)
        elif key in before and old != new:
            changes.append(f"{path}: {json.dumps(old)}, now {json.dumps(new)}")
    return tuple(changes)


@contextmanager
def _lock_run(lock: Path, path: Path) -> Iterator[None]:
    with lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InvalidConfig(
                f"{path} is in use by process {file.read().strip() or 'unknown'}.",
                reason=Reason.RUN_IN_USE,
                remedy="Wait for it, stop it, or choose another name with --run.",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


_GIT_S = 5.0


def started_with(
    command: Sequence[str], origins: Mapping[str, str], *, branch_of: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what run.json keeps beside the config.

    `origins` has where each value not at its default is from; `branch_of` the run, step and policy
    that the run starts from, None without one.
    """
    return {
        "command": list(command),
        "origins": dict(origins),
        "branch_of": None if branch_of is None else dict(branch_of),
        "code": _code(),
        "packages": _packages(),
    }


def _code() -> dict[str, Any]:
    """Return Dialoop's version, and the commit where it runs from a git checkout."""
    code = {"version": dialoop.__version__, "commit": "", "is_changed": False}
    folder = Path(dialoop.__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return code
    commit = _git(folder, "rev-parse", "HEAD")
    changed = bool(commit) and bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return code | {"commit": commit, "is_changed": changed}


def _git(folder: Path, *words: str) -> str:
    """Return what git prints; "" where git is missing or refuses."""
    try:
        answer = subprocess.run(
            ("git", "-C", str(folder), *words),
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _packages() -> dict[str, Any]:
    """Return how many packages are installed, and the SHA-256 of their names and versions."""
    names = {f"{d.name.lower()}=={d.version}" for d in metadata.distributions() if d.name}
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
    return {"number": len(names), "sha256": digest}
