"""Code that claims to have passed: at every isolation level, as the other attacks.

In its own interpreter code can claim what it likes, and these tests say so. Tests that run in a
second interpreter are not impressed, and the code never sees them.
"""

from __future__ import annotations

import pytest
from dialoop.errors import InvalidInput

from tests.support.sandbox_world import scene  # noqa: F401
from tests.support.waiting import PATIENCE_S

SECRET = "hidden-4711"
TESTS = f"""
seen = "{SECRET}"
assert solve(2) == 4
assert solve(3) == 9
print("all passed")
"""
ANSWER = (
    "import os, sys\n"
    "frame = sys._getframe()\n"
    "while 'nonce' not in frame.f_locals: frame = frame.f_back\n"
    "os.write(3, b'\\0\\0\\0\\x11' + frame.f_locals['nonce'] + b'\\x01')\n"
)
# It stays in the interpreter: every later piece of code is read, not run, and reported as passed.
STAY = (
    "import os, struct\n" + ANSWER + "def read(n):\n"
    "    parts = b''\n"
    "    while len(parts) < n: parts += os.read(3, n - len(parts))\n"
    "    return parts\n"
    "while True:\n"
    "    request = read(struct.unpack('!I', read(4))[0])\n"
    "    os.write(1, b'all passed, I read: ' + request[16:])\n"
    "    os.write(3, b'\\0\\0\\0\\x11' + request[:16] + b'\\x01')\n"
)
FORGERIES = {
    "says so": "print('all passed')\nraise SystemExit(0)",
    "answers early": "def solve(x): return 0\n" + ANSWER,
    "answers in each call": (
        "def solve(x):\n" + "".join(f"    {line}\n" for line in ANSWER.splitlines())
    ),
    "stays": STAY,
    "ends well": "import os\nos._exit(0)",
    "ends well later": "import os\ndef solve(x): os._exit(0)",
    "exits well later": "def solve(x): raise SystemExit(0)",
    "is equal to all": (
        "class Equal(int):\n"
        "    def __eq__(self, other): return True\n"
        "    def __repr__(self): return 'Equal()'\n"
        "def solve(x): return Equal()"
    ),
    "writes a call as its value": (
        "class V:\n    def __repr__(s): return 'exit()'\nsolve = lambda x: V()"
    ),
    "breaks the reader": (
        "class V:\n    def __repr__(s): return '(' * 100000\nsolve = lambda x: V()"
    ),
    "writes an answer of its own": (
        "import gc, sys\n"
        "def solve(x):\n"
        "    mark = sys._getframe(1).f_locals['mark']\n"
        "    print(mark + repr(('error', 'SystemExit', '0')))\n"
        "    sys.stdout.flush(); import os; os.dup2(2, 1)"
    ),
    "raises what ends tests": (
        "class SystemExit(BaseException): pass\ndef solve(x): raise SystemExit(0)"
    ),
    "patches what compares": (
        "import builtins\n"
        "builtins.repr = lambda value: '4'\n"
        "builtins.AssertionError = Warning\n"
        "def solve(x): return 4"
    ),
    "asks the asker": (
        "import os, sys\n"
        "def solve(x):\n"
        "    f = sys._getframe()\n"
        "    while 'nonce' not in f.f_locals: f = f.f_back\n"
        "    os.write(3, b'\\0\\0\\0\\x12' + f.f_locals['nonce'] + b'\\x02x')\n"
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
async def test_no_forgery_passes_tests_that_see_it_from_outside(scene, forgery):
    verdict = await scene.sandbox.examine(forgery, TESTS, functions=("solve",), timeout_s=3)
    assert not verdict.passed
    assert SECRET not in verdict.code.stdout + verdict.code.stderr
    assert "all passed" not in verdict.tests.stdout


async def test_what_does_the_task_passes_and_its_tricks_stay_its_own(scene):
    code = "import sys\nprint('mine')\ndef solve(x):\n    print('noise')\n    return x * x"
    verdict = await scene.sandbox.examine(code, TESTS, functions=("solve",), timeout_s=PATIENCE_S)
    assert verdict.passed
    assert verdict.tests.stdout == "all passed\n"
    assert verdict.code.stdout == "mine\n"


async def test_a_tested_function_sees_its_arguments_and_nothing_else(scene):
    code = (
        "import gc, sys\n"
        "def solve(x):\n"
        "    texts = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        f"    secret = {SECRET[:6]!r} + {SECRET[6:]!r}\n"
        "    return any(secret in v for d in texts for v in d.values() if isinstance(v, str))"
    )
    verdict = await scene.sandbox.examine(
        code, f"seen = '{SECRET}'\nassert solve(1) is False", functions=("solve",), timeout_s=20
    )
    assert verdict.passed, verdict.tests.stderr


async def test_values_and_exceptions_come_back_as_built_ins(scene):
    code = (
        "def same(*a, **b): return (a, b)\n"
        "def fail(): raise KeyError('k')\n"
        "class Own(Exception): pass\n"
        "def own(): raise Own('o')\n"
    )
    tests = """
values = (1, -2.5, 'a\\n', b'x', None, True, [1, (2,)], {'a': {1, 2}})
assert same(*values, k=1) == (values, {'k': 1})
for function, kind in ((fail, KeyError), (own, RuntimeError), (missing, RuntimeError)):
    try:
        function()
    except kind as error:
        assert type(error) is kind, error
    else:
        raise AssertionError(function)
try:
    same(object())
except TypeError:
    pass
else:
    raise AssertionError
"""
    functions = ("same", "fail", "own", "missing")
    verdict = await scene.sandbox.examine(code, tests, functions=functions, timeout_s=PATIENCE_S)
    assert verdict.passed, verdict.tests.stderr


async def test_success_in_its_own_interpreter_is_the_codes_own_claim(scene):
    """What the documents promise no more than: see `Execution.succeeded`."""
    done = await scene.sandbox.run(ANSWER + "raise SystemExit(3)")
    assert done.succeeded
    session = scene.sandbox.interpreter()
    assert (await session.run(STAY)).succeeded
    graded = await session.run(TESTS)
    assert graded.succeeded
    assert SECRET in graded.stdout  # it has read the tests
    await session.close()


@pytest.mark.parametrize("names", [(), "solve", ("a b",), ("if",), ("x)\nprint(1",)])
async def test_functions_are_named_by_names(scene, names):
    with pytest.raises(InvalidInput):
        await scene.sandbox.examine("", "", functions=names)
