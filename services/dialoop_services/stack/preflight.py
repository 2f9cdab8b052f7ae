"""Check what can be checked before anything starts: engine, model, tasks, Redis, ports."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dialoop.agents import load_agent
from dialoop.environments import load_environment
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer

from dialoop_services.config.engines import ENGINES, facts_of_engine
from dialoop_services.stack.layout import ports_of
from dialoop_services.stack.processes.redis_server import FoundRedis, find_redis

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig
    from dialoop_services.config.tables import EnvironmentSection

_BUILT_IN = ("arithmetic", "jsonl")


def check(config: JobConfig) -> None:
    """Raise InvalidConfig for the first thing that would stop the job later."""
    _check_engine(config)
    if config.model.directory:
        check_model(Path(config.model.directory))
    for section in config.all_environments:
        _check_tasks(config, section)
        if section.agent:
            load_agent(section.agent)
    # The stack looks for both again when it starts. By then it may have deleted an old run.
    redis = find_redis(os.environ) if config.store == "redis" else FoundRedis()
    ports_of(config, with_redis=bool(redis.program))


def _check_engine(config: JobConfig) -> None:
    facts = facts_of_engine(config.engine)
    for package in facts.packages:
        if importlib.util.find_spec(package) is None:
            raise InvalidConfig(
                f'engine is "{config.engine}", and {package} is not installed.',
                reason=facts.reason,
                remedy=facts.install,
            )
    # An engine of the user's own is imported by the inference service alone: it may need torch.
    module, _, _ = facts.path.partition(":")
    if config.engine not in ENGINES and _find_module(module) is None:
        raise InvalidConfig(
            f'engine is "{config.engine}", and there is no module {module}.',
            reason=facts.reason,
            remedy="Write module:Class; the module's folder must be the current one or on "
            "PYTHONPATH.",
        )


def _find_module(name: str) -> object:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a package that it is said to lie in
        return None


def check_model(directory: Path) -> None:
    """Raise InvalidConfig unless a model directory has configuration, weights and tokenizer."""
    if not directory.is_dir():
        raise InvalidConfig(
            f"There is no model directory {directory}.",
            reason=Reason.MODEL_MISSING,
            remedy="Set model.directory to a Hugging Face model directory, or leave it empty.",
        )
    for pattern, what in (("config.json", "config.json"), ("*.safetensors", "safetensors file")):
        if not any(directory.glob(pattern)):
            raise InvalidConfig(
                f"The model directory {directory} has no {what}.",
                reason=Reason.MODEL_INCOMPLETE,
                remedy="Save the model there with model.save_pretrained(directory).",
            )
    Tokenizer.from_directory(directory)


def _check_tasks(config: JobConfig, section: EnvironmentSection) -> None:
    """Check the splits of a built-in environment; a user's own is checked by its service."""
    if section.kind not in _BUILT_IN:
        return
    environment = load_environment(section.kind, section.arguments)
    wanted = [section.train_split] if config.train.num_steps else []
    if config.evaluation.num_tasks and section is config.environment:
        wanted.append(section.heldout_split)
    for split in wanted:
        if split not in environment.tasks.splits:
            raise InvalidConfig(
                f"The environment {environment.name} has no split {split!r}.",
                reason=Reason.SPLIT_NOT_FOUND,
                remedy=f"Choose one of {', '.join(environment.tasks.splits)}, or set "
                "heldout_file, or set evaluation.num_tasks to 0.",
            )
