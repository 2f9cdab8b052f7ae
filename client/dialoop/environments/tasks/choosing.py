"""Which task an episode plays: one of the environment's, the next one, or the caller's own.

task, seed = chosen_task(environment, TaskChoice(split="train", task_key="35+40"))
task, seed = chosen_task(environment, TaskChoice(given=Given(query="What is 3+4?")))
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
    """What a reset asks for; the same choice twice is a retry."""

    split: str = ""
    task_key: str = ""
    seed: int = 0
    given: Given = field(default_factory=Given)


def chosen_task(environment: Environment, choice: TaskChoice) -> tuple[TaskData, int]:
    """The task and its seed; NotFound (TASK_NOT_FOUND), InvalidInput (DATA_MISSING).

    Asked without a key or a question, an environment with a DataLoadingPrimer takes its next task.
    """
    if not choice.given.is_empty:
        return _given(environment, choice), choice.seed
    if choice.task_key:
        return environment.tasks.get(choice.split, choice.task_key), choice.seed
    if isinstance(environment, ChatEnv) and environment.primer is not None:
        loaded = environment.primer.next()
        metadata = {**loaded.task.metadata, **loaded.info}
        return replace(loaded.task, metadata=metadata), choice.seed or loaded.seed
    if not environment.tasks.splits:
        raise InvalidInput(
            f"The reset of {environment.name} brings no question, and it has no tasks of its own.",
            reason=Reason.DATA_MISSING,
            remedy="Send query, messages or data.",
        )
    return environment.tasks.get(choice.split, choice.task_key), choice.seed


def require_choice(environment: Environment, choice: TaskChoice) -> None:
    """Raise what `chosen_task` would; a next task is not taken for it."""
    takes_next = isinstance(environment, ChatEnv) and environment.primer is not None
    if choice.task_key or not choice.given.is_empty or not takes_next:
        chosen_task(environment, choice)


def prompt_of(answered: ChatHistory) -> History:
    """What a step without a session continues; InvalidHistory (FULL_MISSING) when it is not there.

    A `full` that comes alone ends with one message of the policy.
    """
    full, response, prompt = answered.full, answered.response, answered.prompt
    if prompt is not None and (full is not None or response is not None):
        return prompt
    if full is not None:
        return full[: len(full) - (1 if response is None else len(response))]
    raise InvalidHistory(
        "full is missing.",
        reason=Reason.FULL_MISSING,
        remedy="Send full, or prompt and response: there is no session that knows the prompt.",
    )


def settled(environment: Environment, choice: TaskChoice) -> TaskChoice:
    """The choice with the split it means, so that a retry that names it is the same choice."""
    if not choice.given.is_empty or not environment.tasks.splits:
        return choice
    return replace(choice, split=environment.tasks.require_split(choice.split))


def _given(environment: Environment, choice: TaskChoice) -> TaskData:
    if choice.task_key or choice.split:
        raise InvalidInput(
            "The reset names a task and brings a question of its own.",
            reason=Reason.TASK_AND_QUERY,
            remedy="Send one of the two.",
        )
    if not isinstance(environment, TakesQuestions):
        raise Unsupported(
            f"Environment {environment.name} plays its own tasks only.",
            reason=Reason.QUERY_UNSUPPORTED,
            remedy="Reset with a task_key of ListTasks.",
        )
    return environment.task_from(choice.given)
