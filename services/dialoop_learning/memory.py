"""Give back to the system the memory that freed tensors leave in the process.

Tensors below 32 MiB lie in glibc's heap. Between those that live on, what others leave is rarely
of the size that is asked for next, so the process grows with every row, and with a large model
with every layer.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import psutil  # type: ignore[import-untyped]

_resident_then = 0


def return_free_memory(*, above: int = 0) -> None:
    """Give the system the memory that glibc keeps after tensors were freed; elsewhere do nothing.

    above: bytes by which the process must have grown since the last time; its next tensors touch
    each page anew, which costs more than a small growth is worth. 0 asks nothing.
    """
    global _resident_then
    trim = _malloc_trim()
    if trim is None or (above and resident_bytes() - _resident_then < above):
        return
    trim(0)
    _resident_then = resident_bytes()


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def resident_bytes() -> int:
    """Return the bytes of the process that are in memory."""
    return int(psutil.Process().memory_info().rss)
