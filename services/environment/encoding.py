"""Requests to calls, and outcomes to responses."""

from __future__ import annotations

from hashlib import blake2b

from dialoop.environments import Environment, Opening, Score, TaskPage
from dialoop.errors import DialoopError
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire import (
    chat_history_from_proto,
    chat_history_to_proto,
    failure_to_proto,
    reward_to_proto,
)

from services.environment.records import Answered, ResetCall, Session, SessionState, StepCall


def reset_call(request: pb.ResetRequest) -> ResetCall:
    """A reset."""
    return ResetCall(
        session_id=request.session_id,
        episode=request.episode,
        split=request.split,
        task_key=request.task_key,
        seed=request.seed,
    )


def following_reset(request: pb.StepAndResetRequest) -> ResetCall:
    """The reset that comes after the step."""
    return ResetCall(
        session_id=request.step.session_id,
        episode=request.step.episode + 1,
        split=request.next_split,
        task_key=request.next_task_key,
        seed=request.next_seed,
    )


def step_call(request: pb.StepRequest) -> StepCall:
    """A step; raises InvalidHistory when its history contradicts itself."""
    content = request.history.SerializeToString(deterministic=True)
    return StepCall(
        session_id=request.session_id,
        episode=request.episode,
        step_index=request.step_index,
        answered=chat_history_from_proto(request.history),
        digest=blake2b(content, digest_size=16).digest(),
    )


def reset_response(opening: Opening, version: str) -> pb.ResetResponse:
    """A reset's answer."""
    return pb.ResetResponse(
        history=chat_history_to_proto(opening.history),
        info=dict(opening.info),
        environment_version=version,
    )


def step_response(answered: Answered) -> pb.StepResponse:
    """A step's answer."""
    outcome = answered.outcome
    return pb.StepResponse(
        history=chat_history_to_proto(outcome.history),
        rewards=[reward_to_proto(reward) for reward in outcome.rewards],
        terminated=outcome.episode.terminated,
        truncated=outcome.episode.truncated,
        done_reason=int(outcome.episode.done_reason),  # type: ignore[arg-type]
        failures=[failure_to_proto(failure) for failure in outcome.failures],
        num_tool_calls=outcome.num_tool_calls,
        replayed=answered.replayed,
    )


def session_response(session: Session, expires_in_s: float) -> pb.GetSessionResponse:
    """Where a session stands."""
    response = pb.GetSessionResponse(
        session_id=session.session_id,
        environment=session.environment.name,
        episode=session.episode_number,
        done=session.state is SessionState.DONE,
        expires_in_s=expires_in_s,
    )
    if session.current is not None:
        episode = session.current.episode
        response.next_step_index = episode.step_index
        response.history.CopyFrom(
            chat_history_to_proto(Opening(episode=episode).history),
        )
    return response


def environment_info(environment: Environment) -> pb.EnvironmentInfo:
    """What an environment is."""
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
    )


def tasks_response(page: TaskPage) -> pb.ListTasksResponse:
    """A page of tasks."""
    refs = [pb.TaskRef(key=ref.key, epoch=ref.epoch, seed=ref.seed) for ref in page.tasks]
    return pb.ListTasksResponse(tasks=refs, next_page_token=page.next_page_token)


def score_response(scores: tuple[Score, ...]) -> pb.ScoreResponse:
    """One list of rewards per turn, and the reward functions that could give none."""
    turns = [
        pb.TurnRewards(
            rewards=[reward_to_proto(reward) for reward in score.rewards],
            failures=[failure_to_proto(failure) for failure in score.failures],
        )
        for score in scores
    ]
    return pb.ScoreResponse(turns=turns)


def item_error(error: DialoopError) -> pb.ItemError:
    """The error of one item."""
    return pb.ItemError(code=int(error.status), reason=error.reason, message=str(error))
