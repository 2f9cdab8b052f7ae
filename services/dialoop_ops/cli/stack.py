"""Run `dialoop up`, `down`, `train`, `export`, `config` and the like in their own processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.clients.tls import rest_scheme
from dialoop.errors import InvalidConfig, NotFound, Unavailable
from dialoop.reasons import Reason
from dialoop.running_stacks import find_stack, find_stacks, read_announcement

from dialoop_ops.cli.console import complain, say, say_json

if TYPE_CHECKING:
    import argparse

    from dialoop.running_stacks import Stack

DEFAULT_RUN = "default"
"""The run that `dialoop up` without a config serves."""

_POLL_S = 0.2


def up(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or start and leave it running."""
    words = ["serve", *_job_words(arguments)]
    return _start_detached(words, arguments) if arguments.detach else _become(words)


def train(arguments: argparse.Namespace) -> int:
    """Run a whole job, or one for each seed."""
    words = ["train", *_job_words(arguments)]
    words += ["--seeds", arguments.seeds] if arguments.seeds else []
    words += ["--from", arguments.branch] if arguments.branch else []
    words += ["--on", arguments.on] if arguments.on else []
    words += ["--print"] if arguments.print else []
    return _become(words)


def print_config(arguments: argparse.Namespace) -> int:
    """Print the effective config."""
    words = [str(arguments.config)] if arguments.config else []
    words += ["--origins"] if arguments.origins else []
    words += _json_words(arguments)
    return _become(["config", *words, *_set_words(arguments)])


def check_config(arguments: argparse.Namespace) -> int:
    """Say what is wrong in a config, without starting anything."""
    return _become(
        ["check", str(arguments.config), *_json_words(arguments), *_set_words(arguments)]
    )


def import_config(arguments: argparse.Namespace) -> int:
    """Print the job file for another trainer's config."""
    return _become(["import", str(arguments.config)])


def export(arguments: argparse.Namespace) -> int:
    """Write a policy as a model directory."""
    named = Path(arguments.run)
    run_dir = named if (named / "run.json").is_file() else arguments.root / arguments.run
    words = [str(run_dir), arguments.version, str(arguments.directory)]
    words += ["--merged"] if arguments.merged else []
    words += ["--base", arguments.base] if arguments.base else []
    words += _json_words(arguments)
    return _become(words, module="dialoop_ops.policies.export")


def console(arguments: argparse.Namespace) -> int:
    """Serve the console of runs, or write it into a folder."""
    words = ["--host", arguments.host, "--port", arguments.port]
    words += ["--export", arguments.export] if arguments.export else []
    words += ["--", *_run_dirs(arguments)]
    return _become(words, module="dialoop_ops.console")


def ticket(arguments: argparse.Namespace) -> int:
    """Print a ticket for a member that joins a job."""
    words = ["--run", arguments.run, "--name", arguments.name, "--days", arguments.days]
    words += ["--", arguments.role]
    return _become(words, module="dialoop_services.runtime.access.tickets")


def compare(arguments: argparse.Namespace) -> int:
    """Compare finished runs."""
    words = [*_json_words(arguments), "--", *_run_dirs(arguments)]
    return _become(words, module="dialoop_ops.stack.report.compare")


def replay_step(arguments: argparse.Namespace) -> int:
    """Repeat kept train steps of a run, and name what differs."""
    run = arguments.run if Path(arguments.run).is_dir() else str(arguments.root / arguments.run)
    words = [*_json_words(arguments), "--", run, arguments.steps]
    return _become(words, module="dialoop_ops.policies.replay_step")


def down(arguments: argparse.Namespace) -> int:
    """Stop the stack, and wait until it and all its processes have ended.

    Without a name this stops only the stack of `dialoop up` without a config, since another stack
    on this machine may be somebody's training.
    """
    stack = choose_stack(arguments.root, arguments.run or DEFAULT_RUN)
    with suppress(ProcessLookupError):
        os.kill(stack.pid, signal.SIGTERM)
    deadline = time.monotonic() + arguments.timeout
    while find_stack(stack.run_dir) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{stack.run_dir} (pid {stack.pid}) is still stopping.",
                reason=Reason.STILL_STOPPING,
                remedy="Run `dialoop down` again; the second time it stops at once.",
            )
        time.sleep(_POLL_S)
    if arguments.json:
        say_json({"run_dir": str(stack.run_dir), "pid": stack.pid})
    else:
        say(f"{stack.run_dir} has stopped.")
    return 0


def choose_stack(root: Path, run: str) -> Stack:
    """Return the stack of the run, or the only one there is."""
    candidates = [find_stack(root / run)] if run else find_stacks(root)
    stacks = [stack for stack in candidates if stack is not None]
    if not stacks:
        what = f"No stack is serving {root / run}." if run else f"No stack is running in {root}/."
        others = ", ".join(stack.run_dir.name for stack in find_stacks(root))
        remedy = f"Running: {others}." if others else "Start one with `dialoop up`."
        raise Unavailable(what, reason=Reason.NO_STACK, remedy=remedy)
    if len(stacks) > 1:
        names = ", ".join(stack.run_dir.name for stack in stacks)
        raise NotFound(
            "Several stacks are running.",
            reason=Reason.WHICH_STACK,
            remedy=f"Name one of: {names}.",
        )
    return stacks[0]


def _job_words(arguments: argparse.Namespace) -> list[str]:
    words = [str(arguments.config)] if arguments.config else []
    words += ["--run", arguments.run] if arguments.run else []
    words += ["--fresh"] if arguments.fresh else []
    return [*words, *_json_words(arguments), *_set_words(arguments)]


def _json_words(arguments: argparse.Namespace) -> list[str]:
    return ["--json"] if arguments.json else []


def _set_words(arguments: argparse.Namespace) -> list[str]:
    return [word for pair in arguments.set for word in ("--set", pair)]


def _run_dirs(arguments: argparse.Namespace) -> list[str]:
    return [run if Path(run).is_dir() else str(arguments.root / run) for run in arguments.runs]


def services_command(words: list[str], module: str = "dialoop_ops.stack") -> list[str]:
    """Return the command of a services' module; InvalidConfig (NO_SERVICES) without the package."""
    if importlib.util.find_spec("dialoop_services") is None:
        raise InvalidConfig(
            "This command needs the package dialoop-services, which is not installed.",
            reason=Reason.NO_SERVICES,
            remedy="Install it with `pip install "
            "'dialoop-services[replay,inference,scorer,trainer]' 'dialoop-ops[stack]'`, or run "
            "`make setup` in the repository.",
        )
    return [sys.executable, "-m", module, *words]


def _become(words: list[str], module: str = "dialoop_ops.stack") -> int:
    """Replace this process by the stack's, which then gets signals and sets the exit code."""
    command = services_command(words, module)
    sys.stdout.flush()
    os.execv(command[0], command)


def _start_detached(words: list[str], arguments: argparse.Namespace) -> int:
    command = services_command(words)
    run_dir = arguments.root / (arguments.run or _run_of(arguments.config))
    if (running := find_stack(run_dir)) is not None:
        raise InvalidConfig(
            f"{run_dir} is in use by process {running.pid}.",
            reason=Reason.RUN_IN_USE,
            remedy=f"Stop it with `dialoop down {run_dir.name}`, or choose another --run.",
        )
    log = arguments.root / f"{run_dir.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if not arguments.json:
        say(f"starting {run_dir} (pid {process.pid}); its log is {log}")
    try:
        ready = _wait_until_ready(process, run_dir)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if ready is None:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        complain((lines or ["it ended without any output"])[-1].removeprefix("dialoop stack: "))
        return 2 if process.returncode == 2 else 1
    if arguments.json:
        say_json(
            {
                "run_dir": str(run_dir),
                "pid": ready.pid,
                "run_id": ready.run_id,
                "addresses": dict(ready.addresses),
                "rest_addresses": dict(ready.rest),
                "console": ready.console,
            }
        )
        return 0
    for name, address in ready.addresses.items():
        at = f"   {rest_scheme()}://{ready.rest[name]}" if name in ready.rest else ""
        say(f"{name:<12} {address}{at}")
    say(f"all services are ready; `dialoop down {run_dir.name}` stops them")
    return 0


def _wait_until_ready(process: subprocess.Popen[bytes], run_dir: Path) -> Stack | None:
    """Return the stack once it is ready, or None when it has ended."""
    while process.poll() is None:
        # Reads its file alone: trying its lock could take that from a stack that is starting.
        announced = read_announcement(run_dir, process.pid)
        if announced is not None and announced.addresses:
            return announced
        time.sleep(_POLL_S)
    return None


def _run_of(config: Path | None) -> str:
    """Return the run that a config names; the stack itself refuses an unreadable config."""
    if config is not None:
        with suppress(OSError, ValueError):
            return str(tomllib.loads(config.read_text("utf-8")).get("run", DEFAULT_RUN))
    return DEFAULT_RUN
