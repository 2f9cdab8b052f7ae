"""Give back to the system the memory that freed tensors leave in the process.

Tensors below 32 MiB lie in glibc's heap. Between those that live on, what others leave is rarely
of the size that is asked for next, so the process grows with every row, and with a large model
with every layer.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import psutil  # type: ignore[import-untyped]
from dialoop_services.runtime.process import set_allocator

_resident_then = 0

_MAPPED_BYTES = 8 << 20


def map_large_tensors() -> bool:
    """Have glibc map every tensor of 8 MiB or more by itself, so that freeing it gives it back.

    Return whether it does so from now on; elsewhere than on glibc it does nothing. glibc would
    raise its bound to 32 MiB by itself. The hidden states of 4,000 tokens at a width of 1,024 have
    16: with recomputed activations a step at Qwen3-0.6B's shape took half as much again. Each page
    is touched anew, which is little beside what a large model computes on it.
    """
    return set_allocator(mapped_bytes=_MAPPED_BYTES)


def return_free_memory(*, above: int = 0) -> None:
    """Give the system the memory that glibc keeps after tensors were freed; elsewhere do nothing.

    above: bytes by which the process must have grown since the last time; its next tensors touch
    each page anew, which costs more than a small growth is worth.
    """
    global _resident_then
    trim = _malloc_trim()
    if trim is None or _resident() - _resident_then < above:
        return
    trim(0)
    _resident_then = _resident()


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _resident() -> int:
    """Return the bytes of the process that are in memory."""
    return int(psutil.Process().memory_info().rss)
