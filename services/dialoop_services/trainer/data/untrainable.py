"""Groups that no train step can use, found before anything is computed.

The code that makes rows for the model, and the loss itself, decide. Only when they refuse a batch
does this module try its groups one by one, and then the trajectories of a refused group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dialoop.errors import DialoopError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Rows

    from dialoop.clients.replay import GroupLease
    from dialoop_learning.packing.rows import TokenRow

    from dialoop_services.trainer.data.batches import Batch, TrainedSequence

    ToRows = Callable[[Rows[TrainedSequence]], list[TokenRow]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrainable:
    """A group that cannot be trained, its first bad trajectory, and that trajectory's error."""

    lease: GroupLease
    trajectory_id: str
    error: DialoopError

    @property
    def reason(self) -> str:
        """Return the error's reason in snake_case, with which the group is set aside."""
        return self.error.reason.lower()


def read_rows(batch: Batch, to_rows: ToRows) -> tuple[list[TokenRow], tuple[Untrainable, ...]]:
    """Return the rows of the groups to train and (), or [] and the groups that cannot be trained.

    `to_rows` is the learner's. It raises a DialoopError where a sequence cannot be trained.
    """
    sequences = batch.sequences
    try:
        return (to_rows(sequences) if sequences else []), ()
    except DialoopError:
        pass  # the rest finds out which groups are at fault
    kept: list[TrainedSequence] = []
    untrainable: list[Untrainable] = []
    for index, lease in enumerate(batch.train):
        own = [row for row in sequences if row.group_index == index]
        error = _refusal([*kept, *own], to_rows)
        if error is None:
            kept += own
        else:
            untrainable.append(_blame(lease, own, error, to_rows))
    return [], tuple(untrainable)


def _blame(
    lease: GroupLease,
    own: list[TrainedSequence],
    error: DialoopError,
    to_rows: ToRows,
) -> Untrainable:
    """Return the first trajectory that is refused alone, with its error; else the first of all."""
    trajectories = lease.group.trajectories
    for trajectory in trajectories:
        theirs = {id(sequence) for sequence in trajectory.sequences}
        rows = [row for row in own if id(row.sequence) in theirs]
        refusal = _refusal(rows, to_rows)
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
