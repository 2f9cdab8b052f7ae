"""Six published bugs: without checks their jobs end as if all were well, with them they stop."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.silent_bugs.bugs import BUGS


@pytest.mark.heavy(reason="fourteen small jobs: minutes")
@pytest.mark.timeout(3000)
def test_each_bug_is_silent_without_checks_and_named_with_them() -> None:
    command = [sys.executable, "-m", "benchmarks.silent_bugs", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["wrong"], set(report["results"])) == ([], {"no_bug", *BUGS})
    assert len(BUGS) == 6
    for name in BUGS:
        stop = report["results"][name]["with"]["stopped"]
        assert stop["trajectory"], name
        assert None not in (stop["version"], stop["token"]), name
