"""Calls of authors' functions, sync or async, which cannot block each other."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


async def call(function: Callable[[Any], Any], argument: Any, *, timeout_s: float) -> Any:
    """Return the function's result; raise TimeoutError after `timeout_s`.

    A sync function runs in its own daemon thread, since hanging calls would fill a pool and delay
    the shutdown. A thread that hangs stays behind, because Python cannot end it.
    """
    async with asyncio.timeout(timeout_s):
        try:
            if _is_async(function):
                return await function(argument)
            result = await _in_thread(function, argument)
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # must not end the service
            raise RuntimeError("The function called exit.") from error


def name_of(function: object) -> str:
    """Return the object's `name` if it has one, else the function's or the class's name."""
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    return str(name or type(function).__name__)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is inspected
    )


async def _in_thread(function: Callable[[Any], Any], argument: Any) -> Any:
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
            result = context.run(function, argument)
        except Exception as raised:
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        except BaseException as raised:
            error = RuntimeError(repr(raised))
        try:
            loop.call_soon_threadsafe(set_result_once, result, error)
        except RuntimeError:  # the loop has ended, so nobody waits any more
            return

    threading.Thread(target=run, name=f"call-{name_of(function)}", daemon=True).start()
    return await answered
