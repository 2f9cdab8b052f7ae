"""Run `dialoop console` and `dialoop report`: serve the console of runs, or write it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from dialoop.errors import AlreadyExists
from dialoop.reasons import Reason
from dialoop_services.rest.app import RestServer
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.listening import address_of, bound_socket, require_safe_address
from dialoop_services.runtime.process import die_with_parent
from dialoop_services.runtime.settings import ServerSettings, load
from dialoop_services.runtime.shutdown import StopSignal
from rich.console import Console
from rich.progress import Progress

from dialoop_ops.cli.console import say, say_json
from dialoop_ops.console.app import console_app
from dialoop_ops.console.export import export_runs, report_runs
from dialoop_ops.console.live_runs import LiveRuns
from dialoop_ops.console.watched_runs import WatchedRuns
from dialoop_ops.runs.run_config import find_run


def console(arguments: argparse.Namespace) -> int:
    """Serve until a stop, or write the folder that --export names; return 0."""
    die_with_parent()
    run_dirs = [find_run(name, arguments.root) for name in arguments.runs]
    if arguments.export is not None:
        return _export(run_dirs, arguments.export)
    # It shows what the run's files hold, for which there is no scope: tokens of some scopes do
    # not open it.
    settings = load(ServerSettings, host=arguments.host, port=arguments.port, token_file=None)
    require_safe_address(settings)
    with WatchedRuns(run_dirs) as runs:
        asyncio.run(_serve(settings, runs))
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write runs into one page; return 0. A file that --to names must not exist."""
    run_dirs = [find_run(name, arguments.root) for name in arguments.runs]
    file = arguments.to or run_dirs[0] / "report.html"
    if arguments.to is not None and file.exists():
        raise AlreadyExists(
            f"{file} exists already.", reason=Reason.EXPORT_EXISTS, remedy="Name a new file."
        )
    with WatchedRuns(run_dirs) as runs:
        num_bytes = report_runs(runs.indexes, file)
    if arguments.json:
        say_json({"page": str(file), "num_bytes": num_bytes})
    else:
        say(f"{file}: {num_bytes / 1e6:.1f} MB; open it in a browser")
    return 0


def _export(run_dirs: Sequence[Path], folder: Path) -> int:
    console = Console(stderr=True)
    with (
        WatchedRuns(run_dirs) as runs,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        bars = {name: progress.add_task(name, total=None) for name in runs.indexes}
        num_bytes = export_runs(
            runs.indexes,
            folder,
            show=lambda name, done, total: progress.update(bars[name], completed=done, total=total),
        )
    sys.stdout.write(f"{folder / 'index.html'}: {num_bytes / 1e6:.1f} MB; open it in a browser\n")
    return 0


async def _serve(settings: ServerSettings, runs: WatchedRuns) -> None:
    bound = bound_socket(settings.host, settings.port)
    port = bound.getsockname()[1]
    token = Token(settings.token.get_secret_value(), settings.admin_token.get_secret_value())
    async with LiveRuns() as live, StopSignal() as stop:
        server = RestServer(console_app(runs, live, token=token), drain_s=1.0)
        await server.open(bound)
        sys.stdout.write(f"console of {', '.join(runs.indexes)}: ")
        sys.stdout.write(f"http://{address_of(settings.host, port)}/ (Ctrl-C stops it)\n")
        sys.stdout.flush()
        try:
            await stop.wait()
        finally:
            await server.close()
