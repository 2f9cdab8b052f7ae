"""`python -m dialoop_services.stack [CONFIG]` serves; `... train CONFIG` runs a whole job.

`python -m dialoop_services.stack config [CONFIG]` prints the config with all defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError, InvalidConfig
from rich.console import Console

from dialoop_services.config.file import LoadedConfig, Override, load_with_origins, toml_of
from dialoop_services.stack import job, preflight
from dialoop_services.stack.layout import variables_of_tables
from dialoop_services.stack.processes.log_stream import LogStream
from dialoop_services.stack.processes.processes import adopt_orphans, descendants, kill
from dialoop_services.stack.run_dir import opened
from dialoop_services.stack.running import planned, running_stack

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from dialoop_services.config.job import JobConfig
    from dialoop_services.stack.run_dir import RunDir
    from dialoop_services.stack.running import Plan

ROOT = Path("runs")
FIXED_PORTS = MappingProxyType(
    {
        name + door: first + number
        for door, first in (("", 7000), ("_rest", 8000))
        for number, name in enumerate(
            ("environment", "inference", "replay", "scorer", "trainer", "collector"), start=1
        )
    }
)
"""Where a stack without a config listens: gRPC from 7001 on, REST from 8001 on."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 for success, 2 for a mistake in what was asked, 1 for any other failure."""
    given = _parser().parse_args(_with_command(sys.argv[1:] if arguments is None else arguments))
    try:
        loaded = _config(given)
        config = loaded.config
        if given.command == "config":
            sys.stdout.write(toml_of(config, loaded.origins if given.origins else None))
            return 0
        preflight.check(config)
        is_job = given.command == "train"
        with opened(ROOT, config, fresh=given.fresh, reuse=not is_job) as run_dir:
            return _run(config, run_dir, is_job=is_job)
    except (DialoopError, BaseExceptionGroup) as error:
        return _fail(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dialoop_services.stack", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "start every service and stay (the default)"),
        ("train", "run a job to its end and sum it up"),
        ("config", "print the config with all defaults, as TOML"),
    ):
        command = commands.add_parser(name, help=text)
        count = None if name == "train" else "?"
        command.add_argument("config", type=Path, nargs=count, help="TOML job config")
        command.add_argument("--run", default="", help="name of the run, instead of the config's")
        command.add_argument("--fresh", action="store_true", help="replace an existing run")
        if name == "config":
            command.add_argument(
                "--origins", action="store_true", help="say where each value is from"
            )
    return parser


def _with_command(arguments: Sequence[str]) -> list[str]:
    """Serving needs no word: `python -m dialoop_services.stack demo.toml`."""
    words = list(arguments)
    if words[:1] and words[0] in ("serve", "train", "config", "-h", "--help"):
        return words
    return ["serve", *words]


def _config(given: argparse.Namespace) -> LoadedConfig:
    said = variables_of_tables(os.environ)
    if given.config is None and given.command != "config":
        said = [*_serving_alone(), *said]
    return load_with_origins(given.config, environment=os.environ, run=given.run, overrides=said)


def _serving_alone() -> list[Override]:
    """What a stack without a config departs from: nothing is trained unless a config says so.

    A trainer's rpc can publish all the same. The ports are those that documents and scripts name,
    and that compose has.
    """
    values = {"train.num_steps": 0, "evaluation.num_tasks": 0, "ports": dict(FIXED_PORTS)}
    origin = "no config"
    return [Override(path=path, value=value, origin=origin) for path, value in values.items()]


def _run(config: JobConfig, run_dir: RunDir, *, is_job: bool) -> int:
    console = Console()
    adopt_orphans()
    log = LogStream(console, run_dir.logs, least="WARNING" if is_job else "INFO")
    if run_dir.is_resumed:
        log.say("stack", f"resuming {run_dir.path}")
    plan = planned(config, run_dir)
    work = job.train(plan, log, console) if is_job else _serve(plan, log)
    try:
        return asyncio.run(_until_told_to_stop(work))
    finally:
        kill(descendants(os.getpid()))


async def _serve(plan: Plan, log: LogStream) -> int:
    async with running_stack(plan, log):
        log.say("stack", "all services are ready; Ctrl-C stops them")
        await asyncio.Event().wait()
    return 0


async def _until_told_to_stop(work: Coroutine[None, None, int]) -> int:
    """The work's exit code, or 128 + the number of the signal that ended it early."""
    loop = asyncio.get_running_loop()
    told: list[int] = []
    running = asyncio.ensure_future(work)

    def stop(number: int) -> None:
        if told:  # asked twice: no more patience with anybody's orderly end
            kill(descendants(os.getpid()))
        else:
            running.cancel()
        told.append(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await running
    except asyncio.CancelledError:
        if not told:
            raise
        return 128 + told[0]


def _fail(error: BaseException) -> int:
    """Say what went wrong in one line; what is not ours keeps its traceback."""
    known = _known(error)
    if known is None:
        raise error
    sys.stderr.write(f"dialoop stack: {' '.join(str(known).split())}\n")
    return 2 if isinstance(known, InvalidConfig) else 1


def _known(error: BaseException) -> DialoopError | None:
    """The error of ours in a group of any depth; a wrong setting before any other."""
    if isinstance(error, BaseExceptionGroup):
        found = [known for inner in error.exceptions if (known := _known(inner))]
        found.sort(key=lambda known: not isinstance(known, InvalidConfig))
        return found[0] if found else None
    return error if isinstance(error, DialoopError) else None


if __name__ == "__main__":
    sys.exit(main())
