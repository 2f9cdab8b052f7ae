"""Translate requests to calls of the session engine, and outcomes to responses."""

from __future__ import annotations

from typing import Any

from dialoop.chat import ChatHistory, History
from dialoop.environments import (
    Answered,
    Environment,
    Given,
    Opening,
    Outcome,
    Score,
    TaskChoice,
    TaskPage,
)
from dialoop.environments.sessions.prompts import Prompt, added_to, full_of, prompt_of_episode
from dialoop.environments.sessions.records import AnsweredStep, ResetCall, Session, StepCall
from dialoop.environments.spec import FieldSpec, spec_of
from dialoop.episode import SessionState
from dialoop.errors import DialoopError, InvalidHistory
from dialoop.reasons import Reason
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire import (
    chat_history_from_proto,
    chat_history_to_proto,
    failure_to_proto,
    history_from_proto,
    message_to_proto,
    reward_to_proto,
    text_from_proto,
    text_to_proto,
    tokens_from_proto,
    tokens_to_proto,
    tool_to_proto,
)

from dialoop_services.runtime.calls import require_known_fields

_VIEWS = ("history", "text", "tokens")


def reset_call(request: pb.ResetRequest) -> ResetCall:
    """Return the call for a reset."""
    return ResetCall(
        session_id=request.session_id, episode=request.episode, choice=task_choice(request)
    )


def task_choice(request: pb.ResetRequest | pb.TaskChoice) -> TaskChoice:
    """Return the task that a request chooses."""
    messages = history_from_proto(request.messages) if request.HasField("messages") else None
    return TaskChoice(
        split=request.split,
        task_key=request.task_key,
        seed=request.seed,
        question=Given(query=request.query, messages=messages, data=dict(request.data)),
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
    has = request.HasField
    if has("history") and not has("text") and not has("tokens"):
        return chat_history_from_proto(request.history)
    views = [view for view in _VIEWS if has(view)]
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


def _prompt_fields(
    shown: Opening | Outcome | SessionState, added: Prompt | None = None
) -> dict[str, Any]:
    """Return the fields of the prompt: what was `added`, or without that the whole of it.

    Text and tokens that transforms show beside messages are whole.
    """
    is_messages = isinstance(shown, SessionState) or shown.episode.view is None
    if added is not None and not is_messages:
        return {"added": _added(added)}
    history, text, tokens = shown.history, shown.text, shown.tokens
    fields: dict[str, Any] = {
        "text": None if text is None else text_to_proto(text),
        "tokens": None if tokens is None else tokens_to_proto(tokens),
    }
    if added is not None:
        fields["added"] = _added(added)
    elif is_messages and history.prompt is not None:
        fields["history"] = chat_history_to_proto(history)
    return fields


def _added(added: Prompt) -> pb.Added:
    if isinstance(added, History):
        return pb.Added(messages=map(message_to_proto, added))
    if isinstance(added, str):
        return pb.Added(text=added)
    return pb.Added(token_ids={"values": added})


def reset_response(opening: Opening, session: Session) -> pb.ResetResponse:
    """Return the answer to a reset."""
    return pb.ResetResponse(
        **_prompt_fields(opening),
        info=opening.info,
        environment_version=session.environment.version,
    )


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
    episode = outcome.episode
    return pb.StepResponse(
        **_prompt_fields(outcome, added),
        rewards=map(reward_to_proto, outcome.rewards),
        terminated=episode.terminated,
        truncated=episode.truncated,
        done_reason=int(episode.done_reason),  # type: ignore[arg-type]  # enums are ints
        failures=map(failure_to_proto, outcome.failures),
        num_tool_calls=outcome.num_tool_calls,
        replayed=replayed,
        info=outcome.info,
    )


def group_response(members: list[tuple[Session, Opening]]) -> pb.CreateGroupResponse:
    """Return a group's sessions and the answers to their resets."""
    return pb.CreateGroupResponse(
        session_ids=[session.session_id for session, _ in members],
        resets=[reset_response(opening, session) for session, opening in members],
        ttl_s=members[0][0].ttl_s,
    )


def session_response(state: SessionState) -> pb.GetSessionResponse:
    """Return the state of a session."""
    return pb.GetSessionResponse(
        session_id=state.session_id,
        environment=state.environment,
        episode=state.episode,
        next_step_index=state.next_step_index,
        done=state.done,
        **_prompt_fields(state),
        expires_in_s=state.expires_in_s,
    )


def environment_info(environment: Environment) -> pb.EnvironmentInfo:
    """Return the description of an environment."""
    tasks, traits = environment.tasks, environment.traits
    return pb.EnvironmentInfo(
        name=environment.name,
        version=environment.version,
        description=environment.description,
        splits=[pb.SplitInfo(name=s, num_tasks=tasks.num_tasks(s)) for s in tasks.splits],
        max_turns=traits.max_turns,
        stop=traits.stop,
        tools=traits.tools,
        reward_names=traits.reward_names,
        spec=_spec(environment),
    )


def _spec(environment: Environment) -> pb.EnvironmentSpec:
    spec = spec_of(environment)
    return pb.EnvironmentSpec(
        input_mode=int(spec.input_mode),  # type: ignore[arg-type]
        reward_shape=int(spec.reward_shape),  # type: ignore[arg-type]
        observation=[_field(field) for field in spec.observation],
        action=[_field(field) for field in spec.action],
        reward=[_field(field) for field in spec.reward],
        policy_role=spec.policy_role,
        data_key=spec.data_key,
        tool_definitions=[tool_to_proto(tool) for tool in spec.tool_definitions],
        is_stateless=spec.is_stateless,
        facts=dict(spec.facts),
    )


def _field(spec: FieldSpec) -> pb.FieldSpec:
    return pb.FieldSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape)


def tasks_response(page: TaskPage) -> pb.ListTasksResponse:
    """Return a page of tasks."""
    refs = [pb.TaskRef(key=ref.key, epoch=ref.epoch, seed=ref.seed) for ref in page.tasks]
    return pb.ListTasksResponse(tasks=refs, next_page_token=page.next_page_token)


def score_response(scores: tuple[Score, ...]) -> pb.ScoreResponse:
    """Return for each turn its rewards, and the failures of reward functions."""
    turns = [
        pb.TurnRewards(
            rewards=[reward_to_proto(reward) for reward in score.rewards],
            failures=[failure_to_proto(failure) for failure in score.failures],
        )
        for score in scores
    ]
    return pb.ScoreResponse(turns=turns)


def item_error(error: DialoopError) -> pb.ItemError:
    """Return the error of one item of a batch or stream."""
    return pb.ItemError(code=int(error.status), reason=error.reason, message=str(error))
