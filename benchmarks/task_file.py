"""Measure a source of tasks from a file: seconds until it is ready, memory, and a page of keys.

    python -m benchmarks.task_file --num-tasks 1000000 --rounds 5

Lines have the form and length of GSM8K's. `json_cpu_s` is the CPU of parsing each line and nothing
else: the least that a check of the file can cost. Each round is a process of its own. All figures
are medians of the rounds; `memory_mb` is what the process grew by.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dialoop.environments import JsonlTasks

from benchmarks.servers.figures import print_figures

PAGE_SIZE = 1000


def write_tasks(path: Path, num_tasks: int) -> None:
    """Write tasks of about 220 bytes."""
    story = (
        "Tom has {} apples and buys 3 more, then gives half of them to Ann, who eats two a day. "
    )
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_tasks):
            question = story.format(number) + "How many are left after a week?"
            answer = f"He has {number}+3={number + 3} of them.\n#### {number + 3}"
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def measure(path: Path) -> dict[str, float]:
    """Measure in this process."""
    cpu = time.process_time()
    with path.open(encoding="utf-8") as file:
        for line in file:
            json.loads(line)
    json_cpu_s = time.process_time() - cpu
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    tasks = JsonlTasks(path, heldout_fraction=0.1)
    ready_s, ready_cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    begin = time.perf_counter()
    tasks.page("train", page_size=PAGE_SIZE, shuffle_seed=1)
    return {
        "ready_s": ready_s,
        "ready_cpu_s": ready_cpu_s,
        "json_cpu_s": json_cpu_s,
        "memory_mb": grown / 1024,
        "page_of_1000_ms": 1e3 * (time.perf_counter() - begin),
    }


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-tasks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        sys.stdout.write(json.dumps(measure(options.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.jsonl"
        write_tasks(path, options.num_tasks)
        command = [sys.executable, "-m", "benchmarks.task_file", "--file", str(path)]
        rounds = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(options.rounds)
        ]
        result = {name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]}
        about = {"num_tasks": options.num_tasks, "file_mb": round(path.stat().st_size / 2**20, 1)}
    about |= {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count() or 0}
    print_figures(about, result)


if __name__ == "__main__":
    main()
