"""Record which functions of a checkout a process enters while a window is open.

`path_of_a_prompt` copies this file as `sitecustomize.py` into a folder of PYTHONPATH, so that each
Python process runs it before anything else. It imports the standard library alone. The window is
open while PATH_FOLDER holds a file `window`. After it closes, each process writes `<pid>.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

POLL_S = 0.02


def functions_of(codes: Iterable[CodeType], root: str) -> dict[str, dict[str, int]]:
    """Return {path below root: {function: its lines}}; comprehensions and lambdas do not count."""
    functions: dict[str, dict[str, int]] = {}
    for code in codes:
        if code.co_filename.startswith(root + os.sep) and not code.co_name.startswith("<"):
            lines = [line for *_, line in code.co_lines() if line]
            length = max(lines) - code.co_firstlineno + 1
            path = os.path.relpath(code.co_filename, root)
            functions.setdefault(path, {})[f"{code.co_qualname}:{code.co_firstlineno}"] = length
    return functions


def trace(root: str, folder: Path) -> threading.Thread:
    """Trace this process and its new threads; the thread that is returned ends with the report."""
    codes: set[CodeType] = set()
    add = codes.add

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            add(frame.f_code)

    def watch() -> None:
        window = folder / "window"
        while not window.exists():
            time.sleep(POLL_S)
        codes.clear()
        while window.exists():
            time.sleep(POLL_S)
        _write(functions_of(list(codes), root), folder / f"{os.getpid()}.json")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    threading.setprofile(profile)
    sys.setprofile(profile)
    return watcher


def _write(functions: dict[str, dict[str, int]], path: Path) -> None:
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"main": main, "entered": functions}), "utf-8")
    part.replace(path)


if __name__ == "sitecustomize":
    trace(os.environ["PATH_ROOT"], Path(os.environ["PATH_FOLDER"]))
