"""Turns of episodes in play, as the queue keeps them.

Each one goes over the wire alone and holds what it adds to the turn before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dialoop.chat import ChatHistory
from dialoop.clients.environment_records import STEP_RESULT, step_result_from_proto
from dialoop.clients.inference_messages import generated_to_proto, samples_from_proto
from dialoop.episode import RecordedTurn, StepResult
from dialoop.errors import InvalidInput
from dialoop.v1 import environment_service_pb2, replay_service_pb2
from dialoop.wire.messages import MESSAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnItem:
    """A turn of a leased member, and the one before it, which the queue has."""

    lease_id: str
    member: int
    turn: RecordedTurn
    before: RecordedTurn | None = None


def turn_item_to_proto(item: TurnItem) -> replay_service_pb2.TurnItem:
    """Return the message."""
    turn, before = item.turn, item.before
    sent = turn.sample.history
    prompt = sent.prompt if before is None else None
    sample = replace(turn.sample, history=ChatHistory(prompt=prompt, response=sent.response))
    answer = None
    if before is not None and turn.answer is not None:
        answer = _answer_to_proto(turn.answer, before)
    return replay_service_pb2.TurnItem(
        lease_id=item.lease_id,
        member=item.member,
        turn=replay_service_pb2.RecordedTurn(
            trajectory_id=turn.trajectory_id,
            session_id=turn.session_id,
            turn=turn.turn,
            sampled=generated_to_proto([sample]),
            answer=answer,
            snapshot=turn.answer.snapshot if turn.answer else b"",
        ),
    )


def turns_from_proto(
    protos: Iterable[replay_service_pb2.RecordedTurn], snapshot: bytes = b""
) -> tuple[RecordedTurn, ...]:
    """Return an episode's turns, the first one first; InvalidInput where one is missing.

    The `snapshot` is that of the last one.
    """
    turns: list[RecordedTurn] = []
    for proto in protos:
        before = turns[-1].sample.history if turns else None
        (sample,) = samples_from_proto(proto.sampled)
        prompt, answer = sample.history.prompt, None
        if before is not None:
            answer = step_result_from_proto(proto.answer, before)
            prompt = answer.history.prompt
        if proto.turn != len(turns) or prompt is None or sample.history.response is None:
            raise InvalidInput(
                f"Turn {proto.turn} of trajectory {proto.trajectory_id} has no turn or prompt "
                "before it.",
                remedy="Play the episode from the start.",
            )
        history = ChatHistory(prompt=prompt).respond(*sample.history.response)
        turns.append(
            RecordedTurn(
                trajectory_id=proto.trajectory_id,
                session_id=proto.session_id,
                turn=proto.turn,
                sample=replace(sample, history=history),
                answer=answer,
            )
        )
    if turns and turns[-1].answer is not None:
        turns[-1] = replace(turns[-1], answer=replace(turns[-1].answer, snapshot=snapshot))
    return tuple(turns)


def _answer_to_proto(
    answer: StepResult, before: RecordedTurn
) -> environment_service_pb2.StepResponse:
    """Return an answer with the messages that it added, or the whole prompt where it changed."""
    answer = replace(answer, snapshot=b"")  # it goes beside, since only the last one is kept
    full, after = before.sample.history.require_full(), answer.history.require_prompt()
    if not after.starts_with(full):
        return STEP_RESULT.to_proto(answer)
    proto = STEP_RESULT.to_proto(replace(answer, history=ChatHistory()))
    proto.added.CopyFrom(
        environment_service_pb2.Added(messages=map(MESSAGE.to_proto, after[len(full) :]))
    )
    return proto
