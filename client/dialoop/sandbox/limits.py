"""The limits of one interpreter.

Limits(max_memory_bytes=256 * 2**20).max_output_bytes     # 65536
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dialoop.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one interpreter, which always has one process and one thread.

    `max_cpu_s` limits its whole life. `max_output_bytes` limits each stream of each call.
    `max_disk_bytes` is the size of /tmp, and `max_files` how many files and folders it holds, if
    the level has one.
    """

    max_memory_bytes: int = 512 * 2**20
    max_cpu_s: int = 120
    max_output_bytes: int = 64 * 2**10
    max_disk_bytes: int = 16 * 2**20
    max_files: int = 10_000
    max_open_files: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InvalidConfig(
                    f"`{field.name}` of the sandbox's Limits is below 1.", remedy="Use 1 or more."
                )
