"""The choice of an episode's task: one of the environment's, the next one, or the caller's own.

task, seed = choose_task(environment, TaskChoice(split="train", task_key="35+40"))
task, seed = choose_task(environment, TaskChoice(question=Given(query="What is 3+4?")))
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dialoop.chat import ChatHistory, History
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.environment import Environment, Given, TakesQuestions
from dialoop.environments.episode import TaskData
from dialoop.errors import InvalidHistory, InvalidInput, Unsupported
from dialoop.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """The task that a reset names; the same choice twice is a retry."""

    split: str = ""
    task_key: str = ""
    seed: int = 0
    question: Given = field(default_factory=Given)


def choose_task(environment: Environment, choice: TaskChoice) -> tuple[TaskData, int]:
    """Return the task and its seed; NotFound (TASK_NOT_FOUND), InvalidInput (DATA_MISSING).

    Without a key or a question, an environment with a DataLoadingPrimer takes its next task.
    """
    if not choice.question.is_empty:
        return _caller_task(environment, choice), choice.seed
    if choice.task_key:
        return environment.tasks.get(choice.split, choice.task_key), choice.seed
    if isinstance(environment, ChatEnv) and environment.primer is not None:
        loaded = environment.primer.next()
        metadata = {**loaded.task.metadata, **loaded.info}
        return replace(loaded.task, metadata=metadata), choice.seed or loaded.seed
    if not environment.tasks.splits:
        raise InvalidInput(
            f"The reset of {environment.name} has no question, and the environment has no tasks.",
            reason=Reason.DATA_MISSING,
            remedy="Send query, messages or data.",
        )
    return environment.tasks.get(choice.split, choice.task_key), choice.seed


def require_choice(environment: Environment, choice: TaskChoice) -> None:
    """Raise what `choose_task` would raise, without taking a next task."""
    takes_next = isinstance(environment, ChatEnv) and environment.primer is not None
    if choice.task_key or not choice.question.is_empty or not takes_next:
        choose_task(environment, choice)


def prompt_of(answered: ChatHistory) -> History:
    """Return the prompt that a step without a session answers; InvalidHistory (FULL_MISSING).

    If `full` comes alone, its last message is the policy's.
    """
    full, response, prompt = answered.full, answered.response, answered.prompt
    if prompt is not None and (full is not None or response is not None):
        return prompt
    if full is not None:
        return full[: len(full) - (1 if response is None else len(response))]
    raise InvalidHistory(
        "`full` is missing.",
        reason=Reason.FULL_MISSING,
        remedy="Send `full`, or `prompt` and `response`, since no session holds the prompt.",
    )


def resolve_split(environment: Environment, choice: TaskChoice) -> TaskChoice:
    """Return the choice with its split filled in, so that a retry that names the split is equal."""
    if not choice.question.is_empty or not environment.tasks.splits:
        return choice
    return replace(choice, split=environment.tasks.require_split(choice.split))


def _caller_task(environment: Environment, choice: TaskChoice) -> TaskData:
    if choice.task_key or choice.split:
        raise InvalidInput(
            "The reset names a task and also brings a question of its own.",
            reason=Reason.TASK_AND_QUERY,
            remedy="Send either a task or a question.",
        )
    if not isinstance(environment, TakesQuestions):
        raise Unsupported(
            f"Environment {environment.name} plays only its own tasks.",
            reason=Reason.QUERY_UNSUPPORTED,
            remedy="Reset with a task_key from ListTasks.",
        )
    return environment.task_from(choice.question)
