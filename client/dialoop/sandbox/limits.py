"""What one interpreter may use.

Limits(max_memory_bytes=256 * 2**20).max_output_bytes     # 65536
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dialoop.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one interpreter; it has one process and one thread, always.

    `max_cpu_s` counts over its whole life. Output is limited per call and stream, and
    `max_disk_bytes` is the size of /tmp where the level has one.
    """

    max_memory_bytes: int = 512 * 2**20
    max_cpu_s: int = 120
    max_output_bytes: int = 64 * 2**10
    max_disk_bytes: int = 16 * 2**20
    max_open_files: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InvalidConfig(
                    f"The sandbox's {field.name} is below 1.", remedy="Set it to 1 or more."
                )
