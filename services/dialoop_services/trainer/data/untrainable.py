"""Groups that no train step can use, found before anything is computed.

What is wrong is asked of the very code that makes rows for the model and of the loss itself; only
when that refuses a batch are its groups gone through one by one, and then their trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Rows

    from dialoop.clients.replay import GroupLease

    from dialoop_services.learning.packing.rows import TokenRow
    from dialoop_services.trainer.data.batches import Batch, TrainedSequence

    ToRows = Callable[[Rows[TrainedSequence]], list[TokenRow]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrainable:
    """A group that cannot be trained: which trajectory of it, and what is wrong with that."""

    lease: GroupLease
    trajectory_id: str
    error: DialoopError

    @property
    def reason(self) -> str:
        """The error's reason in snake_case, under which the group is set aside."""
        return self.error.reason.lower()


def read_rows(batch: Batch, to_rows: ToRows) -> tuple[list[TokenRow], tuple[Untrainable, ...]]:
    """Return the rows of the groups to train, or else which of the groups cannot be trained.

    `to_rows` is the learner's: it raises a DialoopError where a sequence cannot be trained.
    """
    sequences = batch.sequences
    try:
        return (to_rows(sequences) if sequences else []), ()
    except DialoopError:
        pass  # whose fault it is, is what the rest finds out
    kept: list[TrainedSequence] = []
    untrainable: list[Untrainable] = []
    for prompt, lease in enumerate(batch.train):
        own = [one for one in sequences if one.prompt == prompt]
        error = _refusal([*kept, *own], to_rows)
        if error is None:
            kept += own
        else:
            untrainable.append(_named(lease, own, error, to_rows))
    return [], tuple(untrainable)


def _named(
    lease: GroupLease,
    own: list[TrainedSequence],
    error: DialoopError,
    to_rows: ToRows,
) -> Untrainable:
    """The first trajectory that is refused alone, with what it is refused for; else the first."""
    trajectories = lease.group.trajectories
    for trajectory in trajectories:
        theirs = {id(sequence) for sequence in trajectory.sequences}
        found = [one for one in own if id(one.sequence) in theirs]
        refusal = _refusal(found, to_rows)
        if refusal is not None:
            return Untrainable(lease=lease, trajectory_id=trajectory.trajectory_id, error=refusal)
    return Untrainable(lease=lease, trajectory_id=trajectories[0].trajectory_id, error=error)


def _refusal(sequences: Rows[TrainedSequence], to_rows: ToRows) -> DialoopError | None:
    try:
        if sequences:
            to_rows(sequences)
    except DialoopError as error:
        return error
    return None
