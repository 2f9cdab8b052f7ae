"""Calls of an environment, which turn its exceptions into failures with an owner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from dialoop.chat import ChatHistory, History
from dialoop.environments.environment import Environment, Managed, OpensSlowly
from dialoop.environments.episode import Episode, Opening, Outcome, TaskData
from dialoop.errors import DialoopError, Unavailable
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.trajectory import Failure, Owner

if TYPE_CHECKING:
    from dialoop.environments.modes import Answered


async def open_within(
    timeout_s: float, environment: OpensSlowly, task: TaskData, seed: int
) -> Opening | DialoopError:
    """Return the opening, or the error: OPEN_TIMEOUT, OPEN_FAILED or the environment's own."""
    try:
        async with asyncio.timeout(timeout_s):
            return await environment.open(task, seed)
    except DialoopError as error:
        return error
    except (Exception, asyncio.CancelledError) as error:
        _raise_if_cancelled(error)
        reason = Reason.OPEN_TIMEOUT if isinstance(error, TimeoutError) else Reason.OPEN_FAILED
        what = "Opening an episode"
        failure = failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)
        return Unavailable(failure.message, reason=reason, remedy="Try again.")


async def try_step(environment: Environment, episode: Episode, answered: Answered) -> Outcome:
    """Return the environment's outcome; raise only for a bad `answered`."""
    try:
        return await environment.step(episode, answered)
    except DialoopError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        _raise_if_cancelled(error)
        return failed_step(environment, episode, answered, error)


def _raise_if_cancelled(error: BaseException) -> None:
    """Raise a cancellation that somebody asked for; one of the environment's own is its failure."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def failed_step(
    environment: Environment, episode: Episode, answered: Answered, error: BaseException
) -> Outcome:
    """Return the outcome of a failed step: STEP_TIMEOUT for a TimeoutError, else STEP_FAILED."""
    reason = Reason.STEP_TIMEOUT if isinstance(error, TimeoutError) else Reason.STEP_FAILED
    what = f"Environment {environment.name}"
    failure = failure_of(error, owner=Owner.ENVIRONMENT, reason=reason, what=what)
    return _without_response(episode, answered).fail(failure)


def cut_step(
    environment: Environment,
    episode: Episode,
    answered: Answered,
    *,
    reason: str,
    cancelled: asyncio.CancelledError,
) -> Outcome:
    """Return the outcome of a step that was cancelled for STEP_TIMEOUT or STEP_CANCELLED.

    It is never scored, and no retry runs it again. For a time-out the log shows the stack trace.
    """
    what = f"Environment {environment.name}"
    failure = (
        failure_of(cancelled, owner=Owner.ENVIRONMENT, reason=reason, what=what)
        if reason == Reason.STEP_TIMEOUT
        else Failure(
            owner=Owner.ENVIRONMENT,
            reason=reason,
            message="The caller of this step disconnected and did not retry in time.",
        )
    )
    return _without_response(episode, answered).fail(failure)


async def close_episode(environment: Environment, episode: Episode) -> None:
    """Let the environment free what the episode holds; its errors are only logged."""
    if not isinstance(environment, Managed):
        return
    try:
        await environment.close(episode)
    except Exception as error:
        what = f"Closing an episode of {environment.name}"
        failure_of(error, owner=Owner.ENVIRONMENT, reason=Reason.CLOSE_FAILED, what=what)


def _without_response(episode: Episode, answered: Answered) -> Outcome:
    """Return the outcome of a step to which the environment added nothing."""
    if not isinstance(answered, ChatHistory):
        after = replace(episode, step_index=episode.step_index + 1)
        return Outcome(episode=after, response=History())
    response = answered.response or History()
    full = answered.full or episode.history.extend(response)
    after = replace(episode, history=full, step_index=episode.step_index + 1)
    return Outcome(episode=after, response=response)
