"""Set what glibc does with memory that was freed; other C libraries have no such options.

set_allocator(mapped_bytes=32 << 20, kept_bytes=64 << 20)
"""

from __future__ import annotations

import ctypes
import sys

# Numbers of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def set_allocator(*, mapped_bytes: int, kept_bytes: int | None = None) -> bool:
    """Set from which size on an object is mapped by itself, so that freeing it gives it back.

    mapped_bytes: at most 32 MiB. kept_bytes: what may lie free at the end of the heap; absent: what
    glibc chooses. Return whether glibc has taken the options.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if option is None:
        return False
    kept = kept_bytes is None or bool(option(_M_TRIM_THRESHOLD, kept_bytes))
    return kept and bool(option(_M_MMAP_THRESHOLD, mapped_bytes))
