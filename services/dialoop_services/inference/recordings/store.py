"""Recordings: every OpenAI-compatible call under a URL, with the tokens it was sampled as.

    store = RecordingStore(Limits())
    recording = store.create(RecordingSpec(recording_id="r-1"))
    call = recording.begin(prompt, sampling)        # dialoop_services.inference.openai.calls does
    this recording.answered(call, choices)

A call is running, answered or cut short; once it is over it does not change. What a recording says
lives in `recordings_trajectory`, which call continues which in `recordings_matching`.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dialoop.errors import (
    AlreadyExists,
    CapacityExhausted,
    InvalidInput,
    NotFound,
    PreconditionFailed,
)
from dialoop.reasons import Reason
from dialoop.trajectory import SamplingParams

from dialoop_services.inference.recordings.matching import Answered, Origin, Pasts

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.chat import History, Message
    from dialoop.episode import Sample
    from dialoop.sequences import Sequence
    from dialoop.tokens.builder import Prompt
    from dialoop.trajectory import Failure, Task, Trajectory

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingLimits:
    """How much is kept: recordings, calls of one, and seconds without a call until one is gone."""

    max_recordings: int = 1024
    max_calls: int = 512
    time_to_live_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSpec:
    """What a recording is made for."""

    recording_id: str
    group_id: str = ""
    task: Task | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    time_to_live_s: float = 0.0

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.recording_id):
            raise InvalidInput(
                "The recording_id is no part of a URL.",
                reason=Reason.BAD_RECORDING_ID,
                remedy="Use 1 to 128 letters, digits, '.', '_', '~' and '-'.",
            )
        if not 0 <= self.time_to_live_s < float("inf"):
            raise InvalidInput("time_to_live_s is no time.", remedy="Give seconds, or 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPrompt:
    """What a call asks, as the client sees it and as tokens.

    asked: the client's messages. prompt: the messages as the policy's own tokens spell them, and
    all tokens to feed the engine. past: the answer that the messages go on from. origin: the same,
    where the tokens go on from it too. variant: digest of what else shapes the prompt (tools,
    template options).
    """

    asked: History
    prompt: Prompt
    past: Origin | None = None
    origin: Origin | None = None
    variant: str = ""

    @property
    def num_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.prompt.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer: the tokens after those that its call continues, and the message given out."""

    sample: Sample
    given: Message


class CallState(Enum):
    """How a call stands; all but RUNNING are final."""

    RUNNING = auto()
    ANSWERED = auto()
    CUT_SHORT = auto()
    CONTEXT_FULL = auto()
    """The prompt left no room; nothing was sampled."""
    REFUSED = auto()
    """The request was wrong; nothing was sampled."""


@dataclass(slots=True, kw_only=True, eq=False)
class CallRecord:
    """One call; owned by its recording."""

    call_id: str
    prompt: CallPrompt
    sampling: SamplingParams
    choices: tuple[Choice, ...] = ()
    failure: Failure | None = None
    generate_s: float = 0.0
    state: CallState = CallState.RUNNING


class Recording:
    """The calls of one recording, in the order in which they came."""

    def __init__(self, spec: RecordingSpec, *, max_calls: int, time_to_live_s: float) -> None:
        self.spec = spec
        self.time_to_live_s = time_to_live_s
        self.calls: list[CallRecord] = []
        self.trajectory: Trajectory | None = None
        self.sequence_indices: dict[str, tuple[int, ...]] = {}
        self._max_calls = max_calls
        self._pasts = Pasts()

    @property
    def is_closed(self) -> bool:
        """Whether its trajectory was made."""
        return self.trajectory is not None

    @property
    def is_running(self) -> bool:
        """Whether a call is under way."""
        return any(call.state is CallState.RUNNING for call in self.calls)

    def require_open(self, num_calls: int = 1) -> None:
        """PreconditionFailed (RECORDING_CLOSED, RECORDING_FULL) when it cannot take the calls."""
        if self.is_closed:
            raise PreconditionFailed(
                "The recording is closed.",
                reason=Reason.RECORDING_CLOSED,
                remedy="Create another recording.",
            )
        if len(self.calls) + num_calls > self._max_calls:
            raise PreconditionFailed(
                f"The recording has {len(self.calls)} calls and takes no more.",
                reason=Reason.RECORDING_FULL,
                remedy="Close it, or raise DIALOOP_INFERENCE_MAX_RECORDED_CALLS.",
            )

    def find_past(self, asked: History, variant: str) -> Answered | None:
        """The answer that `asked` continues, the latest where several are alike."""
        return self._pasts.find(asked, variant)

    def begin(self, call_id: str, prompt: CallPrompt, sampling: SamplingParams) -> CallRecord:
        """Take a call; it has to be ended by one of the next methods."""
        self.require_open()
        call = CallRecord(call_id=call_id, prompt=prompt, sampling=sampling)
        self.calls.append(call)
        return call

    def answered(self, call: CallRecord, choices: tuple[Choice, ...], *, generate_s: float) -> None:
        """The call was answered; what it asked may be continued from now on."""
        if call.state is not CallState.RUNNING:  # the trajectory says already that it is missing
            return
        call.state = CallState.ANSWERED
        call.choices, call.generate_s = choices, generate_s
        index = self.calls.index(call)
        for number, choice in enumerate(choices):
            self._pasts.add(
                Answered(
                    origin=Origin(call=index, choice=number),
                    asked=call.prompt.asked,
                    given=choice.given,
                ),
                call.prompt.variant,
            )

    def cut_short(self, call: CallRecord, failure: Failure) -> None:
        """The call ended without an answer."""
        if call.state is CallState.RUNNING:
            call.state, call.failure = CallState.CUT_SHORT, failure

    def not_sampled(self, call: CallRecord, state: CallState) -> None:
        """The call ended before anything was sampled: CONTEXT_FULL or REFUSED."""
        if call.state is CallState.RUNNING:
            call.state = state

    def full(self, origin: Origin) -> Sequence:
        """All tokens up to and with an answer."""
        call = self.calls[origin.call]
        own = call.choices[origin.choice].sample.sequence
        if call.prompt.origin is None:
            return own
        return self.full(call.prompt.origin).extended_by(own)

    def spelled(self, origin: Origin) -> History:
        """The messages up to and with an answer, as the policy's own tokens spell them."""
        choice = self.calls[origin.call].choices[origin.choice]
        return choice.sample.history.require_full()


@dataclass(slots=True)
class _Kept:
    """A recording, and when it was last used."""

    recording: Recording
    used_at: float


class RecordingStore:
    """Owns the recordings of one replica; memory is bounded by its limits."""

    def __init__(
        self, limits: RecordingLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    def create(self, spec: RecordingSpec) -> Recording:
        """A recording of that id, the same one for the same spec."""
        self._drop_expired()
        known = self._kept.get(spec.recording_id)
        if known is not None:
            if known.recording.spec != spec:
                raise AlreadyExists(
                    "There is another recording of that id.",
                    reason=Reason.RECORDING_EXISTS,
                    remedy="Choose another recording_id.",
                )
            known.used_at = self._clock()
            return known.recording
        self._make_room()
        recording = Recording(
            spec,
            max_calls=self._limits.max_calls,
            time_to_live_s=spec.time_to_live_s or self._limits.time_to_live_s,
        )
        self._kept[spec.recording_id] = _Kept(recording, self._clock())
        return recording

    def find(self, recording_id: str) -> Recording:
        """The recording of an id; NotFound (RECORDING_NOT_FOUND) when it is not here (any more)."""
        self._drop_expired()
        known = self._kept.get(recording_id)
        if known is None:
            raise NotFound(
                "This replica has no such recording (any more).",
                reason=Reason.RECORDING_NOT_FOUND,
                remedy="A recording is kept by the replica that made it, until its time to live "
                "has run out: send all its calls there, or create it anew.",
            )
        known.used_at = self._clock()
        return known.recording

    @property
    def num_recordings(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def _drop_expired(self) -> None:
        now = self._clock()
        for recording_id, kept in list(self._kept.items()):
            is_old = now - kept.used_at > kept.recording.time_to_live_s
            if is_old and not kept.recording.is_running:
                del self._kept[recording_id]

    def _make_room(self) -> None:
        """Forget the oldest closed recording where there are too many."""
        if len(self._kept) < self._limits.max_recordings:
            return
        closed = [i for i, kept in self._kept.items() if kept.recording.is_closed]
        if not closed:
            raise CapacityExhausted(
                f"There are {len(self._kept)} open recordings.",
                reason=Reason.TOO_MANY_RECORDINGS,
                remedy="Close some, or raise DIALOOP_INFERENCE_MAX_RECORDINGS.",
            )
        del self._kept[min(closed, key=lambda i: self._kept[i].used_at)]
