"""The life of a service's process: started by a parent, ended with it, and clear about mistakes.

if __name__ == "__main__":
    run(serve, name="environment")        # serve: an async function without arguments
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from dialoop.errors import DialoopError, InvalidConfig
from pydantic import ValidationError

from dialoop_services.runtime.logs import configure_logs
from dialoop_services.runtime.shutdown import owns_process

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PARENT_VARIABLE = "DIALOOP_PARENT_PID"
_PR_SET_PDEATHSIG = 1
# A process that outlives its parent by this much hangs in its drain and is killed.
_ORPHAN_GRACE_S = 15.0


def run(service: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> None:
    """Run a service to its end; a wrong setting exits 2 and any other known error 1."""
    run_blocking(lambda: asyncio.run(service()), name=name)


def run_blocking(work: Callable[[], None], *, name: str) -> None:
    """The same for one that is more than its event loop."""
    try:
        die_with_parent()
        configure_logs(name)
        owns_process.set(True)
        work()
    except Exception as error:
        known = _known_error(error)
        if known is None:
            raise
        _exit(name, known)


def _known_error(error: BaseException) -> DialoopError | ValidationError | None:
    """The error itself, or the first known one in a task group's."""
    if isinstance(error, (DialoopError, ValidationError)):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = (_known_error(inner) for inner in error.exceptions)
        return next((inner for inner in found if inner is not None), None)
    return None


def _exit(name: str, error: DialoopError | ValidationError) -> NoReturn:
    text = str(error)
    if isinstance(error, ValidationError):
        details = error.errors(include_input=False)
        text = "; ".join(f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in details) + "."
    sys.stderr.write(f"dialoop {name}: {' '.join(text.split())}\n")
    sys.exit(2 if isinstance(error, (InvalidConfig, ValidationError)) else 1)


def die_with_parent() -> None:
    """When DIALOOP_PARENT_PID is set, end this process as soon as its parent is gone."""
    # Popped: a child of ours has another parent, and is not to judge by this number.
    given = os.environ.pop(PARENT_VARIABLE, "")
    if not given:
        return
    if not given.isdigit():
        raise InvalidConfig(f"{PARENT_VARIABLE} is '{given}'.", remedy="Give a process id.")
    expected = int(given)
    parent = os.getppid()
    if sys.platform == "linux":
        # The kernel watches the thread that started us: the parent starts us from its main thread.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not _is_alive(expected) or os.getppid() != parent:
        sys.exit(1)  # it died before we asked to be told
    threading.Thread(target=_outlive_briefly, args=(parent,), daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _outlive_briefly(parent: int) -> None:
    """Stop once the parent is gone (where prctl is missing), and never hang in the drain."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
