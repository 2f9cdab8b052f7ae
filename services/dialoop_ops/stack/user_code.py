"""Check what a config names of the user's own code: environments, agents, rewards, the loss ...

Environments, agents, rewards and the advantage estimator are imported, as the services import them.
A loss, an optimiser, a data plane and trackers are looked up in their source instead, since
importing them may import torch, which takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.agents import load_agent
from dialoop.environments import ChatEnv, Environment, load_environment
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_extras.task_players import load_token_play
from dialoop_extras.text_environment.setups import load_text_setup
from dialoop_learning.loss.facts import LOSSES, OPTIMIZERS, facts_of
from dialoop_services.config.engines import ENGINES
from dialoop_services.config.tables import DATA_PLANES, EnvironmentSection
from dialoop_services.config.values import did_you_mean
from dialoop_services.scorer.estimator import load_estimator
from dialoop_services.scorer.rewards import load_rewards, rehearse
from dialoop_services.trainer.data.demonstrations import Demonstration, read_demonstrations

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dialoop_services.config.job import JobConfig

_LOSSES = "dialoop_learning.loss.losses"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a name in the config is of: how errors call it, and the names that need no path."""

    what: str
    reason: Reason
    built_in: Collection[str] = ()


_LOSS = _Kind("loss", Reason.UNKNOWN_LOSS, LOSSES)
_ENGINE = _Kind("engine", Reason.ENGINE_NOT_FOUND, ENGINES)
_OPTIMIZER = _Kind("optimiser", Reason.OPTIMIZER_NOT_FOUND, OPTIMIZERS)
_DATA_PLANE = _Kind("data plane", Reason.DATA_PLANE_NOT_FOUND, DATA_PLANES)
_TRACKER = _Kind("tracker", Reason.TRACKER_NOT_FOUND)


@contextmanager
def working_in(folder: Path | None) -> Iterator[None]:
    """Import and read files as a service does that works in `folder`; None changes nothing."""
    if folder is None:
        yield
        return
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


def load_environments(config: JobConfig) -> tuple[Environment, ...]:
    """Return the config's environments; raise InvalidConfig for one that cannot do its part."""
    environments = []
    for section in config.all_environments:
        environment = load_environment(
            section.kind, section.arguments, tools_in_prompt=section.tools_in_prompt
        )
        if section.name and section.name != environment.name:
            raise InvalidConfig(
                f"name is {section.name!r} in [environment], and the environment that "
                f"{section.kind} makes is called {environment.name!r}.",
                reason=Reason.ENVIRONMENT_NOT_FOUND,
                remedy="Leave name out, or set it to that.",
            )
        _check_splits(config, section, environment)
        if isinstance(environment, ChatEnv):
            environment.rehearse()
        if config.train.mode == "rl":
            load_token_play(section, environment)
        environments.append(environment)
    names = [environment.name for environment in environments]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidConfig(
            f"Two environments are called {twice!r}.",
            remedy="Leave one out, or give it another name where it is made.",
        )
    return tuple(environments)


def _check_splits(config: JobConfig, section: EnvironmentSection, environment: Environment) -> None:
    trains = config.train.num_steps or config.warm_start.num_steps
    wanted = [section.train_split] if trains else []
    if config.evaluation.num_tasks and section is config.environment:
        wanted.append(section.heldout_split)
    splits = environment.tasks.splits
    # Who names an empty split to train on offers tasks to the queue himself.
    offers = {section.train_split} if "train_split" in section.model_fields_set else set()
    for split in wanted:
        if split not in splits or not (split in offers or environment.tasks.num_tasks(split)):
            lacks = "no task in its split" if split in splits else "no split"
            raise InvalidConfig(
                f"The environment {environment.name} has {lacks} {split!r}.",
                reason=Reason.SPLIT_NOT_FOUND,
                remedy=f"Choose one of {', '.join(splits)}, or set heldout_file, or a larger "
                "heldout_fraction where there are few tasks, or set evaluation.num_tasks to 0.",
            )


def demonstrations_in_files(config: JobConfig) -> Iterator[list[Demonstration]]:
    """Read each file of demonstrations that the job learns from, or is measured by."""
    sft, warm_start = config.sft, config.warm_start
    if config.train.mode == "sft" and config.train.num_steps:
        for file, split in ((sft.file, "train"), (sft.heldout_file, "test")):
            if file:
                yield read_demonstrations(file, sft.ignore_columns, split=split)
    elif config.train.mode != "sft" and warm_start.num_steps and warm_start.file:
        columns = warm_start.ignore_columns
        yield read_demonstrations(warm_start.file, columns, table="[warm_start]")


def check_demonstrations(config: JobConfig, environment: Environment) -> None:
    """Raise InvalidConfig where the demonstrations to train on are missing or malformed."""
    is_sft, warm_start = config.train.mode == "sft", config.warm_start
    if not (config.train.num_steps if is_sft else warm_start.num_steps):
        return
    for _ in demonstrations_in_files(config):
        pass  # read to see what is wrong
    has_file = config.sft.file if is_sft else warm_start.file
    demonstrates = isinstance(environment, ChatEnv) and environment.demonstrate is not None
    if not has_file and not demonstrates:
        raise InvalidConfig(
            f"The environment {environment.name} has no demonstrations.",
            reason=Reason.NO_DEMONSTRATIONS,
            remedy="Name a file in [sft]."
            if is_sft
            else "Name a file in [warm_start], or set its num_steps to 0.",
        )


def check_functions(config: JobConfig) -> None:
    """Raise InvalidConfig for an agent or text environment that cannot be imported.

    So does a reward or an estimator, which is called once too.
    """
    for section in config.all_environments:
        if section.agent:
            load_agent(section.agent, section.options)
        for use in section.text_environments:
            load_text_setup(use)
    for reward in load_rewards(config.scorer.rewards):
        rehearse(reward)
    estimator = load_estimator(config.scorer.advantage_estimator)
    if estimator is not None:
        estimator.rehearse()


def check_sources(config: JobConfig) -> None:
    """Raise InvalidConfig for an engine, optimiser, ... that its module does not have."""
    names = [
        (_ENGINE, config.engine),
        (_OPTIMIZER, config.train.optimizer),
        (_DATA_PLANE, config.inference.data_plane),
        *((_TRACKER, name) for name in config.trackers.use),
    ]
    for kind, name in names:
        if name not in kind.built_in:
            _parameters_of(kind, name)


def check_loss(config: JobConfig) -> None:
    """Raise InvalidConfig for a loss that does not exist, or an option that it does not take."""
    train = config.train
    name = train.demonstration_loss if train.mode == "sft" else train.loss
    is_built_in = name in LOSSES
    path = f"{_LOSSES}:{facts_of(name).formula or name}" if is_built_in else name
    parameters = _parameters_of(_LOSS, path)
    if parameters is None:
        return  # only running the module tells which function this is
    options = parameters[1:]  # after the loss inputs
    for option in config.train.loss_options:
        if option not in options:
            raise InvalidConfig(
                f"The loss {name} has no option {option!r}.",
                reason=Reason.UNKNOWN_LOSS_OPTION,
                remedy=f"{_sentence(did_you_mean(option, options))}"
                f"It takes {', '.join(options) or 'none'}.",
            )


def _parameters_of(kind: _Kind, path: str) -> tuple[str, ...] | None:
    """Return the names of a function's parameters; None where its source does not tell."""
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise _cannot_load(kind, path, "it is no import path")
    loaded = getattr(sys.modules.get(module), attribute, None)
    if inspect.isfunction(loaded):
        return tuple(inspect.signature(loaded).parameters)
    tree = _source_of(kind, path, module)
    if tree is None or "." in attribute:
        return None
    names: list[str] = []
    for statement in _top_level(tree.body):
        if isinstance(statement, ast.FunctionDef) and statement.name == attribute:
            return _names_of(statement.args)
        names += _bound_by(statement)
    if attribute in names or "*" in names or "__getattr__" in names:
        return None
    hint = _sentence(did_you_mean(attribute, names))
    raise _cannot_load(kind, path, f"{module} has no {attribute}", hint=hint)


def _sentence(text: str) -> str:
    """Return a text that begins with a capital; names in it keep theirs."""
    return text[:1].upper() + text[1:]


def _source_of(kind: _Kind, path: str, module: str) -> ast.Module | None:
    spec = find_module(module)
    if spec is None:
        raise _cannot_load(kind, path, f"there is no module {module}")
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_text("utf-8"))
    except SyntaxError as error:
        raise InvalidConfig(
            f"The {kind.what} '{path}' cannot be loaded: {spec.origin}, line {error.lineno}: "
            f"{error.msg}.",
            reason=kind.reason,
            remedy="Correct that line.",
        ) from error


def find_module(name: str) -> ModuleSpec | None:
    """Return where a module lies, without importing the packages that it lies in."""
    parts = name.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:  # of a module that was made by hand
        return None
    for number in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = ".".join(parts[:number])
        spec = PathFinder.find_spec(path, spec.submodule_search_locations)
    return spec


def _cannot_load(kind: _Kind, path: str, why: str, *, hint: str = "") -> InvalidConfig:
    built_in = "".join(f"{name}, " for name in kind.built_in)
    return InvalidConfig(
        f"The {kind.what} '{path}' cannot be loaded: {why}.",
        reason=kind.reason,
        remedy=f"{hint}Use {built_in}{built_in and 'or '}module:attribute; the module must lie "
        "beside the config, in the current folder or on PYTHONPATH.",
    )


def _top_level(body: Collection[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those inside `if` and `try`."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(statement, (ast.If, ast.Try, ast.ExceptHandler)):
                yield from _top_level(getattr(statement, name, []))


def _bound_by(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds; "*" for all names of another module."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in statement.names]
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return [
        node.id
        for target in targets
        if target
        for node in ast.walk(target)
        if isinstance(node, ast.Name)
    ]


def _names_of(arguments: ast.arguments) -> tuple[str, ...] | None:
    if arguments.kwarg is not None:
        return None
    groups = (arguments.posonlyargs, arguments.args, arguments.kwonlyargs)
    return tuple(argument.arg for group in groups for argument in group)
