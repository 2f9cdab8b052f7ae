"""Measure the seconds of `import dialoop` and `dialoop --help`, each in new processes.

python -m benchmarks.start_up --tries 20 > start_up.json

`import_dialoop_s` is measured inside a process that has started already; the other two are whole
processes, from their start to their end. `python_s` is a process that does nothing: the share of
the others that is not ours. The first run of each is left out, since it may compile and fill the
page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.servers.figures import print_figures

IMPORT = """
import time
started = time.perf_counter()
import dialoop
print(time.perf_counter() - started)
"""


def inside() -> float:
    """Return a measurement of the seconds of the import alone."""
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def whole(*command: str) -> Callable[[], float]:
    """Return a measurement of the seconds of a whole process."""

    def run() -> float:
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        return time.perf_counter() - started

    return run


def figures(measure: Callable[[], float], tries: int) -> dict[str, float]:
    """Return least and median seconds of several tries."""
    measure()
    seconds = [measure() for _ in range(tries)]
    return {"least": round(min(seconds), 4), "median": round(statistics.median(seconds), 4)}


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    options = parser.parse_args()
    dialoop = str(Path(sys.executable).with_name("dialoop"))
    load_before = os.getloadavg()[0]
    measured = {
        "python_s": figures(whole(sys.executable, "-c", ""), options.tries),
        "import_dialoop_s": figures(inside, options.tries),
        "dialoop_help_s": figures(whole(dialoop, "--help"), options.tries),
    }
    context = {
        "benchmark": "start_up",
        "tries": options.tries,
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "targets_s": {"import_dialoop_s": 0.1, "dialoop_help_s": 0.3},
    }
    print_figures(context, measured)


if __name__ == "__main__":
    main()
