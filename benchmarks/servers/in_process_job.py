"""Run a whole job in one process: `python -m benchmarks.servers.in_process_job JOB.json FOLDER`.

Leaves the files that a stack of processes leaves; summary.json holds only the CPU seconds of
training.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from dialoop.clients.trainer import Phase
from dialoop_ops.stack.in_process import in_process

_LOOK_EVERY_S = 0.25


async def train(config: dict[str, Any], folder: Path) -> float:
    """Return the CPU seconds of training, until the trainer is done or has failed."""
    begun_cpu_s: float | None = None
    async with in_process(config, folder=folder) as dialoop:
        while (phase := (await dialoop.trainer.get_status()).phase) is not Phase.DONE:
            if phase is Phase.FAILED:
                raise SystemExit("training failed")
            if phase is Phase.TRAINING and begun_cpu_s is None:
                begun_cpu_s = time.process_time()
            await asyncio.sleep(_LOOK_EVERY_S)
        return time.process_time() - (begun_cpu_s or 0.0)


def main() -> None:
    """Train, then write the summary."""
    job, folder = map(Path, sys.argv[1:])
    config = json.loads(job.read_text("utf-8"))
    summary = {"seconds_by_phase": {"training": {"cpu_s": asyncio.run(train(config, folder))}}}
    (folder / config["run"] / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


if __name__ == "__main__":
    main()
