"""The process of `killable`, which calls functions by name until it is killed."""

from __future__ import annotations

import functools
import json
import pkgutil
import signal
import sys
import traceback
from typing import Any

from dialoop.sandbox.confined.frames import read_frame, write_frame


def main() -> None:
    """Answer requests on the descriptor in the first argument until it closes."""
    channel = int(sys.argv[1])
    sys.path[:] = json.loads(sys.argv[2])
    if sys.platform.startswith("linux"):
        from dialoop.sandbox.confined.libc import PR_SET_PDEATHSIG, prctl

        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # works while a function never returns
    while (request := read_frame(channel)) is not None:
        write_frame(channel, json.dumps(_answer(json.loads(request))).encode())


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = _function(request["function"])(**request["arguments"])
        if hasattr(result, "__await__"):
            import asyncio  # most functions are sync, and this process should start fast

            result = asyncio.run(result)
        json.dumps(result)  # a result that JSON cannot hold is the function's failure
    except BaseException:  # SystemExit too, which would end this process
        return {"error": traceback.format_exc()}
    return {"result": result}


_function = functools.cache(pkgutil.resolve_name)
