"""`dialoop up`, `down`, `train`, `export`, `config print`: what runs in a process of its own."""

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

from dialoop.cli.console import complain, say
from dialoop.cli.running_stacks import announced, find_stack, find_stacks
from dialoop.errors import InvalidConfig, NotFound, Unavailable
from dialoop.reasons import Reason

if TYPE_CHECKING:
    import argparse

    from dialoop.cli.running_stacks import Stack

DEFAULT_RUN = "default"
"""What `dialoop up` without a config serves."""

_POLL_S = 0.2


def up(given: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or start and leave it running."""
    words = ["serve", *_job_words(given)]
    return _detached(words, given) if given.detach else _become(words)


def train(given: argparse.Namespace) -> int:
    """Run a whole job."""
    return _become(["train", *_job_words(given)])


def print_config(given: argparse.Namespace) -> int:
    """Print the effective config."""
    words = [str(given.config)] if given.config else []
    return _become(["config", *words, *(["--origins"] if given.origins else [])])


def export(given: argparse.Namespace) -> int:
    """Write a policy as a model directory."""
    named = Path(given.run)
    run_dir = named if (named / "run.json").is_file() else given.root / given.run
    words = [str(run_dir), given.version, str(given.directory)]
    words += ["--merged"] if given.merged else []
    words += ["--base", given.base] if given.base else []
    return _become(words, module="dialoop_services.trainer.publish.export")


def down(given: argparse.Namespace) -> int:
    """Ask the stack to stop, and wait until it and all its processes have ended.

    Only a stack that was named, or the one of `dialoop up` without a config: whatever else runs
    here may be somebody's training.
    """
    stack = chosen(given.root, given.run or DEFAULT_RUN)
    with suppress(ProcessLookupError):
        os.kill(stack.pid, signal.SIGTERM)
    deadline = time.monotonic() + given.timeout
    while find_stack(stack.run_dir) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{stack.run_dir} (pid {stack.pid}) is still stopping.",
                reason=Reason.STILL_STOPPING,
                remedy="Run `dialoop down` again; the second time it stops at once.",
            )
        time.sleep(_POLL_S)
    say(f"{stack.run_dir} has stopped.")
    return 0


def chosen(root: Path, run: str) -> Stack:
    """The stack of the run, or the only one there is."""
    found = [find_stack(root / run)] if run else find_stacks(root)
    stacks = [stack for stack in found if stack is not None]
    if not stacks:
        what = f"No stack is serving {root / run}." if run else f"No stack is running in {root}/."
        others = ", ".join(stack.run_dir.name for stack in find_stacks(root))
        remedy = f"Running: {others}." if others else "Start one with `dialoop up`."
        raise Unavailable(what, reason=Reason.NO_STACK, remedy=remedy)
    if len(stacks) > 1:
        names = ", ".join(stack.run_dir.name for stack in stacks)
        raise NotFound(
            "There are several stacks.", reason=Reason.WHICH_STACK, remedy=f"Name one of: {names}."
        )
    return stacks[0]


def _job_words(given: argparse.Namespace) -> list[str]:
    words = [str(given.config)] if given.config else []
    words += ["--run", given.run] if given.run else []
    return [*words, "--fresh"] if given.fresh else words


def _command(words: list[str], module: str = "dialoop_services.stack") -> list[str]:
    if importlib.util.find_spec("dialoop_services") is None:
        raise InvalidConfig(
            "This needs the distribution dialoop-services, which is not installed.",
            reason=Reason.NO_SERVICES,
            remedy="Install it with `pip install "
            "'dialoop-services[replay,inference,scorer,trainer,stack]'`, or run `make setup` in "
            "the repository.",
        )
    return [sys.executable, "-m", module, *words]


def _become(words: list[str], module: str = "dialoop_services.stack") -> int:
    """Turn into the stack, or another of its programs: signals and the exit code are its own."""
    command = _command(words, module)
    sys.stdout.flush()
    os.execv(command[0], command)


def _detached(words: list[str], given: argparse.Namespace) -> int:
    command = _command(words)
    run_dir = given.root / (given.run or _run_of(given.config))
    if (living := find_stack(run_dir)) is not None:
        raise InvalidConfig(
            f"{run_dir} is in use by process {living.pid}.",
            reason=Reason.RUN_IN_USE,
            remedy=f"Stop it with `dialoop down {run_dir.name}`, or choose another --run.",
        )
    log = given.root / f"{run_dir.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    say(f"starting {run_dir} (pid {process.pid}); its log is {log}")
    try:
        ready = _wait_until_ready(process, run_dir)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if ready is None:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        complain((lines or ["it ended without a word"])[-1].removeprefix("dialoop stack: "))
        return 2 if process.returncode == 2 else 1
    for name, address in ready.addresses.items():
        at = f"   http://{ready.rest[name]}" if name in ready.rest else ""
        say(f"{name:<12} {address}{at}")
    say(f"all services are ready; `dialoop down {run_dir.name}` stops them")
    return 0


def _wait_until_ready(process: subprocess.Popen[bytes], run_dir: Path) -> Stack | None:
    """The stack, or None when it has ended."""
    while process.poll() is None:
        # By its file alone: asking for its lock could take it from a stack that is just starting.
        if ready := announced(run_dir, process.pid):
            return ready
        time.sleep(_POLL_S)
    return None


def _run_of(config: Path | None) -> str:
    """The run that a config names; a config that cannot be read is the stack's to refuse."""
    if config is not None:
        with suppress(OSError, ValueError):
            return str(tomllib.loads(config.read_text("utf-8")).get("run", DEFAULT_RUN))
    return DEFAULT_RUN
