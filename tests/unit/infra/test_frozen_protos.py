"""Protos of v1 may be added to, and nothing in them may change."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUF = Path(sys.executable).parent / "buf"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("  int64 epoch = 5;\n", "", 'field "5" with name "epoch" on message "Task" was deleted'),
        ("  int64 epoch = 5;", "  int64 epoch = 15;", 'field "5" with name "epoch"'),
        ("  int64 epoch = 5;", "  int64 pass = 5;", 'changed name from "epoch" to "pass"'),
        ("  int64 epoch = 5;", "  int64 epoch = 5;\n  int64 page = 99;", ""),
    ],
    ids=["deleted", "renumbered", "renamed", "added"],
)
def test_what_breaks_the_image_is_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    path = tmp_path / "proto/dialoop/v1/trajectory.proto"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    ran = subprocess.run(
        [BUF, "breaking", "proto", "--against", ROOT / "proto/v1.binpb"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode == 0) == (not complaint), ran.stdout + ran.stderr
    assert complaint in ran.stdout.replace("Previously present ", "").replace("\\", "")
