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
    max_memory_bytes = int(sys.argv[3]) if len(sys.argv) > 3 else None
    while (request := read_frame(channel)) is not None:
        write_frame(channel, json.dumps(_answer(json.loads(request), max_memory_bytes)).encode())


def _answer(request: dict[str, Any], max_memory_bytes: int | None) -> dict[str, Any]:
    try:
        if "load" in request:
            _function(request["load"])
            _limit_memory(max_memory_bytes or 0)
            return {"result": None}
        result = _function(request["function"])(**request["arguments"])
        if hasattr(result, "__await__"):
            import asyncio  # most functions are sync, and this process should start fast

            result = asyncio.run(result)
        json.dumps(result)  # a result that JSON cannot hold is the function's failure
    except MemoryError:
        return {"error": "It ran out of memory.", "is_out_of_memory": True}
    except BaseException:  # SystemExit too, which would end this process
        return {"error": traceback.format_exc()}
    return {"result": result}


def _limit_memory(num_bytes: int) -> None:
    """Allow this process `num_bytes` of address space above what it has now."""
    import resource

    held = 0
    if sys.platform.startswith("linux"):
        with open("/proc/self/statm") as file:  # noqa: PTH123  (start fast: no pathlib)
            held = int(file.read().split()[0]) * resource.getpagesize()
    limit = held + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


_function = functools.cache(pkgutil.resolve_name)
