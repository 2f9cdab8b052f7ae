"""Run `dialoop up` and `down`: start a stack, and stop it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

from dialoop.clients.tls import rest_scheme
from dialoop.errors import InvalidConfig, NotFound, Unavailable
from dialoop.reasons import Reason
from dialoop.running_stacks import Stack, find_stack, find_stacks, read_announcement

from dialoop_ops.cli.console import complain, say, say_json

DEFAULT_RUN = "default"
"""The run that `dialoop up` without a config serves."""

_POLL_S = 0.2


def up(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or start and leave it running."""
    if arguments.detach:
        return _start_detached(arguments)
    # `down` and `status` need none of the services.
    from dialoop_ops.stack.commands import run

    return run(arguments)


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


def _start_detached(arguments: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "dialoop_ops.stack", "up"]
    command += [str(arguments.config)] if arguments.config else []
    command += ["--run", arguments.run, *(["--fresh"] if arguments.fresh else [])]
    command += [word for pair in arguments.set for word in ("--set", pair)]
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
        complain((lines or ["it ended without any output"])[-1].removeprefix("dialoop: "))
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
