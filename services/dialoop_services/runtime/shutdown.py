"""A stop signal: an event that SIGTERM, SIGINT or a caller sets."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

owns_process: ContextVar[bool] = ContextVar("owns_process", default=False)
"""True inside `run`, where the process is a service and signals are meant for its server."""


class StopSignal:
    """Owns the event that says that the service is to stop.

    In a service's process signals set it from entering until leaving. Elsewhere (a test, a
    notebook) they do so only once somebody waits, so that Ctrl-C works as usual before; never when
    it is not the stop `of_process`.
    """

    def __init__(self, *, of_process: bool = True) -> None:
        self.event = asyncio.Event()
        self._of_process = of_process
        self._exits = AsyncExitStack()
        self._is_listening = False

    async def wait(self) -> None:
        """Wait for SIGTERM, SIGINT or `event.set()`."""
        self._listen()
        await self.event.wait()

    async def __aenter__(self) -> Self:
        if owns_process.get():
            self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.event.set()
        await self._exits.aclose()

    def _listen(self) -> None:
        """Listen to signals until leaving.

        Repeated signals change nothing. A terminal's Ctrl-C reaches the whole process group, and
        then the supervisor stops its children once more; the drain must survive that.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        # Signals reach the main thread only.
        if self._is_listening or not in_main_thread or not self._of_process:
            return
        self._is_listening = True
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.event.set)
            self._exits.callback(loop.remove_signal_handler, number)
