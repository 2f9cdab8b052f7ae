"""The end of vLLM's processes when the service that started them was killed.

vLLM's worker ends with its engine core, but the core does not notice that its own parent has ended
and would keep its memory forever. So the process that runs the model, which is a worker or the core
itself, watches the service and ends both.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil  # type: ignore[import-untyped]

OWNER_VARIABLE = "DIALOOP_ENGINE_OWNER_PID"
_INTERVAL_S = 1.0


def end_with_owner() -> None:
    """Kill this worker and its engine core as soon as their service has ended."""
    owner = int(os.environ[OWNER_VARIABLE])
    parent = os.getppid()
    # Without a separate worker process the parent is the service itself.
    core = os.getpid() if parent == owner else parent
    threading.Thread(target=_watch, args=(owner, core), daemon=True).start()


def _watch(owner: int, core: int) -> None:
    while _parent_of(core) == owner:
        time.sleep(_INTERVAL_S)
    if core in (os.getpid(), os.getppid()):  # else the core has ended already
        os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    """Return the parent as the system sees it now; a child of a dead process gets another."""
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return None
