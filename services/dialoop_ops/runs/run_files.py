"""The files of a run that come in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TRAJECTORIES = "trajectories.jsonl"


def trajectory_files(run_dir: Path) -> tuple[Path, ...]:
    """Return the parts of trajectories.jsonl, oldest first: .000001.jsonl, ..., the one in use."""
    older = sorted(run_dir.glob("trajectories.[0-9]*.jsonl"), key=number_of)
    newest = run_dir / TRAJECTORIES
    return (*older, newest) if newest.is_file() else tuple(older)


def number_of(part: Path) -> int:
    """Return the number of a part that is full."""
    return int(part.name.split(".")[1])
