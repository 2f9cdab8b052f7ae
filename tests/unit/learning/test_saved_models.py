"""Model directories that we write are as readable as everything else that a process writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model

from benchmarks.servers.families import FAMILIES, make_family


def saved_policy(directory: Path) -> None:
    load_policy(make_tiny_model(directory.parent / "start")).save(directory)


@pytest.mark.parametrize(
    "make",
    [make_tiny_model, lambda directory: make_family(next(iter(FAMILIES)), directory), saved_policy],
    ids=["tiny", "family", "policy"],
)
def test_whoever_the_umask_lets_may_read_the_weights(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        make(tmp_path / "open")
        os.umask(0o027)
        make(tmp_path / "for a group")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "open").iterdir()} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "for a group").iterdir()} == {0o640}
