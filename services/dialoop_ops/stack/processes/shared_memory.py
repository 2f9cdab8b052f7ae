"""Prepare the folder in memory through which the trainer hands policies to local replicas."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dialoop_services.config.job import JobConfig

    from dialoop_ops.stack.run_dir import RunDir

MEMORY = Path("/dev/shm")
# Two policies and the one being written. A container may have only 64 MiB.
_NUM_POLICIES = 3
_MIN_BYTES = 32 << 20


def memory_for(config: JobConfig, run_dir: RunDir, *, memory: Path = MEMORY) -> Path | None:
    """Return a folder for the run, always the same; None when memory has no room for policies."""
    if config.inference.data_plane != "shared_memory" or not os.access(memory, os.W_OK):
        return None
    weights = run_dir.model(config).glob("*.safetensors")
    num_bytes = max(_MIN_BYTES, sum(file.stat().st_size for file in weights))
    if shutil.disk_usage(memory).free < _NUM_POLICIES * num_bytes:
        return None
    digest = hashlib.sha256(str(run_dir.path.resolve()).encode()).hexdigest()[:16]
    return memory / f"dialoop-{os.getuid()}-{digest}"


@contextmanager
def fill_with_latest(folder: Path | None, policies: Path) -> Iterator[None]:
    """Keep the folder with only the newest of `policies` in it, and delete it afterwards.

    What a killed stack left in it is deleted first. A replica that starts before the trainer has
    published anything loads the newest policy, as it would from `policies` itself.
    """
    if folder is None:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        _copy_latest(policies, folder)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_latest(policies: Path, folder: Path) -> None:
    pointer = policies / "latest.json"
    if not pointer.is_file():
        return
    try:
        weights = Path(json.loads(pointer.read_text("utf-8"))["path"])
    except (ValueError, KeyError):  # a disk damaged it; the trainer publishes again at its start
        return
    if (policies / weights).is_file():
        (folder / weights).parent.mkdir(parents=True)
        shutil.copyfile(policies / weights, folder / weights)
        shutil.copyfile(pointer, folder / pointer.name)
