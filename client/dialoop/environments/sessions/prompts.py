"""Prompts in the mode of their environment: what a step adds, and what tells it from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from dialoop.chat import History

if TYPE_CHECKING:
    from dialoop.environments.episode import Episode
    from dialoop.environments.modes import Answered

Prompt: TypeAlias = Any
"""A History, a str, or token ids as a tuple; two that meet are of one kind."""


def prompt_of_episode(episode: Episode) -> Prompt:
    """Return what the policy sees next, in the environment's mode."""
    return episode.history if episode.view is None else episode.view.prompt.prompt


def full_of(prompt: Prompt, answered: Answered) -> Prompt:
    """Return the step's full: what the policy sent as such, or the prompt and its response."""
    if answered.full is not None:
        return answered.full
    before: Prompt = prompt if answered.prompt is None else answered.prompt
    response: Prompt = answered.response
    if response is None:
        return before
    return before.extend(response) if isinstance(before, History) else before + response


def content_of(prompt: Prompt, answered: Answered) -> Any:
    """Return what tells a step from another one: the response, however it was sent.

    What does not continue the prompt, or contradicts itself, is returned as it is.
    """
    sent: Prompt | None = answered.response
    if answered.full is not None:
        sent = _following(prompt, answered.full)
    fits = answered.prompt in (None, prompt) and answered.response in (None, sent)
    return answered if sent is None or not fits else sent


def added_to(full: Prompt, after: Prompt) -> Prompt | None:
    """Return what follows a step's full in the next prompt; None where the past was changed."""
    return _following(full, after)


def _following(start: Prompt, whole: Prompt) -> Prompt | None:
    """Return what follows `start` in `whole`; None where that begins otherwise."""
    return whole[len(start) :] if whole[: len(start)] == start else None
