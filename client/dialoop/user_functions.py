"""Functions that users write: called whether they are sync or async, and named when they fail.

await call(reward, episode, timeout_s=30.0)    # async: awaited; sync: run in a thread of its own
await resolve(equal(answer, truth))             # quick ones, which run where they are
call_now(collate, row, timeout_s=30.0)         # where nobody can await
raised_at(error)                               # such as "KeyError at capitals.py, line 9"
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from pathlib import PurePath
from types import TracebackType
from typing import Any

# How long a cancelled coroutine has to free what it holds; then nobody waits for it any more.
_FREES_IN_S = 2.0
# Those that went on all the same; the event loop itself keeps only weak references.
_LEFT_BEHIND: set[asyncio.Task[Any]] = set()
_OUR_PACKAGES = frozenset(
    {
        *("dialoop", "dialoop_extras", "dialoop_learning", "dialoop_services", "dialoop_ops"),
        *("asyncio", "concurrent", "threading"),
    }
)


class TimeIsUp(TimeoutError):
    """The function took more than its `timeout_s`; no TimeoutError of its own is one."""


class OwnCancellation(RuntimeError):
    """The function was cancelled by itself or by what it calls, and not by its caller."""


async def call(
    function: Callable[..., Any], /, *arguments: Any, timeout_s: float | None = None, **options: Any
) -> Any:
    """Return the function's result; raise TimeIsUp after `timeout_s`.

    What it raises is its own, a cancellation too (OwnCancellation): only the caller's cancellation
    is a CancelledError here. A sync function has a daemon thread to itself, since hanging calls
    would fill a pool and delay the shutdown. A thread that hangs stays behind, because Python
    cannot end it, and so does a coroutine that does not end when it is cancelled.
    """
    if timeout_s is None:
        return await _result_of(function, arguments, options)
    work = asyncio.create_task(_result_of(function, arguments, options))
    try:
        await asyncio.wait((work,), timeout=timeout_s)
        if not work.done():
            place = place_of(function)
            raise TimeIsUp(f"it took more than {timeout_s:g} s{place and f' ({place})'}")
    finally:
        if not work.done():
            await _abandon(work)
    if work.cancelled():  # it cancelled the very task that it ran in
        raise OwnCancellation("it was cancelled")
    return work.result()


async def resolve(result: Any) -> Any:
    """Return the result of a call, awaited if it has to be."""
    return await result if inspect.isawaitable(result) else result


def call_now(
    function: Callable[..., Any], /, *arguments: Any, timeout_s: float | None = None, **options: Any
) -> Any:
    """Return the function's result; an async one runs in an event loop of its own meanwhile.

    With `timeout_s` a sync one has a thread of its own too, and TimeIsUp is raised as by `call`.
    """
    if timeout_s is not None:
        calling = call(function, *arguments, timeout_s=timeout_s, **options)
        return asyncio.run_coroutine_threadsafe(calling, loop_of_users()).result()
    result = function(*arguments, **options)
    if not inspect.isawaitable(result):
        return result
    with ThreadPoolExecutor(1, thread_name_prefix="call-now") as thread:
        return thread.submit(copy_context().run, asyncio.run, _wait_for(result)).result()


@cache
def loop_of_users() -> asyncio.AbstractEventLoop:
    """Return the event loop, in a thread of its own, for functions that must not hold up others."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="user-functions", daemon=True).start()
    return loop


def name_of(function: object) -> str:
    """Return the object's `name` if it has one, else the function's or the class's name."""
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    return str(name or type(function).__name__)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling it gives a coroutine; also for objects with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is inspected
    )


def raised_at(error: BaseException) -> str:
    """Return the error's type and the line of the user's code: "KeyError at my.py, line 9".

    The error may come from deep in a library: the line is the last one of the file that Dialoop
    called. Without such a file it is the type alone. The error's text is never part of it.
    """
    places = _places(error.__traceback__)
    own = [place for place in places if place[0] == places[0][0]]
    if not own:
        return type(error).__name__
    file, line = own[-1]
    return f"{type(error).__name__} at {PurePath(file).name}, line {line}"


def place_of(function: Callable[..., Any]) -> str:
    """Return where a user's function begins: "my.py, line 3"; "" where Dialoop or C wrote it.

    It may stand in a `partial`, or in an object of Dialoop's as its `function`.
    """
    while True:
        package = str(getattr(function, "__module__", "")).partition(".")[0]
        inner = getattr(function, "func" if isinstance(function, partial) else "function", None)
        if not (callable(inner) and (package in _OUR_PACKAGES or isinstance(function, partial))):
            break
        function = inner
    code = getattr(function, "__code__", None)
    code = code or getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004
    if code is None or package in _OUR_PACKAGES:
        return ""
    return f"{PurePath(code.co_filename).name}, line {code.co_firstlineno}"


def _places(traceback: TracebackType | None) -> list[tuple[str, int]]:
    """Return file and line of each frame, from the first that is not Dialoop's own."""
    places: list[tuple[str, int]] = []
    while traceback is not None:
        frame = traceback.tb_frame
        names = frame.f_globals
        # What runs with -m is called __main__, and only its spec says which module it is.
        module = getattr(names.get("__spec__"), "name", None) or names.get("__name__", "")
        package = str(module).partition(".")[0]
        if places or package not in _OUR_PACKAGES:
            places.append((frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return places


async def _wait_for(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _result_of(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    task = asyncio.current_task()
    num_cancelled = task.cancelling() if task else 0
    try:
        if is_async(function):
            return await function(*arguments, **options)
        return await resolve(await _in_thread(function, partial(function, *arguments, **options)))
    except asyncio.CancelledError as error:
        if task is None or task.cancelling() > num_cancelled:
            raise
        raise OwnCancellation("it was cancelled").with_traceback(error.__traceback__) from error
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as SystemExit, which must not end the service
        raise RuntimeError(repr(error)).with_traceback(error.__traceback__) from error


async def _abandon(work: asyncio.Task[Any]) -> None:
    """Cancel the work, and wait a little while it frees what it holds."""
    work.cancel()
    _LEFT_BEHIND.add(work)
    work.add_done_callback(_forget)
    await asyncio.wait((work,), timeout=_FREES_IN_S)


def _forget(work: asyncio.Task[Any]) -> None:
    _LEFT_BEHIND.discard(work)
    if not work.cancelled():
        work.exception()  # or else asyncio logs that nobody asked for it


async def _in_thread(function: Callable[..., Any], call_it: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def set_result_once(result: Any, error: BaseException | None) -> None:
        if answered.done():
            return
        if error is None:
            answered.set_result(result)
        else:
            answered.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(call_it)
        except Exception as raised:
            error = raised
            if isinstance(raised, StopIteration):  # a future cannot hold one
                error = RuntimeError(repr(raised)).with_traceback(raised.__traceback__)
        except BaseException as raised:
            error = RuntimeError(repr(raised)).with_traceback(raised.__traceback__)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(set_result_once, result, error)

    threading.Thread(target=run, name=f"call-{name_of(function)}", daemon=True).start()
    return await answered
