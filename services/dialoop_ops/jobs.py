"""Train from Python: a whole job, its services in processes of their own or in this one.

result = dialoop_ops.train("job.toml", on_metrics=lambda row: print(row["kind"], row["train_step"]))
result.summary["heldout_sampled_after"], result.run_dir       # 0.99, runs/mine

async with dialoop_ops.Job({"train": {"num_steps": 20}}, in_process=True) as job:
    async for row in job.metrics():                           # as metrics.jsonl gets them
        ...
    result = await job.result()

A config is the path of a job file, or a mapping of the same tables.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from dialoop.clients.blocking.loop import BackgroundLoop
from dialoop.errors import InvalidConfig, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop_services.config.file import LoadedConfig, load_with_origins, parse_config, toml_of

from dialoop_ops.stack.in_process import read_job, train_in_process

Config = Mapping[str, Any] | str | Path
Row = dict[str, Any]
"""A line of metrics.jsonl: `kind`, `train_step`, `policy_version` and the kind's own values."""
OnMetrics = Callable[[Row], Awaitable[None] | None]

_POLL_S = 0.2
_STOPS_IN_S = 90.0
_PREFIX = "dialoop: "
_PARENT = "DIALOOP_PARENT_PID"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """A job that has ended: its folder, and the content of its summary.json."""

    run_dir: Path
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Return whether every gate of the config holds."""
        return all(self.summary.get("gates", {}).values())


class JobOptions(TypedDict, total=False):
    """The arguments of `Job` beside the config."""

    in_process: bool
    folder: str | Path
    fresh: bool
    quiet: bool


def train(
    config: Config, *, on_metrics: OnMetrics | None = None, **options: Unpack[JobOptions]
) -> JobResult:
    """Run a job to its end and return its result; `options` are those of `Job`.

    `on_metrics` is called with each new row of metrics.jsonl; it may be async. Ctrl-C stops the
    job, which then keeps a checkpoint. Raise InvalidConfig for a mistake in the config,
    PreconditionFailed (EVENT_LOOP_RUNNING) inside an event loop, and Unavailable when the job
    fails.
    """
    _require_no_loop()
    return asyncio.run(train_async(config, on_metrics=on_metrics, **options))


async def train_async(
    config: Config, *, on_metrics: OnMetrics | None = None, **options: Unpack[JobOptions]
) -> JobResult:
    """Do the same inside an event loop, such as a notebook's."""
    async with Job(config, **options) as job:
        async for row in job.metrics():
            if on_metrics is not None:
                answer = on_metrics(row)
                if inspect.isawaitable(answer):
                    await answer
        return await job.result()


def _require_no_loop() -> None:
    if asyncio._get_running_loop() is not None:
        raise PreconditionFailed(
            "A blocking call was made inside a running event loop, which it would stop.",
            reason=Reason.EVENT_LOOP_RUNNING,
            remedy="Write `await dialoop_ops.train_async(...)`, or use dialoop_ops.Job with "
            "`async with`.",
        )


class Job:
    """A job that runs from entering its context on; leaving it before its end stops the job.

    config: path of a job file, or a mapping of its tables; relative paths in a mapping start in the
    current folder. in_process: run the services in this process, with the transformers engine and
    the queue in memory, instead of in processes of their own. folder: where runs are kept, each in
    a folder named as the run. fresh: replace an existing run of that name instead of resuming it.
    quiet: print nothing.
    """

    def __init__(
        self,
        config: Config,
        *,
        in_process: bool = False,
        folder: str | Path = "runs",
        fresh: bool = False,
        quiet: bool = False,
    ) -> None:
        self._config = config
        self._folder = Path(folder)
        self._fresh = fresh
        self._quiet = quiet
        self._is_in_process = in_process
        self._loaded = _load(config, in_process=in_process)
        self._tail = _Tail(self.run_dir / "metrics.jsonl")
        self._ended: asyncio.Task[Mapping[str, Any]] | None = None

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
        return self._folder / str(self._loaded.config.run)

    async def __aenter__(self) -> Self:
        if self._ended is not None:
            raise PreconditionFailed("This job was started already.", remedy="Make a new Job.")
        self._tail.skip_what_is_there()
        run = self._run_here if self._is_in_process else self._run_processes
        self._ended = asyncio.create_task(run())
        return self

    async def __aexit__(self, *_: object) -> None:
        ended = self._require_started()
        ended.cancel()
        await asyncio.wait([ended])

    async def metrics(self) -> AsyncIterator[Row]:
        """Yield each new row of metrics.jsonl until the job ends; `result` says how it did."""
        ended = self._require_started()
        while True:
            is_over = ended.done()  # before the last read, so that no row is missed
            for row in self._tail.rows():
                yield row
            if is_over:
                return
            await asyncio.wait([ended], timeout=_POLL_S)

    async def result(self) -> JobResult:
        """Wait for the end; raise what ended the job if it did not finish."""
        ended = self._require_started()
        await asyncio.wait([ended])
        if ended.cancelled():
            raise Unavailable(
                "The job was left before its end, and stopped.",
                reason=Reason.JOB_FAILED,
                remedy="Run it again without `fresh` to resume it.",
            )
        summary = ended.result()
        return JobResult(run_dir=self.run_dir, summary=summary)

    def _require_started(self) -> asyncio.Task[Mapping[str, Any]]:
        if self._ended is None:
            raise PreconditionFailed(
                "The job has not started.", remedy="Enter it: `async with dialoop_ops.Job(config)`."
            )
        return self._ended

    async def _run_here(self) -> Mapping[str, Any]:
        return await train_in_process(self._loaded, folder=self._folder, fresh=self._fresh)

    async def _run_processes(self) -> Mapping[str, Any]:
        """Run the stack as `dialoop train` does, in a process of its own."""
        is_file = not isinstance(self._config, Mapping)
        words = ["-m", "dialoop_ops.stack", "train", str(self._config) if is_file else "-"]
        words += ["--folder", str(self._folder), *(["--fresh"] if self._fresh else [])]
        pipe, quiet = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=quiet if is_file else pipe,
            stdout=quiet if self._quiet else None,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C reaches this process, which then stops the stack
            env=os.environ | {_PARENT: str(os.getpid())},  # it ends with this process
        )
        text = None if is_file else toml_of(self._loaded.config).encode()
        try:
            _, errors = await process.communicate(text)
        except asyncio.CancelledError:
            await _stop(process)
            raise
        return self._conclude(process.returncode or 0, errors.decode(errors="replace"))

    def _conclude(self, code: int, errors: str) -> Mapping[str, Any]:
        sentences = [line for line in errors.splitlines() if line.startswith(_PREFIX)]
        sentence = sentences[-1].removeprefix(_PREFIX) if sentences else ""
        if code == 2:
            raise InvalidConfig(sentence or errors.strip())
        if code and (sentence or code != 1):
            raise Unavailable(
                sentence or f"The job ended with exit code {code}: {errors.strip()[-500:]}",
                reason=Reason.JOB_FAILED,
                remedy="" if sentence else f"Read {self.run_dir / 'logs'}.",
            )
        summary: Mapping[str, Any] = json.loads((self.run_dir / "summary.json").read_text("utf-8"))
        return summary


class BlockingJob:
    """The same job for threads without an event loop: `with BlockingJob(config) as job`."""

    def __init__(self, config: Config, **options: Unpack[JobOptions]) -> None:
        self._job = Job(config, **options)
        self._loop: BackgroundLoop | None = None

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
        return self._job.run_dir

    def __enter__(self) -> Self:
        _require_no_loop()
        self._loop = BackgroundLoop()
        self._loop.run(self._job.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        loop = self._require_loop()
        loop.run(self._job.__aexit__())
        loop.close()

    def metrics(self) -> Iterator[Row]:
        """Yield each new row of metrics.jsonl until the job ends."""
        return self._require_loop().iterate(self._job.metrics())

    def result(self) -> JobResult:
        """Wait for the end; raise what ended the job if it did not finish."""
        return self._require_loop().run(self._job.result())

    def _require_loop(self) -> BackgroundLoop:
        if self._loop is None:
            raise PreconditionFailed(
                "The job has not started.", remedy="Enter it: `with BlockingJob(config)`."
            )
        return self._loop


class _Tail:
    """Reads the rows that are added to a file, also when another file takes its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._position = 0

    def skip_what_is_there(self) -> None:
        """Begin at the present end of the file."""
        with suppress(OSError):
            status = self._path.stat()
            self._inode, self._position = status.st_ino, status.st_size

    def rows(self) -> list[Row]:
        """Return the rows that were added since the last call."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._position = inode, 0
                file.seek(self._position)
                content = file.read()
        except OSError:
            return []
        whole, newline, _ = content.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask the stack to save and stop; end it after a while if it does not."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOPS_IN_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.communicate()


def _load(config: Config, *, in_process: bool) -> LoadedConfig:
    """Return the checked config; InvalidConfig names the first mistake."""
    if in_process:
        return read_job(config)
    if not isinstance(config, Mapping):
        return load_with_origins(Path(config), environment=os.environ)
    job = parse_config(dict(config), source="the config")
    return LoadedConfig(config=job, origins={}, folder=Path.cwd())
