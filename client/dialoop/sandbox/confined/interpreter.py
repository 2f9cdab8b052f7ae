"""The confined interpreter: it reads code, runs it in one namespace, and reports success.

A request is a nonce of 16 bytes and the code; the answer is the nonce and one byte. The code's
output goes to descriptors 1 and 2, which are files that the service reads.
"""

from __future__ import annotations

import builtins
import io
import linecache
import os
import sys
import traceback
from contextlib import suppress
from types import ModuleType

from .frames import read_frame, write_frame

TYPE_CHECKING = False  # typing takes longer to load than all the rest
if TYPE_CHECKING:
    from typing import Any

CHANNEL = 3
NONCE_BYTES = 16
FAILED, SUCCEEDED, ASKED = 0, 1, 2
_NAME = "<code>"


class _Capped(io.RawIOBase):
    """A descriptor that drops all output above its limit."""

    def __init__(self, fd: int, limit: int) -> None:
        self._fd, self._left = fd, limit

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, content: Any) -> int:
        data = bytes(content)
        kept = data[: self._left]
        self._left -= len(kept)
        with suppress(OSError):  # the code wrote to the descriptor itself, and it is full
            while kept:
                kept = kept[os.write(self._fd, kept) :]
        return len(data)


def serve(max_output_bytes: int) -> None:
    """Answer requests until the channel closes."""
    main = ModuleType("__main__")
    # `site` would add these, but also folders to import from.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.modules["__main__"] = main
    write_frame(CHANNEL, bytes(NONCE_BYTES) + bytes([SUCCEEDED]))
    while True:
        request = read_frame(CHANNEL)
        if request is None:
            return
        nonce, code = request[:NONCE_BYTES], request[NONCE_BYTES:].decode("utf-8", "replace")
        status = _run(code, main.__dict__, max_output_bytes)
        write_frame(CHANNEL, nonce + bytes([status]))


def _run(code: str, namespace: dict[str, Any], limit: int) -> int:
    # The service reads up to the limit, so one byte more shows that there was more output, also
    # when the code never returns.
    out, err = (_text(_Capped(fd, limit + 1)) for fd in (1, 2))
    sys.stdout, sys.stderr = out, err
    status = SUCCEEDED if _execute(code, namespace, err) else FAILED
    for stream in (out, err):
        if not stream.closed:
            stream.flush()
    return status


def _text(stream: _Capped) -> io.TextIOWrapper:
    buffered = io.BufferedWriter(stream, 8192)
    return io.TextIOWrapper(buffered, "utf-8", "backslashreplace", line_buffering=True)


def _execute(code: str, namespace: dict[str, Any], err: io.TextIOWrapper) -> bool:
    linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
    try:
        exec(compile(code, _NAME, "exec", dont_inherit=True), namespace)  # noqa: S102
    except SystemExit as exit_:
        if exit_.code not in (None, 0) and not isinstance(exit_.code, int):
            err.write(f"{exit_.code}\n")
        return exit_.code in (None, 0)
    except BaseException as error:  # KeyboardInterrupt too, which only the code itself raises
        own = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, own))
        if not err.closed:
            err.write(text)
        return False
    return True
