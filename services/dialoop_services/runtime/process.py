"""The life of a service's process: it ends with its parent and reports errors in one line.

if __name__ == "__main__":
    # serve: an async function without arguments
    run(serve, name="environment", settings=EnvironmentSettings)
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from dialoop.errors import InvalidConfig
from dialoop_learning.memory import return_free_memory

from dialoop_services.runtime.exit_reason import CONFIG_ERROR, ExitReason, known_error
from dialoop_services.runtime.listening import raise_descriptor_limit
from dialoop_services.runtime.logs import configure_logs
from dialoop_services.runtime.settings import StrictSettings, help_of
from dialoop_services.runtime.shutdown import owns_process

log = logging.getLogger(__name__)

PARENT_VARIABLE = "DIALOOP_PARENT_PID"
RESTARTS_VARIABLE = "DIALOOP_NUM_RESTARTS"
"""Number of times that the supervisor has started this service before."""
_PR_SET_PDEATHSIG = 1
# Numbers of glibc's mallopt; other C libraries have no such options.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# A process that outlives its parent by this much hangs in its drain, and is killed.
_ORPHAN_GRACE_S = 15.0
# New objects after which Python looks for cycles among them. Nearly all that a request makes is
# gone by then without it; after 700, which is Python's number, much is still in use.
_COLLECT_AFTER = 10_000
_KEPT_BYTES, _MAPPED_BYTES = 64 << 20, 32 << 20
# How often free memory is given back, and how many times as long as that took is a pause at least:
# meanwhile no other thread gets memory, and pages that are used again come from the kernel.
_RETURN_EVERY_S, _RETURN_SHARE = 5.0, 50


def run(
    service: Callable[[], Coroutine[Any, Any, None]],
    *,
    name: str,
    settings: type[StrictSettings] | None = None,
) -> None:
    """Run a service to its end. Exit with 2 for a wrong setting, with 1 for other known errors.

    With `settings` the process takes no words but `--help`, which explains these.
    """

    def work() -> None:
        with asyncio.Runner(loop_factory=_event_loop_factory()) as runner:
            runner.run(service())

    run_blocking(work, name=name, settings=settings)


def _event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop, which spends less on each callback and write; None for asyncio's."""
    try:
        import uvloop
    except ImportError:
        log.info("Serving on asyncio's event loop, because uvloop is not installed.")
        return None
    return uvloop.new_event_loop


def run_blocking(
    work: Callable[[], None], *, name: str, settings: type[StrictSettings] | None = None
) -> None:
    """Do the same as `run` for a service that is more than an event loop."""
    if settings is not None:
        _answer_words(sys.argv[1:], name, settings)
    try:
        if "torch" not in sys.modules:
            _keep_heap_small()
        die_with_parent()
        configure_logs(name)
        owns_process.set(True)
        raise_descriptor_limit()
        work()
    except Exception as error:
        reason = ExitReason.of(error)
        reason.write()
        if known_error(error) is None:
            raise
        sys.stderr.write(f"dialoop {name}: {reason.message}\n")
        reason.end()


def _answer_words(words: list[str], name: str, settings: type[StrictSettings]) -> None:
    """Print help and end the process, or refuse words that no service reads."""
    if {"-h", "--help"} & set(words):
        about = (sys.modules["__main__"].__doc__ or "").strip()
        sys.stdout.write(
            f"{about}\n\nIt takes no options. Its settings are these variables, and what the job\n"
            "file says that DIALOOP_CONFIG names. A key of a table stands behind the table's name\n"
            "and __.\n\n"
            f"{help_of(settings)}\n"
        )
        sys.exit(0)
    if words:
        sys.stderr.write(
            f"dialoop {name}: '{words[0]}' is no option of a service. Set variables; "
            f"`python -m dialoop_services.{name} --help` lists them.\n"
        )
        sys.exit(CONFIG_ERROR)


def _keep_heap_small() -> None:
    """Let all threads share one heap, and give back what is free in it, also between objects.

    glibc takes the number of heaps before the first thread alone. At the end of any heap but the
    first, `malloc_trim` leaves what is free.
    """
    if (option := _mallopt()) is not None:
        option(_M_ARENA_MAX, 1)
        threading.Thread(target=_return_memory, daemon=True).start()


def _return_memory() -> None:
    took_s = 0.0
    while True:
        time.sleep(max(_RETURN_EVERY_S, _RETURN_SHARE * took_s))
        started = time.thread_time()
        return_free_memory()
        took_s = time.thread_time() - started


def tune_memory() -> None:
    """Make memory cheap to use again, for a process that has loaded what it serves.

    Messages of some 100 kB come and go: by glibc's settings each would be given back to the kernel,
    which clears the next one's pages again. A process with torch gives freed memory back.
    """
    # Existing objects stay: a full collection then skips those of torch and protobuf.
    gc.freeze()
    if "torch" in sys.modules:  # there a cycle may hold tensors, which must go soon
        return
    gc.set_threshold(_COLLECT_AFTER)
    set_allocator(mapped_bytes=_MAPPED_BYTES, kept_bytes=_KEPT_BYTES)


def set_allocator(*, mapped_bytes: int, kept_bytes: int | None = None) -> bool:
    """Set from which size on an object is mapped by itself, so that freeing it gives it back.

    mapped_bytes: at most 32 MiB. kept_bytes: what may lie free at the end of the heap; absent: what
    glibc chooses. Return whether glibc has taken the options.
    """
    option = _mallopt()
    if option is None:
        return False
    kept = kept_bytes is None or bool(option(_M_TRIM_THRESHOLD, kept_bytes))
    return kept and bool(option(_M_MMAP_THRESHOLD, mapped_bytes))


def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None


def end_command(main: Callable[[], int]) -> NoReturn:
    """End the process with main's exit code.

    It is 0 where the reader of the output has gone (`dialoop replay-step demo 1..40 | head -1`),
    and 130 after Ctrl-C.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Or Python would write the rest at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def die_with_parent() -> None:
    """End this process as soon as its parent is gone, if DIALOOP_PARENT_PID is set."""
    # Removed from the environment, because children of this process have another parent.
    value = os.environ.pop(PARENT_VARIABLE, "")
    if not value:
        return
    if not value.isdigit():
        raise InvalidConfig(f"{PARENT_VARIABLE} is '{value}'.", remedy="Give a process id.")
    expected = int(value)
    parent = os.getppid()
    if sys.platform == "linux":
        # The kernel watches the thread that started us, so the parent uses its main thread.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not _is_alive(expected) or os.getppid() != parent:
        sys.exit(1)  # the parent died before prctl took effect
    threading.Thread(target=_outlive_briefly, args=(parent,), daemon=True).start()


def die_at_once_with_parent() -> None:
    """Let the kernel kill this process as soon as its parent is gone, without a drain."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _outlive_briefly(parent: int) -> None:
    """Stop once the parent is gone (where prctl is missing); kill a drain that hangs."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
