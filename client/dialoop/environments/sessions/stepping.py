"""One step of an environment within its time; whatever goes wrong has an owner."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from dialoop.chat import ChatHistory, History
from dialoop.environments import Answered, Environment, Episode, Managed, Outcome
from dialoop.environments.failures import failure_of
from dialoop.errors import DialoopError
from dialoop.trajectory import Failure, Owner


async def stepped(
    environment: Environment, episode: Episode, answered: Answered, *, timeout_s: float
) -> Outcome:
    """The environment's outcome; raises only for a bad `answered`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await environment.step(episode, answered)
    except DialoopError:
        raise
    except Exception as error:
        reason = "STEP_TIMEOUT" if isinstance(error, TimeoutError) else "STEP_FAILED"
        what = f"Environment {environment.name}"
        failure = failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)
        return _unanswered(episode, answered).fail(failure)


def abandoned(episode: Episode, answered: Answered) -> Outcome:
    """The outcome of a step that was cancelled: it is never scored, and no retry runs it again."""
    failure = Failure(
        owner=Owner.ENVIRONMENT,
        reason="STEP_CANCELLED",
        message="Whoever asked for this step went away and did not come back in time.",
    )
    return _unanswered(episode, answered).fail(failure)


async def closed(environment: Environment, episode: Episode) -> None:
    """Let the environment free what the episode holds; its errors are only logged."""
    if not isinstance(environment, Managed):
        return
    try:
        await environment.close(episode)
    except Exception as error:
        what = f"Closing an episode of {environment.name}"
        failure_of(error, owner=Owner.ENVIRONMENT, reason="CLOSE_FAILED", what=what)


def _unanswered(episode: Episode, answered: Answered) -> Outcome:
    """The outcome of a step in which the environment added nothing."""
    if not isinstance(answered, ChatHistory):
        after = replace(episode, step_index=episode.step_index + 1)
        return Outcome(episode=after, response=History())
    response = answered.response or History()
    full = answered.full or episode.history.extend(response)
    after = replace(episode, history=full, step_index=episode.step_index + 1)
    return Outcome(episode=after, response=response)
