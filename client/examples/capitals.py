"""An environment of your own: questions about capitals, with an atlas to look them up.

A config names it by import path: `[environment] use = "capitals:capitals"`. This folder must then
be the current one or on PYTHONPATH.
"""

from dialoop.environments import (
    ChatEnv,
    Episode,
    NamedReward,
    TaskData,
    TaskSource,
    ToolInputError,
    task_not_found,
    tool_environment,
)

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima"}


class Countries(TaskSource):
    """A task for each country; its key is the country."""

    splits = ("train",)

    def keys(self, split: str) -> tuple[str, ...]:
        """Return the countries."""
        return tuple(CAPITALS)

    def get(self, split: str, key: str) -> TaskData:
        """Return the question about one country."""
        if key not in CAPITALS:
            raise task_not_found(split, key)
        question = f"What is the capital of {key}? Answer with Result=<city><submit>."
        return TaskData(key=key, question=question, answer=CAPITALS[key])


def atlas(query: str) -> str:
    """Look up a capital; the policy reads a ToolInputError, other errors are failures."""
    if query not in CAPITALS:
        raise ToolInputError(f"no country {query}")
    return CAPITALS[query]


def right_city(episode: Episode) -> bool:
    """Return whether the answer is the right city, which counts as 1."""
    return f"Result={episode.task.answer}<submit>" in episode.answer_text


def brevity(episode: Episode) -> float:
    """Return a reward near 1 for short answers."""
    return 1 / (1 + len(episode.answer_text) / 100)


def capitals() -> ChatEnv:
    """Return the whole environment."""
    return tool_environment(
        name="capitals",
        description="Capitals of the world, with an atlas.",
        tasks=Countries(),
        tools=[atlas],
        rewards=[right_city, NamedReward(brevity, weight=0.1)],
    )
