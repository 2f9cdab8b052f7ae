"""Recordings: the OpenAI-compatible calls under a URL, with the tokens that were sampled.

store = RecordingStore(RecordingLimits())
recording = store.create(RecordingSpec(recording_id="r-1"))
call = recording.begin("call-1", prompt, sampling)
recording.record_answer(call, choices, generate_s=0.1)

A call is running, answered or cut short; once it is over it does not change. `trajectory` makes a
recording's trajectory, `matching` finds the earlier answer that a call continues.
"""

from __future__ import annotations

import hmac
import re
import secrets
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
from dialoop.trajectory import Failure, SamplingParams, Task, Trajectory

from dialoop_services.inference.recordings.matching import Origin, PastAnswer, Pasts

if TYPE_CHECKING:
    from collections.abc import Callable

    from dialoop.chat import History, Message
    from dialoop.episode import Sample
    from dialoop.sequences import Sequence
    from dialoop.tokens.builder import Prompt

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingLimits:
    """Most recordings, most calls of one, and seconds without a call until one is deleted."""

    max_recordings: int = 1024
    max_calls: int = 512
    time_to_live_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSpec:
    """What a recording is created with."""

    recording_id: str
    group_id: str = ""
    task: Task | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    time_to_live_s: float = 0.0

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.recording_id):
            raise InvalidInput(
                "The recording_id cannot be part of a URL.",
                reason=Reason.BAD_RECORDING_ID,
                remedy="Use 1 to 128 letters, digits, '.', '_', '~' and '-'.",
            )
        if not 0 <= self.time_to_live_s < float("inf"):
            raise InvalidInput(
                "time_to_live_s is negative or infinite.", remedy="Give seconds, or 0."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPrompt:
    """The prompt of a call, as the client sees it and as tokens.

    messages: those of the client. prompt: the messages as the policy's own tokens read, and all
    tokens for the engine. past: the answer that the messages continue. origin: the same, where the
    tokens continue it too. variant: digest of what else shapes the prompt (tools, template
    options).
    """

    messages: History
    prompt: Prompt
    past: Origin | None = None
    origin: Origin | None = None
    variant: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the length of the prompt in tokens."""
        return len(self.prompt.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer: the tokens after those that its call continues, and the client's message."""

    sample: Sample
    message: Message


class CallState(Enum):
    """The state of a call; all but RUNNING are final."""

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

    def end(self, state: CallState, failure: Failure | None = None) -> None:
        """Note that it ended without an answer: CUT_SHORT, or before sampling."""
        if self.state is CallState.RUNNING:
            self.state, self.failure = state, failure


class Recording:
    """The calls of one recording, in the order in which they came.

    key: what the agent sends, which opens this recording alone.
    """

    def __init__(self, spec: RecordingSpec, *, max_calls: int, time_to_live_s: float) -> None:
        self.spec = spec
        self.key = secrets.token_urlsafe(24)
        self.time_to_live_s = time_to_live_s
        self.calls: list[CallRecord] = []
        self.trajectory: Trajectory | None = None
        # Also one of which no call was answered, and which has no trajectory.
        self.is_closed = False
        self.sequence_indices: dict[str, tuple[int, ...]] = {}
        self._max_calls = max_calls
        self._pasts = Pasts()

    @property
    def is_running(self) -> bool:
        """Return whether a call is under way."""
        return any(call.state is CallState.RUNNING for call in self.calls)

    def require_open(self, num_calls: int = 1) -> None:
        """Raise PreconditionFailed (RECORDING_CLOSED, RECORDING_FULL) when the calls do not fit."""
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

    def find_past(self, messages: History, variant: str) -> PastAnswer | None:
        """Return the answer that `messages` continue, the latest where several are alike."""
        return self._pasts.find(messages, variant)

    def begin(self, call_id: str, prompt: CallPrompt, sampling: SamplingParams) -> CallRecord:
        """Add a call, which the caller ends."""
        self.require_open()
        call = CallRecord(call_id=call_id, prompt=prompt, sampling=sampling)
        self.calls.append(call)
        return call

    def record_answer(
        self, call: CallRecord, choices: tuple[Choice, ...], *, generate_s: float
    ) -> None:
        """Record the answers of a call; later calls may continue them."""
        if (
            call.state is not CallState.RUNNING
        ):  # the recording was closed meanwhile, and says that the call is missing
            return
        call.state = CallState.ANSWERED
        call.choices, call.generate_s = choices, generate_s
        index = self.calls.index(call)
        for number, choice in enumerate(choices):
            self._pasts.add(
                PastAnswer(
                    origin=Origin(call=index, choice=number),
                    messages=call.prompt.messages,
                    message=choice.message,
                ),
                call.prompt.variant,
            )

    def full(self, origin: Origin) -> Sequence:
        """Return all tokens up to and with an answer."""
        call = self.calls[origin.call]
        own = call.choices[origin.choice].sample.sequence
        if call.prompt.origin is None:
            return own
        return self.full(call.prompt.origin).extended_by(own)

    def history_of(self, origin: Origin) -> History:
        """Return the messages up to and with an answer, as the policy's own tokens read."""
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
        """Return a recording of that id, the same one for the same spec."""
        self._drop_expired()
        kept = self._kept.get(spec.recording_id)
        if kept is not None:
            if kept.recording.spec != spec:
                raise AlreadyExists(
                    "There is another recording of that id.",
                    reason=Reason.RECORDING_EXISTS,
                    remedy="Choose another recording_id.",
                )
            kept.used_at = self._clock()
            return kept.recording
        self._make_room()
        recording = Recording(
            spec,
            max_calls=self._limits.max_calls,
            time_to_live_s=spec.time_to_live_s or self._limits.time_to_live_s,
        )
        self._kept[spec.recording_id] = _Kept(recording, self._clock())
        return recording

    def find(self, recording_id: str) -> Recording:
        """Return the recording of an id; NotFound (RECORDING_NOT_FOUND) when it is not here."""
        self._drop_expired()
        kept = self._kept.get(recording_id)
        if kept is None:
            raise NotFound(
                "This replica has no recording of that id, or has it no more.",
                reason=Reason.RECORDING_NOT_FOUND,
                remedy="The replica that made a recording keeps it until its time to live has "
                "run out: send all its calls there, or create it again.",
            )
        kept.used_at = self._clock()
        return kept.recording

    def has_key(self, recording_id: str, key: bytes) -> bool:
        """Return whether there is a recording of that id, and this is its key."""
        kept = self._kept.get(recording_id)
        return kept is not None and hmac.compare_digest(kept.recording.key.encode(), key)

    @property
    def num_recordings(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def _drop_expired(self) -> None:
        now = self._clock()
        for recording_id, kept in list(self._kept.items()):
            is_old = now - kept.used_at > kept.recording.time_to_live_s
            if is_old and not kept.recording.is_running:
                del self._kept[recording_id]

    def _make_room(self) -> None:
        """Delete the oldest closed recording where there are too many."""
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
