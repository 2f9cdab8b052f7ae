"""Runs untrusted code in confined processes, and trusted functions that may hang in killable ones.

Code, or a function's name and arguments, enter; an `Execution` or the function's result leaves.

execution = await Sandbox().run("print(6 * 7)", timeout_s=5)
result = await run_killable("grading:same", {"a": 1, "b": 2}, timeout_s=5)
"""

from dialoop.sandbox.execution import Execution as Execution
from dialoop.sandbox.execution import Verdict as Verdict
from dialoop.sandbox.killable import KillableFunction as KillableFunction
from dialoop.sandbox.killable import run_killable as run_killable
from dialoop.sandbox.levels import Assessment as Assessment
from dialoop.sandbox.levels import Isolation as Isolation
from dialoop.sandbox.levels import Level as Level
from dialoop.sandbox.limits import Limits as Limits
from dialoop.sandbox.persistent import PersistentInterpreter as PersistentInterpreter
from dialoop.sandbox.sandbox import Sandbox as Sandbox
from dialoop.sandbox.self_test import effective_isolation as effective_isolation
