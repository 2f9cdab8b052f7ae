"""The faults of `machine_faults.c`: clocks that jump, a disk that is full, writes that fail.

machine = Machine(folder)          # compiles the library
machine.variables                  # for the processes that shall obey
machine.jump_clock("redis", 3600)  # from now on its wall clock is an hour ahead
machine.fail_writes(EIO, "trainer")
machine.mend_disk()
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SERVICES = ("replay", "collector", "environment", "scorer", "trainer", "inference")
KINDS = (*SERVICES, "stack", "redis")
_SLOT = struct.Struct("<16sqq")
_NUM_SLOTS = 16


class Machine:
    """Clock and disk of the processes that have `variables`, by kind of process."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler is not None, "clocks and disks that fail need a C compiler"
        library, slots = folder / "machine_faults.so", folder / "machine_faults"
        source = Path(__file__).with_name("machine_faults.c")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"],
            check=True,
        )
        slots.write_bytes(bytes(_NUM_SLOTS * _SLOT.size))
        with slots.open("r+b") as file:
            self._slots = mmap.mmap(file.fileno(), 0)
        self.variables = {"LD_PRELOAD": str(library), "CHAOS_FAULTS": str(slots)}
        self._states = dict.fromkeys(KINDS, (0, 0))
        for kind in KINDS:
            self._write(kind, 0, 0)

    def jump_clock(self, kind: str, seconds: int) -> None:
        """Set how far the wall clock of these processes is ahead of the real one."""
        self._write(kind, seconds * 1000, self._states[kind][1])

    def fail_writes(self, error: int, *kinds: str) -> None:
        """Let writes to files fail with ENOSPC or EIO."""
        for kind in kinds:
            self._write(kind, self._states[kind][0], error)

    def mend_disk(self) -> None:
        """Let every write succeed again."""
        self.fail_writes(0, *KINDS)

    def _write(self, kind: str, clock_ms: int, error: int) -> None:
        self._states[kind] = (clock_ms, error)
        at = KINDS.index(kind) * _SLOT.size
        self._slots[at : at + _SLOT.size] = _SLOT.pack(kind.encode(), clock_ms, error)
