"""Environments by name: a built-in one, or `module:attribute` of an author's own file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dialoop.answers import AnswerForm, grammar_of
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.environment import Environment
from dialoop.environments.standard import arithmetic, chat, completion, jsonl
from dialoop.errors import InvalidConfig
from dialoop.extras import more_names, offered_paths
from dialoop.import_paths import load_attribute, make_from_options
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer

_REQUIRED = ("name", "version", "description", "tasks", "traits", "reset", "step", "score")

BUILT_IN: Mapping[str, Callable[..., Environment]] = {
    "arithmetic": arithmetic,
    "chat": chat,
    "completion": completion,
    "jsonl": jsonl,
}


@runtime_checkable
class MakesEnvironment(Protocol):
    """What can be played as an environment but is none itself, such as a TextSetup."""

    def as_environment(self) -> Environment:
        """Return the environment."""


def load_environment(
    use: str,
    options: Mapping[str, Any] | None = None,
    *,
    tools_in_prompt: bool = True,
    model_dir: Path | None = None,
) -> Environment:
    """Return a built-in environment by name, or the one at `module:attribute`.

    The attribute is an environment, a TextSetup, or a function or class that makes one from the
    options. Without `tools_in_prompt` a ChatEnv has none of its tools in the prompt. It reads calls
    as the template of `model_dir` writes them, unless it says otherwise. Raise InvalidConfig when
    there is no such environment.
    """
    paths = {} if use in BUILT_IN else offered_paths("environments")
    target = BUILT_IN.get(use) or load_attribute(
        paths.get(use, use),
        what="environment",
        reason=Reason.ENVIRONMENT_NOT_FOUND,
        built_in=(*BUILT_IN, *paths),
        more_names=more_names("environments"),
    )
    made = make_from_options(target, dict(options or {}), use)
    environment: Environment = made.as_environment() if isinstance(made, MakesEnvironment) else made
    missing = [name for name in _REQUIRED if not hasattr(environment, name)]
    if missing:
        raise InvalidConfig(
            f"{use} is not an environment: it has no {missing[0]}.",
            reason=Reason.NOT_AN_ENVIRONMENT,
            remedy="Name a ChatEnv or a TextSetup, or a function that returns one.",
        )
    if isinstance(environment, ChatEnv) and not tools_in_prompt:
        environment = replace(environment, tools_in_prompt=False)
    return environment if model_dir is None else bind_to_model(environment, model_dir)


def bind_to_model(environment: Environment, model_dir: Path) -> Environment:
    """Return a ChatEnv that reads calls as the model writes them, unless it says otherwise."""
    # The built-in model is made later, and writes them as an environment without a model reads.
    if not isinstance(environment, ChatEnv) or not (model_dir / "tokenizer.json").is_file():
        return environment
    from dialoop.templates.chat_template import ChatTemplate

    with contextlib.suppress(InvalidConfig):
        template = ChatTemplate.of(Tokenizer.from_directory(model_dir)).for_tools(())
        if calls := grammar_of(template.profile.written_call):
            form = AnswerForm(reasoning=template.profile.reasoning, calls=calls)
            return environment.bound_to(form)
    return environment
