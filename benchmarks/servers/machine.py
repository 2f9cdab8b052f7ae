"""Name the machine that a benchmark runs on, and read what its processes have used."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor() -> str:
    """Return the processor as /proc/cpuinfo names it: model, family and its vector instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor()
    facts = dict(
        re.findall(r"^(model name|cpu family|model|flags)\s*:\s*(.+)$", text, re.MULTILINE)
    )
    if "model name" not in facts:
        return platform.processor()
    vectors = [name for name in ("avx2", "avx512f", "amx_tile") if name in facts["flags"].split()]
    name = f"{facts['model name']}, family {facts['cpu family']} model {facts['model']}"
    return ", ".join([name, *vectors])


def cpu_ns(pid: int) -> int:
    """Return the nanoseconds of CPU that all threads of a process have used."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)
