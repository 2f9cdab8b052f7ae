"""Snapshots of episodes: taken after a step, sealed with a digest, and gone on from elsewhere."""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from dialoop.environments.environment import Snapshots
from dialoop.episode import Redo
from dialoop.errors import PreconditionFailed
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.trajectory import Owner
from dialoop.user_functions import call

if TYPE_CHECKING:
    from dialoop.environments.environment import Environment
    from dialoop.environments.episode import Opening, Outcome
    from dialoop.episode import Resumed

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32


async def take_snapshot(environment: Environment, outcome: Outcome, max_bytes: int) -> Outcome:
    """Return the outcome with its snapshot, where its episode goes on and has some.

    One that fails or is too large is left out: the episode cannot be resumed after this step.
    """
    redo = Redo.parse(getattr(environment, "redo", Redo.NEVER))
    if redo is not Redo.SNAPSHOT or outcome.episode.done:
        return outcome
    what = f"A snapshot of {environment.name}"
    try:
        state = bytes(await call(_able(environment).snapshot, outcome.episode))
    except Exception as error:
        failure_of(error, owner=Owner.ENVIRONMENT, reason=Reason.SNAPSHOT_TORN, what=what)
        return outcome
    if len(state) > max_bytes:
        log.warning("%s has %d bytes, of %d at most.", what, len(state), max_bytes)
        return outcome
    return replace(outcome, snapshot=sha256(state).digest() + state)


async def restore(environment: Environment, opening: Opening, resumed: Resumed) -> Opening:
    """Return the opening in the state of the snapshot; PreconditionFailed (SNAPSHOT_TORN)."""
    digest, state = resumed.snapshot[:_DIGEST_BYTES], resumed.snapshot[_DIGEST_BYTES:]
    role = getattr(environment, "policy_role", "assistant")
    answers = [message for message in resumed.messages if message.role == role]
    episode = replace(
        opening.episode,
        history=resumed.messages,
        step_index=resumed.step_index,
        answer=answers[-1] if answers else None,
    )
    problem = "" if sha256(state).digest() == digest else "its digest is another"
    if not problem:
        try:
            episode = await call(_able(environment).restore, episode, state)
        except Exception as error:
            what = f"Restoring an episode of {environment.name}"
            failure_of(error, owner=Owner.ENVIRONMENT, reason=Reason.SNAPSHOT_TORN, what=what)
            problem = f"{type(error).__name__}: {error}"
    if problem:
        raise PreconditionFailed(
            f"An episode of {environment.name} cannot be resumed from its snapshot: {problem}.",
            reason=Reason.SNAPSHOT_TORN,
            remedy="Play it from the start.",
        )
    return replace(opening, episode=episode)


def _able(environment: Environment) -> Snapshots:
    """Return the environment; TypeError where it has no snapshots."""
    if not isinstance(environment, Snapshots):
        raise TypeError(f"Environment {environment.name} has no methods snapshot and restore.")
    return environment
