"""Learner's methods, each run by all ranks together: the job calls them on the first rank.

    learner = ParallelLearner(ranks)
    learner.make(settings)                   # on the first rank, as everything but `serve`
    learner.train_step(sequences, current=version)
    learner.close()

    ParallelLearner(ranks).serve()           # on every other rank, until the first one closes

With one process it is that process's Learner and nothing else. What a rank refuses while it reads
is raised here and leaves the ranks in step; an error after that ends the run.
"""

from __future__ import annotations

import json
import threading
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dialoop.sequences import PolicyVersion
from dialoop.v1 import trajectory_pb2
from dialoop.wire import sequence_from_proto, sequence_to_proto

from dialoop_services.learning.parallel.group_commands import GroupCommands
from dialoop_services.learning.parallel.ranks import ALONE, Ranks
from dialoop_services.trainer.data.batches import TrainedSequence
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Rows

    from dialoop.sequences import Sequence
    from numpy.typing import NDArray

    from dialoop_services.learning.packing.rows import TokenRow
    from dialoop_services.learning.parallel.group_commands import Command
    from dialoop_services.learning.training import UpdateReport
    from dialoop_services.trainer.learner.learner import TrainStepReport
    from dialoop_services.trainer.learner.learner_files import ExportedWeights

    AnyLearner: TypeAlias = "Learner | ParallelLearner"


class ParallelLearner:
    """The learner of all ranks; one object per rank."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._own: Learner | None = None
        self._calling = threading.Lock()
        self._ask: Callable[[], None] | None = None
        commands = {
            "make": self._make,
            "warm_start_step": self._imitating(Learner.warm_start_rows),
            "sft_step": self._imitating(Learner.sft_rows),
            "heldout_loss": self._imitating(Learner.heldout_loss_of),
            "train_step": self._train_step,
            "logprobs": self._logprobs,
            "export": self._at_path(Learner.export),
            "save": self._at_path(Learner.save),
            "restore": self._restore,
            "move_to": lambda data: lambda: self._learner.move_to(data.decode()),
        }
        self._commands = GroupCommands(ranks, commands)

    def make(self, settings: TrainerSettings) -> None:
        """Load the model on every rank, with the first rank's settings."""
        # The bearer token is of no use to ranks that speak to nobody.
        self._call("make", settings.model_dump_json(exclude={"token"}).encode())

    def serve(self) -> None:
        """Do what the first rank calls, until it closes; for every other rank."""
        self._commands.serve()

    def close(self) -> None:
        """Let the others leave; from the first rank, also after an error."""
        self._commands.close()

    @property
    def num_parameters(self) -> int:
        """Trained parameters; tied ones count once."""
        return self._learner.num_parameters

    @property
    def needs_advantages(self) -> bool:
        """Whether the loss learns nothing from a sequence without an advantage."""
        return self._learner.needs_advantages

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return self._learner.vocab_size

    def ask_before_computing(self, ask: Callable[[], None]) -> None:
        """From now on, call `ask` before anything is computed; it may block."""
        self._ask = ask

    def move_to(self, device: str) -> None:
        """Move the policy and the optimisers' state there, and leave nothing behind."""
        self._call("move_to", device.encode())

    def rows_to_train(
        self, sequences: Rows[TrainedSequence], *, current: PolicyVersion
    ) -> list[TokenRow]:
        """Sequences as rows, on this rank alone; a DialoopError where one cannot be trained."""
        return self._learner.rows_to_train(sequences, current=current)

    def warm_start_step(self, demonstrations: Rows[Sequence]) -> UpdateReport:
        """One SFT update on demonstrations."""
        report: UpdateReport = self._compute("warm_start_step", _encoded(demonstrations))
        return report

    def sft_step(self, demonstrations: Rows[Sequence]) -> UpdateReport:
        """One update of SFT as a mode, with the optimiser and schedule of training."""
        report: UpdateReport = self._compute("sft_step", _encoded(demonstrations))
        return report

    def heldout_loss(self, demonstrations: Rows[Sequence]) -> tuple[float, int]:
        """Mean negative log-likelihood of a demonstrated token in nats, and how many there are."""
        loss: tuple[float, int] = self._compute("heldout_loss", _encoded(demonstrations))
        return loss

    def train_step(
        self, sequences: Rows[TrainedSequence], *, current: PolicyVersion
    ) -> TrainStepReport:
        """`num_epochs` times `num_minibatches` updates, as `Learner.train_step`."""
        data = _encoded(
            [one.sequence for one in sequences],
            prompts=[one.prompt for one in sequences],
            current=[current.lineage, current.number],
            temperatures=[one.temperature for one in sequences],
        )
        report: TrainStepReport = self._compute("train_step", data)
        return report

    def logprobs(self, rows: Rows[Rows[int]], *, temperature: float = 1.0) -> list[NDArray[Any]]:
        """Log-probs float32 [L - 1] of each row's tokens from position 1 on."""
        data = json.dumps([[list(ids) for ids in rows], temperature]).encode()
        scores: list[NDArray[Any]] = self._compute("logprobs", data)
        return scores

    def export(self, path: Path) -> ExportedWeights:
        """Write the weights as they are now; the file appears whole or not at all."""
        weights: ExportedWeights = self._call("export", str(path).encode())
        return weights

    def save(self, directory: Path) -> None:
        """Write all that a checkpoint keeps of this learner into a directory."""
        self._call("save", str(directory).encode())

    def restore(self, directory: Path) -> None:
        """Continue from what `save` wrote, as if never stopped; InvalidConfig for another model."""
        self._call("restore", str(directory).encode())

    def _compute(self, name: str, data: bytes) -> Any:
        if self._ask is not None:  # outside the lock: the answer may be a `move_to`
            self._ask()
        return self._call(name, data)

    def _call(self, name: str, data: bytes) -> Any:
        with self._calling:
            return self._commands.call(name, data)

    @property
    def _learner(self) -> Learner:
        assert self._own is not None, "make comes first"
        return self._own

    def _make(self, data: bytes) -> Callable[[], None]:
        settings = TrainerSettings(**json.loads(data))

        def make() -> None:
            self._own = Learner(settings, self._ranks)

        return make

    def _imitating(self, act: Callable[[Learner, list[TokenRow]], Any]) -> Command:
        def read(data: bytes) -> Callable[[], Any]:
            rows = self._learner.rows_to_imitate(_decoded(data)[1])
            return lambda: act(self._learner, rows)

        return read

    def _train_step(self, data: bytes) -> Callable[[], TrainStepReport]:
        facts, sequences = _decoded(data)
        parts = zip(sequences, facts["prompts"], facts["temperatures"], strict=True)
        lineage, number = facts["current"]
        rows = self._learner.rows_to_train(
            [TrainedSequence(sequence=s, prompt=p, temperature=t) for s, p, t in parts],
            current=PolicyVersion(lineage=lineage, number=number),
        )
        return lambda: self._learner.train_rows(rows)

    def _logprobs(self, data: bytes) -> Callable[[], list[NDArray[Any]]]:
        rows, temperature = json.loads(data)
        return lambda: self._learner.logprobs(rows, temperature=temperature)

    def _at_path(self, act: Callable[[Learner, Path], Any]) -> Command:
        def read(data: bytes) -> Callable[[], Any]:
            return lambda: act(self._learner, Path(data.decode()))

        return read

    def _restore(self, data: bytes) -> Callable[[], None]:
        directory = Path(data.decode())
        self._learner.files.require_readable(directory)
        return lambda: self._learner.restore(directory)


def _encoded(sequences: Rows[Sequence], **facts: Any) -> bytes:
    """One line of JSON, then the sequences' protobuf messages one after the other."""
    messages = [sequence_to_proto(sequence).SerializeToString() for sequence in sequences]
    head = json.dumps({**facts, "sizes": [len(message) for message in messages]})
    return head.encode() + b"\n" + b"".join(messages)


def _decoded(data: bytes) -> tuple[dict[str, Any], list[Sequence]]:
    """What `_encoded` was given."""
    head, _, messages = data.partition(b"\n")
    facts: dict[str, Any] = json.loads(head)
    parts = pairwise(accumulate(facts["sizes"], initial=0))
    decoded = (trajectory_pb2.Sequence.FromString(messages[start:end]) for start, end in parts)
    return facts, [sequence_from_proto(message) for message in decoded]
