"""`python -m dialoop_ops.console RUN...`: serve the console of runs, or export it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError, InvalidInput, NotFound
from dialoop_services.rest.app import RestServer
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.listening import address_of, bound_socket, require_safe_address
from dialoop_services.runtime.process import die_with_parent, end_command
from dialoop_services.runtime.settings import ServerSettings, load
from dialoop_services.runtime.shutdown import StopSignal
from rich.console import Console
from rich.progress import Progress

from dialoop_ops.console.app import console_app
from dialoop_ops.console.export import export_runs
from dialoop_ops.console.live_runs import LiveRuns
from dialoop_ops.console.watched_runs import WatchedRuns

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 after a stop, 2 for a wrong argument, 1 for any other failure."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="dialoop console", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port (0: a free one)")
    parser.add_argument("--export", type=Path, help="write a folder for any browser, and end")
    options = parser.parse_args(arguments)
    try:
        if options.export is not None:
            return _export(options.runs, options.export)
        # It shows what the run's files hold, for which there is no scope: tokens of some scopes do
        # not open it.
        settings = load(ServerSettings, host=options.host, port=options.port, token_file=None)
        require_safe_address(settings)
        with WatchedRuns(options.runs) as runs:
            asyncio.run(_serve(settings, runs))
    except DialoopError as error:
        sys.stderr.write(f"dialoop: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, (InvalidInput, NotFound)) else 1
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


if __name__ == "__main__":
    end_command(main)
