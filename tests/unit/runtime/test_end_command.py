"""A command whose reader has gone, or that is interrupted, ends without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from dialoop_services.runtime.process import end_command
def main():
    {body}
    return 3
end_command(main)
"""


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [
        ("sys.stdout.write('a line')", 0),  # it stays in the buffer until the end
        ("sys.stdout.write('a' * 1_000_000)", 0),
        ("raise KeyboardInterrupt", 130),
        ("pass", 3),
    ],
)
def test_a_command_ends_quietly_where_nobody_reads(body: str, exit_code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr.decode()) == (exit_code, "")
