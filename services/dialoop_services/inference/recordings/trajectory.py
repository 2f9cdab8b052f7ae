"""From a recording's calls to the trajectory that is trained.

A call that continues an earlier answer extends that answer's sequence. The second continuation of
the same answer (a retry, a parallel call, a branch) and each further choice fork: all before it is
context there, so every sampled token is owned by exactly one sequence. A conversation that
continues nothing (a sub-agent's other system prompt, a shortened history) is one of its own.

Turns are the answered calls in the order in which they came. The trajectory's history is the branch
with the most messages, the latest among equals; rewards stand on the last turn. A call that was cut
short is in no sequence. Its failure becomes the trajectory's, unless the client sent the same call
again and got an answer: nobody knows what the client did with half an answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from dialoop.chat import History
from dialoop.episode import UpdateMode
from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, Segment, Sequence, Source
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Owner,
    Purpose,
    Reward,
    Trajectory,
    Turn,
)

from dialoop_services.inference.recordings.matching import Origin, is_same
from dialoop_services.inference.recordings.store import CallRecord, CallState, Choice, Recording

_STILL_RUNNING = Failure(
    owner=Owner.COLLECTOR,
    reason=Reason.STILL_RUNNING,
    message="The recording was closed while the call was running.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What the caller that ran the agent adds at the end."""

    rewards: tuple[Reward, ...] = ()
    failures: tuple[Failure, ...] = ()
    labels: Mapping[str, str]
    tokenizer_digest: str = ""
    template_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A sequence, the answer it ends with, and its conversation as the client saw it."""

    sequence: Sequence
    tip: Origin
    history: History


class _Rows:
    """Grows sequences call by call."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.where: dict[Origin, int] = {}
        # All tokens up to an answer, with the turns of the trajectory; all messages, as given out.
        self._full: dict[Origin, Sequence] = {}
        self.histories: dict[Origin, History] = {}

    def add(self, call: CallRecord, index: int, turn: int, *, rewrites: bool) -> None:
        """Place the tokens of one answered call.

        rewrites: whether its prompt tells an earlier conversation otherwise than it was.
        """
        for number, choice in enumerate(call.choices):
            tip = Origin(call=index, choice=number)
            own = _of_turn(choice, turn)
            base = call.prompt.origin
            if base is None:
                sequence = own if number == 0 else replace(own, fork_cause=ForkCause.BRANCHED)
                if number == 0 and self.rows and own.fork_cause is ForkCause.NONE:
                    cause = ForkCause.HISTORY_REWRITTEN if rewrites else ForkCause.BRANCHED
                    sequence = replace(own, fork_cause=cause)
                row = None
            else:
                sequence = self._full[base].extended_by(own)
                row = self.where[base] if number == 0 else None
            self._place(call, choice, tip, sequence, own=own, row=row)

    def _place(
        self,
        call: CallRecord,
        choice: Choice,
        tip: Origin,
        sequence: Sequence,
        *,
        own: Sequence,
        row: int | None,
    ) -> None:
        """Place the tokens at the end of `row` if it ends where they begin, else in a new row."""
        base = call.prompt.origin
        self._full[tip] = sequence
        past = History() if call.prompt.past is None else self.histories[call.prompt.past]
        messages = past.extend(call.prompt.messages[len(past) :])
        self.histories[tip] = history = messages.append(choice.message)
        if base is not None and row is not None and self.rows[row].tip == base:
            grown = self.rows[row].sequence.extended_by(own)
            self.rows[row] = _Row(sequence=grown, tip=tip, history=history)
            self.where[tip] = row
            return
        if base is not None:
            context = replace(self._full[base].as_context(), fork_cause=ForkCause.BRANCHED)
            sequence = context.extended_by(own)
        self.rows.append(_Row(sequence=sequence, tip=tip, history=history))
        self.where[tip] = len(self.rows) - 1


def close(recording: Recording, closing: Closing) -> Trajectory:
    """End the recording; make its trajectory, or return the one that it has.

    Raises PreconditionFailed (RECORDING_EMPTY) when no call was answered; it is ended all the same.
    """
    recording.is_closed = True
    if recording.trajectory is None:
        recording.trajectory = _trajectory(recording, closing)
    return recording.trajectory


def _trajectory(recording: Recording, closing: Closing) -> Trajectory:
    answered = [(i, call) for i, call in enumerate(recording.calls) if call.choices]
    if not answered:
        raise PreconditionFailed(
            "No call of the recording was answered.",
            reason=Reason.RECORDING_EMPTY,
            remedy="Point the agent's client at the recording's URL.",
        )
    placed = _Rows()
    for turn, (index, call) in enumerate(answered):
        earlier = (
            placed.histories[Origin(call=other, choice=number)]
            for other, before in answered[:turn]
            for number in range(len(before.choices))
            if before.prompt.variant == call.prompt.variant
        )
        placed.add(call, index, turn, rewrites=_rewrites(call.prompt.messages, earlier))
        recording.sequence_indices[call.call_id] = tuple(
            placed.where[Origin(call=index, choice=number)] for number in range(len(call.choices))
        )
    main = max(enumerate(placed.rows), key=lambda row: (len(row[1].history), row[1].tip.call))[1]
    calls = [call for _, call in answered]
    failures = (*_failures(recording), *closing.failures)
    is_full = recording.calls[-1].state is CallState.CONTEXT_FULL
    task = recording.spec.task
    return Trajectory(
        trajectory_id=uuid.uuid4().hex,
        group_id=recording.spec.group_id,
        task_key=task.key if task else "",
        seed=task.seed if task else 0,
        environment=task.environment if task else "",
        environment_version="",
        history=main.history,
        turns=_turns(dict(answered), recording, main, closing.rewards),
        sequences=tuple(_with_indices(row, main.history) for row in placed.rows),
        failures=failures,
        sampling=next((c.sampling for c in calls if c.sampling.alters), calls[0].sampling),
        tokenizer_digest=closing.tokenizer_digest,
        template_digest=closing.template_digest,
        terminated=not failures and not is_full,
        truncated=bool(failures) or is_full,
        done_reason=_done_reason(failures, is_full=is_full),
        labels=_labels(recording, closing),
    )


def _rewrites(prompt: History, earlier: Iterable[History]) -> bool:
    """Return whether the prompt has an answer behind what it shares with an earlier conversation.

    One that has none there only asks something else: it is a sub-agent's, or a call beside others.
    """
    shared = max((_num_shared(prompt, history) for history in earlier), default=0)
    return any(message.role == "assistant" for message in prompt[shared:])


def _of_turn(choice: Choice, turn: int) -> Sequence:
    """Return the choice's own tokens; without characters if the client got another text."""
    sequence = choice.sample.sequence
    sampled = choice.sample.history.require_full()[-1]
    is_verbatim = sampled.text == choice.message.text

    def relabel(segment: Segment) -> Segment:
        if segment.source is Source.MODEL and not is_verbatim:
            segment = replace(segment, char_start=0, char_length=0)
        return replace(segment, turn=turn)

    return replace(sequence, segments=tuple(relabel(s) for s in sequence.segments))


def _with_indices(row: _Row, main: History) -> Sequence:
    """Return the row with message indices into the trajectory's history, up to a branch."""
    shared = _num_shared(row.history, main)

    def relabel(segment: Segment) -> Segment:
        if segment.message_index is None or segment.message_index < shared:
            return segment
        return replace(segment, message_index=None, char_start=0, char_length=0)

    sequence = row.sequence
    return replace(sequence, segments=tuple(relabel(s) for s in sequence.segments))


def _num_shared(first: History, second: History) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if not is_same(a, b)), min(len(first), len(second)))


def _turns(
    calls: dict[int, CallRecord], recording: Recording, main: _Row, rewards: tuple[Reward, ...]
) -> tuple[Turn, ...]:
    """Return one turn per answered call; a call of another branch has no messages of its own."""
    branch = _branch(recording, main.tip)
    starts = sorted(len(calls[index].prompt.messages) for index in branch)
    ends = dict(zip(starts, [*starts[1:], len(main.history)], strict=True))
    last = max(calls)
    turns: list[Turn] = []
    for index, call in calls.items():
        start = len(call.prompt.messages)
        is_on = index in branch
        turns.append(
            Turn(
                message_start=start if is_on else _num_shared(call.prompt.messages, main.history),
                num_messages=ends[start] - start if is_on else 0,
                rewards=rewards if index == last else (),
                stop_reason=call.choices[0].sample.stop_reason,
                generate_s=call.generate_s,
                num_tool_calls=sum(len(choice.message.tool_calls) for choice in call.choices),
            )
        )
    return tuple(turns)


def _branch(recording: Recording, tip: Origin) -> set[int]:
    """Return the calls whose answers lead to `tip`, and its own."""
    branch: set[int] = set()
    past: Origin | None = tip
    while past is not None:
        branch.add(past.call)
        past = recording.calls[past.call].prompt.past
    return branch


def _is_same_prompt(first: CallRecord, second: CallRecord) -> bool:
    return first.prompt.variant == second.prompt.variant and np.array_equal(
        first.prompt.prompt.sequence.token_ids, second.prompt.prompt.sequence.token_ids
    )


def _failures(recording: Recording) -> tuple[Failure, ...]:
    """Return failures of calls that were cut short, still run, or cannot be trained together."""
    failures: list[Failure] = []
    for index, call in enumerate(recording.calls):
        call.end(CallState.CUT_SHORT, _STILL_RUNNING)
        if call.failure is None:
            continue
        later = recording.calls[index + 1 :]
        if not any(other.choices and _is_same_prompt(call, other) for other in later):
            failures.append(call.failure)
    if (failure := _mixed_temperatures(recording)) is not None:
        failures.append(failure)
    return tuple(dict.fromkeys(failures))


def _mixed_temperatures(recording: Recording) -> Failure | None:
    """Return a failure if calls differ in temperature: a train step computes log-probs at one."""
    task = recording.spec.task
    if task is not None and task.purpose is Purpose.EVALUATION:
        return None
    expected = recording.spec.sampling.temperature
    temperatures = {call.sampling.temperature for call in recording.calls if call.choices}
    if len(temperatures | ({expected} if expected is not None else set())) <= 1:
        return None
    return Failure(
        owner=Owner.COLLECTOR,
        reason=Reason.TEMPERATURE_DIFFERS,
        message=f"Calls were sampled at {sorted(t for t in temperatures if t is not None)}, "
        f"asked was {expected}: leave the temperature out of the agent's calls.",
    )


def _done_reason(failures: tuple[Failure, ...], *, is_full: bool) -> DoneReason:
    if any(failure.owner is not Owner.POLICY for failure in failures):
        return DoneReason.ERROR
    return DoneReason.MAX_LENGTH if is_full else DoneReason.SUBMITTED


def _labels(recording: Recording, closing: Closing) -> dict[str, str]:
    choices = (choice for call in recording.calls for choice in call.choices)
    modes = {choice.sample.update_mode for choice in choices}
    labels = {"recording_id": recording.spec.recording_id}
    for mode in (UpdateMode.WAIT, UpdateMode.KEEP_KV):  # the latter is not exact, and wins
        if mode in modes:
            labels["update_mode"] = mode.name
    return labels | dict(closing.labels)
