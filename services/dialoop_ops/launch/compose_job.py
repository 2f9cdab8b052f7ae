"""What the container `job` of docker-compose.yml does: look at the files, and follow the job.

`docker compose up` starts the services once it has found that they can read and write what they
need. It ends with the job, and its exit code is the job's, however often the trainer was started.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import Channel, Credentials
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.trainer import Phase, TrainerClient, TrainerStatus
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.runtime.exit_reason import read_exit_reason

from dialoop_ops.cli.status import training_line
from dialoop_ops.stack.report.summary import ending_of, gates_of_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dialoop_services.config.job import JobConfig

START_FILE = ".compose-start.json"
"""What JOB, CODE_DIR and MODEL_DIR were at the last start, in the folder of the runs."""
_END_FILE = "trainer-end.json"
_EVERY_S = 1.0
_SILENT_S = 60.0
_START_S = 300.0


def require_readable(path: Path, name: str, shown: str, *, whole: bool = True) -> None:
    """Raise InvalidConfig (READ_FAILED) for a file or folder that we may not read.

    `whole`: also for anything in the folder.
    """
    for each in itertools.islice(_tree(path), None if whole else 1):
        wanted = os.R_OK | os.X_OK if each.is_dir() else os.R_OK
        if os.access(each, wanted):
            continue
        what = "it" if each == path else str(each.relative_to(path))
        if each.is_symlink() and not each.exists():
            raise InvalidConfig(
                f"{name} is {shown}, and {what} there is a link to what is not in the containers.",
                reason=Reason.READ_FAILED,
                remedy=f"`cp -rL {shown} COPY` makes a folder with the files themselves.",
            )
        raise InvalidConfig(
            f"{name} is {shown}, and user {os.getuid()} of the containers may not read {what}.",
            reason=Reason.READ_FAILED,
            remedy=f"`chmod -R a+rX {shown}` lets everybody read it.",
        )


def require_writable(runs: Path, run: str, shown: str) -> None:
    """Raise InvalidConfig (WRITE_FAILED) where the run's folder is not ours to write."""
    user = os.getuid()
    for each in itertools.chain((runs,), _tree(runs / run)):
        if not os.access(each, os.R_OK | os.W_OK | (os.X_OK if each.is_dir() else 0)):
            place = f"RUNS_DIR is {shown}" if shown else "The runs are in the volume dialoop_runs"
            what = "there" if each == runs else str(each.relative_to(runs))
            raise InvalidConfig(
                f"{place}, and user {user} of the containers may not write {what}.",
                reason=Reason.WRITE_FAILED,
                remedy=f"`sudo chown -R {user}:{user} {shown}` gives it to them."
                if shown
                else "`docker compose down --volumes` removes the volume with its runs.",
            )


def files_in(config: JobConfig, code: Path) -> Iterator[tuple[str, Path]]:
    """Yield what the job names in the folder: "rows.jsonl", "module:name", "file.py:name"."""
    for text in _texts(config.model_dump()):
        module = text.partition(":")[0]
        dotted = module.replace(".", "/")
        for name in dict.fromkeys((text, module, f"{dotted}.py", f"{dotted}/__init__.py")):
            path = code / name
            if os.path.isfile(path):  # noqa: PTH113, a text may be no path at all
                yield text, path


def _texts(value: Any) -> Iterator[str]:
    """Yield each text of a config, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, (list, tuple)):
        yield from (text for each in value for text in _texts(each))


def _tree(path: Path) -> Iterator[Path]:
    """Yield a path and all below it; a folder that cannot be listed is yielded alone."""
    if not os.path.exists(path):  # noqa: PTH110
        return
    yield path
    for folder, folders, files in os.walk(path):
        yield from (path / folder / name for name in (*folders, *files))


def remember_start(runs: Path, start: Mapping[str, str]) -> None:
    """Keep what a start has; InvalidConfig for what the job's last start had and this one lacks.

    A name that was set for one command alone is easily left out of the next, which would then
    train another job, or another model.
    """
    file = runs / START_FILE
    try:
        before = dict(json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        before = {}
    if not start["JOB"] or start["JOB"] == before.get("JOB"):
        lost = [f"{name}={value}" for name, value in before.items() if value and not start[name]]
        if lost:
            raise InvalidConfig(
                f"The last start here had {' '.join(lost)}, and this one does not.",
                remedy=f"Start with {' '.join(lost)}, which .env keeps for all commands"
                + ("." if start["JOB"] else "; JOB=infra/configs/demo.toml is the demo."),
            )
    fresh = file.with_suffix(".tmp")
    fresh.write_text(json.dumps(dict(start)) + "\n", encoding="utf-8")
    fresh.replace(file)


def trainer_end(run_dir: Path) -> Path:
    """Return the file into which a trainer writes why it ended."""
    return run_dir / _END_FILE


async def follow(address: str, run_dir: Path, *, last: str, token: Credentials) -> int:
    """Print how far the job is; return 0 at its end, or the code of what the trainer died of.

    A job that had ended before waits for `last`, the address of the service that starts last: `up`
    would take the end of this container for a failure to start.
    """
    newest, answered_at = "", time.monotonic()
    progress: tuple[Phase, int] | None = None
    retry = RetryPolicy(max_attempts=1)  # the loop asks again
    async with Channel(address, token=token, retry=retry) as channel:
        while True:
            status = await _status_of(TrainerClient(channel))
            ended = None if status else read_exit_reason(trainer_end(run_dir))
            line = ""
            if status is not None:
                answered_at = time.monotonic()
                if progress != (status.phase, status.num_train_steps):
                    progress = (status.phase, status.num_train_steps)
                    line = training_line(status)
            elif ended is not None:
                line = f"The trainer has ended: {ended.message}"
            elif time.monotonic() - answered_at > _SILENT_S:
                answered_at = time.monotonic()
                line = "Waiting for the trainer: `docker compose ps` and its log say more."
            if line and line != newest:
                newest = line
                _say(line)
            if ended is not None and ended.is_final:
                return ended.exit_code
            if status is not None and status.phase is Phase.DONE:
                await _wait_for(last)
                return _say_results(run_dir)
            await asyncio.sleep(_EVERY_S)


async def _status_of(trainer: TrainerClient) -> TrainerStatus | None:
    try:
        return await trainer.get_status()
    except DialoopError:  # it starts, or starts again: its container's log says why
        return None


async def _wait_for(address: str) -> None:
    """Return when somebody listens at the address, or when nobody has for long."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(_EVERY_S)
        else:
            writer.close()
            return


def _say_results(run_dir: Path) -> int:
    """Print how the job ended; return 0 for a success, else 1."""
    trainer = json.loads((run_dir / "trainer.json").read_text("utf-8"))
    evaluations, gates = trainer["evaluations"], gates_of_end(trainer)
    for how in ("greedy", "sampled"):
        pair = [evaluations.get(f"{when}_{how}") for when in ("before", "after")]
        if all(pair):
            before, after = (f"{each['mean_reward']:.3f}" for each in pair)
            failed = sum(each["num_failed"] for each in pair)
            beside = f" ({failed} episodes failed)" if failed else ""
            _say(f"Held-out reward, {how}: {before} before, {after} after{beside}.")
    _say(f"The job has ended. Its files are in {run_dir}.")
    _say(ending_of({**trainer, "gates": gates}))
    return 0 if all(gates.values()) else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
