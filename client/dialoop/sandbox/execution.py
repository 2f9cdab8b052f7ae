"""What came of running a piece of code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    r"""Execution(stdout="4\n", stderr="", succeeded=True, duration_s=0.002).

    Code that fails, times out or kills its interpreter is an execution that did not succeed, with
    the reason in `stderr`; only failures of the sandbox itself are exceptions.
    """

    stdout: str
    stderr: str
    succeeded: bool
    duration_s: float
    timed_out: bool = False
    # Whether output was cut; the text says so too.
    truncated: bool = False
    # Whether the interpreter is gone, and all the code had defined with it.
    ended: bool = False
