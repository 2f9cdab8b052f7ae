"""Environments by name: a built-in one, or `module:attribute` of an author's own file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dialoop.environments.environment import Environment
from dialoop.environments.games import twenty_questions
from dialoop.environments.standard import arithmetic, chat, completion, jsonl
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.user_functions import call_now, raised_at

_REQUIRED = ("name", "version", "description", "tasks", "traits", "reset", "step", "score")

BUILT_IN: Mapping[str, Callable[..., Environment]] = {
    "arithmetic": arithmetic,
    "chat": chat,
    "completion": completion,
    "jsonl": jsonl,
    "twenty_questions": twenty_questions,
}


def load_environment(use: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Return a built-in environment by name, or the one at `module:attribute`.

    The attribute is an environment, or a function or class that makes one from the options. Raise
    InvalidConfig when there is no such environment.
    """
    target = BUILT_IN.get(use) or load_attribute(
        use, what="environment", reason=Reason.ENVIRONMENT_NOT_FOUND, built_in=BUILT_IN
    )
    environment: Environment = make_environment(target, dict(options or {}), use)
    missing = [name for name in _REQUIRED if not hasattr(environment, name)]
    if missing:
        raise InvalidConfig(
            f"{use} is not an environment: it has no {missing[0]}.",
            reason=Reason.NOT_AN_ENVIRONMENT,
            remedy="Name a ChatEnv, or a function that returns one.",
        )
    return environment


def make_environment(target: Any, options: dict[str, Any], use: str) -> Any:
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
