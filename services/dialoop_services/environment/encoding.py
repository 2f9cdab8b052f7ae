"""Translate requests to calls of the session engine, and outcomes to responses."""

from __future__ import annotations

from dataclasses import replace

from dialoop.chat import ChatHistory, History
from dialoop.clients.environment_records import CHOICE, RESET_RESULT, STEP_RESULT
from dialoop.environments import Answered, Opening, Outcome, TaskChoice
from dialoop.environments.sessions.prompts import Prompt, added_to, full_of, prompt_of_episode
from dialoop.environments.sessions.records import AnsweredStep, ResetCall, Session, StepCall
from dialoop.environments.sessions.results import reset_result, step_result
from dialoop.errors import DialoopError, InvalidHistory
from dialoop.reasons import Reason
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire import (
    chat_history_from_proto,
    message_to_proto,
    text_from_proto,
    tokens_from_proto,
)

from dialoop_services.runtime.calls import require_known_fields

_VIEWS = ("history", "text", "tokens")


def reset_call(request: pb.ResetRequest) -> ResetCall:
    """Return the call for a reset."""
    return ResetCall(
        session_id=request.session_id, episode=request.episode, choice=CHOICE.from_proto(request)
    )


def following_reset(request: pb.StepAndResetRequest) -> ResetCall:
    """Return the call for the reset that follows the step."""
    return ResetCall(
        session_id=request.step.session_id,
        episode=request.step.episode + 1,
        choice=TaskChoice(
            split=request.next_split, task_key=request.next_task_key, seed=request.next_seed
        ),
    )


def step_call(request: pb.StepRequest) -> StepCall:
    """Return the call for a step; raise InvalidHistory when the request has several views."""
    require_known_fields(request)
    return StepCall(
        session_id=request.session_id,
        episode=request.episode,
        step_index=request.step_index,
        answered=_response_of(request),
    )


def _response_of(request: pb.StepRequest) -> Answered:
    """Return the one view that was sent."""
    views = [view for view in _VIEWS if request.HasField(view)]
    if len(views) > 1:
        raise InvalidHistory(
            f"The step holds {' and '.join(views)}.",
            reason=Reason.WRONG_MODE,
            remedy="Send the one that the environment's input mode names.",
        )
    if views == ["text"]:
        return text_from_proto(request.text)
    if views == ["tokens"]:
        return tokens_from_proto(request.tokens)
    return chat_history_from_proto(request.history)


def _added(added: Prompt) -> pb.Added:
    if isinstance(added, History):
        return pb.Added(messages=map(message_to_proto, added))
    if isinstance(added, str):
        return pb.Added(text=added)
    return pb.Added(token_ids={"values": added})


def reset_response(opening: Opening, session: Session) -> pb.ResetResponse:
    """Return the answer to a reset."""
    return RESET_RESULT.to_proto(reset_result(opening, session.environment))


def step_response(played: AnsweredStep, *, whole_prompt: bool) -> pb.StepResponse:
    """Return the answer to a step of a session."""
    added = None if whole_prompt else played.added
    return _outcome_response(played.outcome, added, replayed=played.replayed)


def stateless_response(
    answered: ChatHistory, outcome: Outcome, *, whole_prompt: bool
) -> pb.StepResponse:
    """Return the answer to a step without a session."""
    full = full_of(History(), answered)
    added = None if whole_prompt else added_to(full, prompt_of_episode(outcome.episode))
    return _outcome_response(outcome, added)


def _outcome_response(
    outcome: Outcome, added: Prompt | None, *, replayed: bool = False
) -> pb.StepResponse:
    """Return the answer with what was `added` to the prompt, or without that the whole of it.

    Text and tokens that transforms show beside messages are whole.
    """
    result = step_result(outcome, replayed=replayed)
    if added is None:
        return STEP_RESULT.to_proto(result)
    if outcome.episode.view is not None:
        result = replace(result, text=None, tokens=None)
    response = STEP_RESULT.to_proto(replace(result, history=ChatHistory()))
    response.added.CopyFrom(_added(added))
    return response


def group_response(members: list[tuple[Session, Opening]]) -> pb.CreateGroupResponse:
    """Return a group's sessions and the answers to their resets."""
    return pb.CreateGroupResponse(
        session_ids=[session.session_id for session, _ in members],
        resets=[reset_response(opening, session) for session, opening in members],
        ttl_s=members[0][0].ttl_s,
    )


def item_error(error: DialoopError) -> pb.ItemError:
    """Return the error of one item of a batch or stream."""
    return pb.ItemError(code=int(error.status), reason=error.reason, message=str(error))
