"""Environments of the verifiers package as agents: extra `dialoop-extras[verifiers]`.

    agent = VerifiersAgent({
        "taskset": {"id": "my_tasks"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    })
    trajectory = await play_agent(task, agent=agent, host=AgentHost(recordings=recordings))

verifiers owns the loop, its tools and its rewards, and calls the recording's URL as it would any
model. A task's key is the position in the taskset; `VerifiersTasks` lists them to an environment
service. In a config both are one table, whose options are the fields of EnvConfig:

    [environment]
    use = "verifiers"
    agent = "verifiers"
    options = {taskset = {id = "gsm8k"}, agent = {harness = {id = "null"}}}
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dialoop.agents import AgentOutcome
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.source import TaskSource, task_not_found
from dialoop.errors import InvalidConfig, NotFound
from dialoop.reasons import Reason
from dialoop.trajectory import Failure, Owner, Reward

if TYPE_CHECKING:
    from dialoop.agents import AgentConnection, AgentTask

_LOG = logging.getLogger(__name__)

# verifiers reads keys from variables only, and keeps those named so from the programs it starts.
_KEY_VARIABLE = "DIALOOP_RECORDING_{}_API_KEY"
_CONTEXT_FULL = "context_length_exceeded"
_OWNERS = {
    "ProviderError": Owner.INFERENCE,
    "InterceptionError": Owner.INFERENCE,
    "TunnelError": Owner.INFERENCE,
    "ToolsetError": Owner.TOOL,
    "SandboxError": Owner.TOOL,
}


class VerifiersAgent:
    """Plays one task of a verifiers environment per call, with the environment's own rewards.

    config: a `verifiers.v1.EnvConfig`, or its fields. Each run has an environment of its own, so
    that nothing is shared and cancelling a run ends all it had started.
    """

    def __init__(self, config: Any) -> None:
        self._package = _package()
        self._config = _config(self._package, config)

    async def __call__(self, task: AgentTask, connection: AgentConnection) -> AgentOutcome:
        """Run the episode; its errors are failures with their owners."""
        package = self._package
        environment = package.load_environment(self._config)
        data = _task(environment.taskset, task.task.split, task.key)
        variable = _KEY_VARIABLE.format(uuid4().hex)  # other runs have keys of their own
        client = package.EvalClientConfig(base_url=connection.base_url, api_key_var=variable)
        context = package.ModelContext(model=connection.model, client=client)
        os.environ[variable] = connection.api_key
        try:
            async with environment.serving():
                episode = await environment.run_episode(data, context)
        finally:
            del os.environ[variable]
        return outcome_of(episode)


class VerifiersTasks(TaskSource):
    """The tasks of a verifiers taskset, for an environment service to list to collectors.

    ChatEnv(name="gsm8k", tasks=VerifiersTasks({"taskset": {"id": "gsm8k"}}))

    limit: how many an infinite taskset gives.
    """

    def __init__(self, config: Any, *, limit: int = 10_000) -> None:
        package = _package()
        taskset = package.load_taskset(_config(package, config).taskset)
        self._tasks = tuple(_data_of(task) for task in islice(taskset, limit))

    @property
    def splits(self) -> tuple[str, ...]:
        """Return one split: a taskset has none of its own."""
        return ("train",)

    def keys(self, split: str) -> Sequence[str]:
        """Return the tasks' positions in the taskset."""
        self.require_split(split)
        return [data.key for data in self._tasks]

    def get(self, split: str, key: str) -> TaskData:
        """Return the prompt alone: what solves the task stays with verifiers."""
        split = self.require_split(split)
        if not key.isdecimal() or int(key) >= len(self._tasks):
            raise task_not_found(split, key)
        return self._tasks[int(key)]


def verifiers(*, limit: int = 10_000, name: str = "verifiers", **config: Any) -> ChatEnv:
    """Return the environment that lists a taskset's tasks; its agent plays and rewards them."""
    tasks = VerifiersTasks(config, limit=limit)
    return ChatEnv(name=name, description="A taskset of verifiers.", tasks=tasks)


def verifiers_agent(
    *, limit: int = 10_000, name: str = "verifiers", **config: Any
) -> VerifiersAgent:
    """Return the agent for the same options; `limit` and `name` belong to the environment."""
    return VerifiersAgent(config)


def outcome_of(episode: Any) -> AgentOutcome:
    """Read a verifiers Episode; only one whose single trace is the policy's has rewards."""
    if len(episode.traces) > 1:
        return AgentOutcome(failures=(_several_agents(len(episode.traces)),))
    failures = tuple(_failures(episode))
    if failures or not episode.traces:
        return AgentOutcome(failures=failures)
    (trace,) = episode.traces
    rewards = tuple(
        Reward(name=name, value=float(reward.score), weight=float(reward.weight))
        for name, reward in trace.rewards.items()
        if reward is not None
    )
    labels = {f"verifiers/{name}": f"{v:g}" for name, v in trace.metrics.items() if v is not None}
    if trace.stop_condition:
        labels["verifiers/stop"] = str(trace.stop_condition)
    return AgentOutcome(rewards=rewards, labels=labels)


def _failures(episode: Any) -> Iterator[Failure]:
    """Yield a failure for each error that ended the episode; a full context only cut it."""
    if episode.ok:
        return
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if any(_CONTEXT_FULL in error.message for error in errors):
        return
    if not errors:
        yield Failure(
            owner=Owner.ENVIRONMENT, reason=Reason.NOT_OK, message="verifiers gave no reason."
        )
    is_unscored = any(None in trace.rewards.values() for trace in episode.traces)
    for error in errors:
        error_id = uuid4().hex[:12]
        _LOG.error("verifiers failed, error_id %s: %s %s", error_id, error.type, error.message)
        owner = _OWNERS.get(error.type, Owner.ENVIRONMENT)
        if error.type == "TaskError" and is_unscored:
            owner = Owner.REWARD
        yield Failure(
            owner=owner, reason=error.type, message=f"verifiers failed (error_id {error_id})."
        )


def _several_agents(number: int) -> Failure:
    text = f"The verifiers episode has {number} agents; a recording is the run of one."
    return Failure(owner=Owner.ENVIRONMENT, reason=Reason.SEVERAL_AGENTS, message=text)


def _task(taskset: Any, split: str, key: str) -> Any:
    """Return the task at a position."""
    remaining = islice(taskset, int(key), None) if key.isdecimal() else iter(())
    task = next(remaining, None)
    if task is None:
        raise task_not_found(split, key)
    return task


def _data_of(task: Any) -> TaskData:
    return TaskData(key=str(task.data.idx), question=task.data.prompt_text or "(no prompt)")


def _config(package: Any, config: Any) -> Any:
    fields = dict(config) if isinstance(config, Mapping) else config
    try:
        return package.resolve_env_config(fields)
    except ModuleNotFoundError as error:
        raise NotFound(
            f"verifiers cannot load its environment: {error}.",
            reason=Reason.ENVIRONMENT_NOT_FOUND,
            remedy="Install the package of the taskset or harness, or correct its id.",
        ) from error
    except ValueError as error:
        raise InvalidConfig(
            f"verifiers does not take this environment: {error}.",
            reason=Reason.BAD_OPTIONS,
            remedy="Give the fields of verifiers.v1.EnvConfig.",
        ) from error


def _package() -> Any:
    try:
        import verifiers.v1 as package
    except ImportError as error:
        raise InvalidConfig(
            "Environments of verifiers need the `verifiers` package, 0.4 or later.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop-extras[verifiers]"',
        ) from error
    return package
