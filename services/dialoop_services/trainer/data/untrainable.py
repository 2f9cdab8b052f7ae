"""Groups that no train step can use, found before anything is computed.

What is wrong is asked of the very code that makes rows for the model and of the loss itself; only
when that refuses a batch are its groups gone through one by one, and then their trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dialoop.errors import DialoopError, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from dialoop.clients.replay import GroupLease
    from dialoop.sequences import PolicyVersion

    from dialoop_services.trainer.data.batches import Batch, TrainedSequence


class Reader(Protocol):
    """The learner, as far as it looks at sequences without computing anything."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""

    def rows_to_train(self, sequences: Rows[TrainedSequence], *, current: PolicyVersion) -> object:
        """A DialoopError where one does not fit or lacks what the loss needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a group cannot be trained: which trajectory, and what is wrong with it."""

    lease: GroupLease
    trajectory_id: str
    error: DialoopError

    @property
    def reason(self) -> str:
        """The error's reason in snake_case, under which the group is set aside."""
        return self.error.reason.lower()


def faults_of(batch: Batch, learner: Reader, current: PolicyVersion) -> tuple[Fault, ...]:
    """What is wrong with the groups to train; empty where a train step can take them all."""
    sequences = batch.sequences
    if _refusal(sequences, learner, current) is None:
        return ()
    kept: list[TrainedSequence] = []
    faults: list[Fault] = []
    for prompt, lease in enumerate(batch.train):
        own = [one for one in sequences if one.prompt == prompt]
        error = _refusal([*kept, *own], learner, current)
        if error is None:
            kept += own
        else:
            faults.append(_named(lease, own, error, learner, current))
    return tuple(faults)


def _named(
    lease: GroupLease,
    own: list[TrainedSequence],
    error: DialoopError,
    learner: Reader,
    current: PolicyVersion,
) -> Fault:
    """The first trajectory that is refused alone, with what it is refused for; else the first."""
    trajectories = lease.group.trajectories
    for trajectory in trajectories:
        theirs = {id(sequence) for sequence in trajectory.sequences}
        found = [one for one in own if id(one.sequence) in theirs]
        refused = _refusal(found, learner, current)
        if refused is not None:
            return Fault(lease=lease, trajectory_id=trajectory.trajectory_id, error=refused)
    return Fault(lease=lease, trajectory_id=trajectories[0].trajectory_id, error=error)


def _refusal(
    sequences: Rows[TrainedSequence], learner: Reader, current: PolicyVersion
) -> DialoopError | None:
    try:
        for one in sequences:
            _require_known_tokens(one, learner.vocab_size)
        if sequences:
            learner.rows_to_train(sequences, current=current)
    except DialoopError as error:
        return error
    return None


def _require_known_tokens(one: TrainedSequence, vocab_size: int) -> None:
    """The embedding has no row for other ids, and on a GPU that takes the process with it."""
    ids = one.sequence.token_ids
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise InvalidInput(
            f"Token id {wrong[0]} is outside a vocabulary of {vocab_size}.",
            reason="TOKEN_OUT_OF_RANGE",
            remedy="Play with the tokenizer of the model that is trained.",
        )
