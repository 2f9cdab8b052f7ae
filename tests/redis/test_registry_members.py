"""A thousand instances that join, renew, leave, die and are replaced, against the real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy(reason="a thousand instances for a quarter of a minute")
@pytest.mark.redis
@pytest.mark.timeout(240)
def test_the_list_of_a_thousand_instances_is_that_of_those_that_live() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.fleet.registry_members",
            "--seconds",
            "15",
            "--seed",
            "7",
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}:{ROOT / 'services'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    figures = json.loads(ended.stdout)
    assert figures["instances"] == 1000
    assert figures["list_was_right"]
    assert figures["num_changes_seen"] > 0
