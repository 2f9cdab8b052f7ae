"""Tests of untrusted code from outside: two interpreters, and only data between them.

The code's interpreter never gets the tests, and has no way to the interpreter that decides. Between
them this process passes texts, which it does not read: arguments one way, results the other way.
"""

from __future__ import annotations

import keyword
import secrets
import time
from collections.abc import Sequence

from dialoop.errors import InvalidInput
from dialoop.sandbox.confined.interpreter import ASKED, CHANNEL, NONCE_BYTES
from dialoop.sandbox.execution import Verdict
from dialoop.sandbox.worker import MAX_QUESTION_BYTES, Questions, Worker

# Runs before the tests, in their interpreter. A result is a literal, so it has no class of the
# code's own whose __eq__ could say what it likes.
_ASKING = """
def _dialoop_function(name, nonce):
    import ast, builtins, os, struct
    def read(size):
        parts = b""
        while len(parts) < size:
            part = os.read({channel}, size - len(parts))
            if not part:
                raise SystemExit("The sandbox has gone.")
            parts += part
        return parts
    def exchange(question):
        frame = nonce + bytes([{asked}]) + question
        frame = struct.pack("!I", len(frame)) + frame
        while frame:
            frame = frame[os.write({channel}, frame):]
        return read(struct.unpack("!I", read(4))[0]).decode()
    def call(*arguments, **named):
        question = repr((name, arguments, named))
        try:
            ast.literal_eval(question)
        except (ValueError, SyntaxError):
            raise TypeError(f"{{name}} takes built-in types only here") from None
        if len(question.encode()) > {max_bytes}:
            raise ValueError(f"the arguments of {{name}} are too long")
        try:
            kind, *values = ast.literal_eval(exchange(question.encode()))
            if kind == "value":
                return ast.literal_eval(values[0])
            error, text = map(str, values)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise RuntimeError(f"{{name}} returned something that is no built-in value") from None
        kind = getattr(builtins, error, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
        raise RuntimeError(f"{{name}}: {{error}}: {{text}}")
    call.__name__ = call.__qualname__ = name
    return call
"""
# Runs in the code's interpreter, which may do what it likes with it: it only tells what the code
# returns, and the code may return what it likes.
_CALL = """
def _dialoop_call(text, mark):
    import ast
    name, arguments, named = ast.literal_eval(text)
    try:
        function = globals().get(name)
        if function is None:
            answer = ("error", "NoAnswer", "The code defines no such function.")
        else:
            answer = ("value", repr(function(*arguments, **named)))
    except BaseException as error:
        answer = ("error", type(error).__name__, str(error)[:500])
    print(mark + repr(answer))
_dialoop_call({text!r}, {mark!r})
"""


def require_names(functions: Sequence[str]) -> None:
    """Raise InvalidInput unless each is a name that Python can call."""
    for name in functions:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidInput(f"'{name}' is no name of a function.", remedy="Use its plain name.")
    if isinstance(functions, str) or not functions:
        raise InvalidInput("functions is empty or a text.", remedy='Use ("solve",).')


async def examine(
    theirs: Worker, ours: Worker, code: str, tests: str, functions: Sequence[str], timeout_s: float
) -> Verdict:
    """Run the code in `theirs`, then the tests in `ours`; see `Sandbox.examine`."""
    end = time.monotonic() + timeout_s
    execution = await theirs.execute(code, timeout_s)

    async def answer(question: bytes) -> bytes:
        nonlocal execution
        left = end - time.monotonic()
        if execution.ended or left <= 0:
            return _error("It has ended.")
        mark = secrets.token_hex(16)
        text = question.decode("utf-8", "replace")
        call = await theirs.execute(_CALL.format(text=text, mark=mark), left)
        if call.ended:
            execution = call
        _, _, value = call.stdout.rpartition(mark)
        value = value.strip()
        if call.ended or call.truncated or not value:
            return _error("It did not answer.")
        return value.encode("utf-8", "replace")

    nonce = secrets.token_bytes(NONCE_BYTES)
    asking = _ASKING.format(channel=CHANNEL, asked=ASKED, max_bytes=MAX_QUESTION_BYTES // 2)
    names = "".join(f"{name} = _dialoop_function({name!r}, {nonce!r})\n" for name in functions)
    left = max(end - time.monotonic(), 0.001)
    tested = await ours.execute(asking + names + tests, left, Questions(nonce=nonce, answer=answer))
    return Verdict(passed=tested.succeeded, tests=tested, code=execution)


def _error(text: str) -> bytes:
    return repr(("error", "NoAnswer", text)).encode()
