"""The result of running a piece of code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    r"""The result of code: Execution(stdout="4\n", stderr="", succeeded=True, duration_s=0.002).

    When code fails, times out or kills its interpreter, `succeeded` is false and `stderr` has the
    reason. Only failures of the sandbox itself are exceptions.

    `succeeded` is what the interpreter reports, and the code runs inside the interpreter: code that
    wants to can report success for itself, and read and answer all that runs in the same
    interpreter after it. Reward what `Sandbox.examine` finds, never `succeeded` or the output.
    """

    stdout: str
    stderr: str
    succeeded: bool
    duration_s: float
    timed_out: bool = False
    # Whether output was cut; a note in the text says so too.
    truncated: bool = False
    # Whether the interpreter has ended, so that everything the code defined is lost.
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What tests found about code that they saw from outside.

    `passed`: the tests ran to their end without an exception, in an interpreter that the code could
    not reach. `tests` is what they printed and how they failed; `code` is the code's own output.
    """

    passed: bool
    tests: Execution
    code: Execution
