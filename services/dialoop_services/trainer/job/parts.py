"""The objects that a job works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dialoop_services.trainer.publish.placement import Split

if TYPE_CHECKING:
    from dialoop.clients.replay import ReplayClient

    from dialoop_services.trainer.data.demonstrations import WarmStartBatches
    from dialoop_services.trainer.job.evaluation import Evaluator
    from dialoop_services.trainer.job.status import StatusBoard
    from dialoop_services.trainer.learner.learner import Learner
    from dialoop_services.trainer.publish.publisher import Publisher
    from dialoop_services.trainer.records.records import RunRecords
    from dialoop_services.trainer.recovery.checkpoint import Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """The learner, the clients of the other services and the run's files; tests pass fakes."""

    learner: Learner
    demonstrations: WarmStartBatches | None
    replay: ReplayClient
    publisher: Publisher
    evaluator: Evaluator
    checkpoints: Checkpoints
    records: RunRecords
    board: StatusBoard
    placement: Split = field(default_factory=Split)
