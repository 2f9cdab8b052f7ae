"""Load what a user names as `module:attribute` or `file.py:attribute`; the only place that does.

load_attribute("my_env:make", what="environment", reason="ENVIRONMENT_NOT_FOUND")
load_attribute("rewards/maths.py:compute_score", what="reward function")
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from dialoop.errors import DialoopError, InvalidConfig
from dialoop.reasons import Reason
from dialoop.user_functions import call_now, raised_at

_IMPORT_MACHINERY = (__file__, pkgutil.__file__, "<frozen ", "importlib/__init__.py")


def load_attribute(
    path: str,
    *,
    what: str,
    reason: Reason | None = None,
    built_in: Iterable[str] = (),
    more_names: str = "",
) -> Any:
    """Return the attribute at `module:attribute`; `built_in` are names that need no path.

    more_names: a sentence of the remedy on where other such names come from.

    The module may be the path of a Python file, which a process loads once. Raises InvalidConfig
    with `reason`. Its message says whether the path, the module or the attribute is wrong, or where
    the module itself raised.
    """
    built_in = tuple(built_in)
    names = ", ".join(built_in)
    remedy = (
        f"Use {names and f'{names} or '}module:attribute; the module must lie beside the config, "
        "in the current folder or on PYTHONPATH."
    )
    module, _, attribute = path.rpartition(":")
    if not module or not attribute:
        near = nearest(path, built_in)
        hint = f"Did you mean '{near}'? " if near else ""
        raise InvalidConfig(
            f"There is no {what} '{path}'.", reason=reason, remedy=hint + remedy + more_names
        )
    try:
        if module.endswith(".py"):
            return attrgetter(attribute)(_module_of(Path(module).expanduser().resolve()))
        return pkgutil.resolve_name(path)
    except DialoopError:
        raise
    except Exception as error:
        where = _raised_at(error)
        why = f"{where}: {type(error).__name__}: {error}" if where else str(error)
        raise InvalidConfig(
            f"The {what} '{path}' cannot be loaded: {why}.",
            reason=reason,
            remedy="Correct that line." if where else remedy,
        ) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name that the fewest typing errors turn into this one; "" where all are far.

    An error is a letter too many, missing, wrong, or in its neighbour's place (Damerau's distance
    of adjacent letters). More than two in five letters wrong are another word.
    """
    errors = {other: _typing_errors(name.casefold(), other.casefold()) for other in names}
    near = {n: count for n, count in errors.items() if count <= 0.4 * max(len(n), len(name))}
    return min(near, key=lambda other: (near[other], other), default="")


def _typing_errors(left: str, right: str) -> int:
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        before, last, row = row, before, [i]
        for j, b in enumerate(right, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _module_of(file: Path) -> ModuleType:
    """Return the module in a file, under a name that no other file has."""
    digest = blake2b(str(file).encode(), digest_size=6).hexdigest()
    name = f"{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def make_from_options(target: Any, options: dict[str, Any], use: str) -> Any:
    """Return `target`, or call it with the options; InvalidConfig when it does not take them."""
    if not callable(target):
        if options:
            raise InvalidConfig(
                f"The environment '{use}' takes no options, since it is not a function or class.",
                remedy="Leave the options out, or name a function that takes them.",
            )
        return target
    try:
        inspect.signature(target).bind(**options)
    except ValueError:
        pass  # a callable without a signature
    except TypeError as error:
        raise InvalidConfig(
            f"The environment '{use}' does not take these options: {error}.",
            reason=Reason.BAD_OPTIONS,
            remedy="Use the parameters of the function as options.",
        ) from error
    try:
        return call_now(target, **options)
    except DialoopError:
        raise
    except Exception as error:
        raise InvalidConfig(
            f"The environment '{use}' cannot be made: {raised_at(error)}: {error}.",
            reason=Reason.ENVIRONMENT_NOT_FOUND,
            remedy="Correct that line.",
        ) from error


def _raised_at(error: Exception) -> str:
    """Return "file, line n" where the user's module raised; "" when it was never reached."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _IMPORT_MACHINERY)
    ]
    if not frames:
        return ""
    # The error may come from deep in a library: show the last line of the user's own module.
    own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{own.filename}, line {own.lineno}"
