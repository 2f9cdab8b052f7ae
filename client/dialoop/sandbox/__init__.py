"""Runs untrusted code in confined processes, and trusted functions that may hang in killable ones.

Code, or a function's name and arguments, enter; an `Execution` or the function's result leaves.

execution = await Sandbox().run("print(6 * 7)", timeout_s=5)
result = await run_killable("grading:same", {"a": 1, "b": 2}, timeout_s=5)
"""

from dialoop.sandbox.execution import Execution, Verdict
from dialoop.sandbox.killable import KillableFunction, run_killable
from dialoop.sandbox.levels import Assessment, Isolation, Level
from dialoop.sandbox.limits import Limits
from dialoop.sandbox.persistent import PersistentInterpreter
from dialoop.sandbox.sandbox import Sandbox
from dialoop.sandbox.self_test import effective_isolation

__all__ = [
    "Assessment",
    "Execution",
    "Isolation",
    "KillableFunction",
    "Level",
    "Limits",
    "PersistentInterpreter",
    "Sandbox",
    "Verdict",
    "effective_isolation",
    "run_killable",
]
