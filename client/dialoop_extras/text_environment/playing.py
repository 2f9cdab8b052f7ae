"""Play a task as a text episode and record it as a trajectory, as collectors do.

trajectory = await play_text(
    task, setup=calculator(), data=calculator().tasks.get("train", "35+40"), policy=inference,
    tokenizer=tokenizer,
)

One token sequence holds the whole text. The model's tokens are trained, those of the prompt and of
tools are not. The reward is the episode's, so it belongs to the last turn.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING

from dialoop.chat import History, Message
from dialoop.failures import error_of
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Owner,
    Reward,
    SamplingParams,
    Trajectory,
    Turn,
)

from dialoop_extras.token_episodes import RecordedPolicy, end_within

if TYPE_CHECKING:
    from dialoop.environments.episode import TaskData
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import Task

    from dialoop_extras.text_environment.environment import TextPolicy
    from dialoop_extras.text_environment.history import TextHistory
    from dialoop_extras.text_environment.setups import TextSetup

_ROLES = {Source.PROMPT: "user", Source.MODEL: "assistant", Source.TOOL: "tool"}


async def play_text(  # noqa: PLR0913 - its parts
    task: Task,
    *,
    setup: TextSetup,
    data: TaskData,
    policy: TextPolicy,
    tokenizer: Tokenizer,
    group_id: str = "",
    sampling: SamplingParams | None = None,
    time_limit_s: float = 600.0,
) -> Trajectory:
    """Play one episode of a task's query and return its trajectory, whatever happens.

    `data` is the task with its question and answer. Only cancellation escapes.
    """
    sampling = sampling or task.sampling
    failed_trajectory = partial(Trajectory.of_failures, task, group_id=group_id, sampling=sampling)
    recorded = RecordedPolicy(policy, tokenizer)
    environment = setup.on(recorded, tokenizer, sampling=sampling)
    try:
        playing = environment.run([setup.query_of(data)], **setup.extra_of(data))
        run = await end_within(time_limit_s, playing, what="The text episode")
    except Exception as error:
        return failed_trajectory(error_of(error, Owner.ENVIRONMENT))
    (history,) = run.histories
    terminated = history.completed and not history.truncated
    return Trajectory(
        trajectory_id=uuid.uuid4().hex,
        group_id=group_id,
        task_key=task.key,
        seed=task.seed,
        environment=task.environment,
        environment_version=setup.version,
        history=History(
            tuple(Message(role=_ROLES[s.source], content=s.text) for s in history.segments)
        ),
        turns=_turns(history, setup, recorded),
        sequences=(history.sequence(),),
        failures=_failures(history),
        terminated=terminated,
        truncated=not terminated,
        done_reason=_done_reason(history, setup),
        **recorded.facts(sampling),
    )


def _turns(history: TextHistory, setup: TextSetup, recorded: RecordedPolicy) -> tuple[Turn, ...]:
    """Return a turn for each text of the model: it, and the tools' answer to it."""
    starts = [i for i, s in enumerate(history.segments) if s.source is Source.MODEL]
    samples = [sample for _, sample in recorded.samples]
    turns = []
    for number, start in enumerate(starts):
        is_last = number == len(starts) - 1
        end = len(history.segments) if is_last else starts[number + 1]
        rewards = (
            (Reward(name=setup.reward_name, value=history.reward),)
            if (is_last and history.reward is not None)
            else ()
        )
        text = history.segments[start].text
        turns.append(
            Turn(
                message_start=start,
                num_messages=end - start,
                rewards=rewards,
                stop_reason=samples[number].stop_reason,
                generate_s=samples[number].generate_s,
                num_tool_calls=len(setup.syntax.spans(text)) if end - start > 1 else 0,
            )
        )
    return tuple(turns)


def _failures(history: TextHistory) -> tuple[Failure, ...]:
    """Return the episode's failures, or that its prompt leaves no room for an answer."""
    has_model_text = any(segment.source is Source.MODEL for segment in history.segments)
    if history.failures or has_model_text:
        return history.failures
    text = "The prompt and the query fill the model's context. Raise max_model_len."
    return (Failure(owner=Owner.ENVIRONMENT, reason=Reason.CONTEXT_FULL, message=text),)


def _done_reason(history: TextHistory, setup: TextSetup) -> DoneReason:
    limits, text = setup.limits, history.last_model_text
    if history.failures:
        return DoneReason.ERROR
    if not history.truncated:
        return DoneReason.SUBMITTED if setup.syntax.submit in text else DoneReason.NO_CALL
    if limits.max_length is not None and len(history.tokens) > limits.max_length:
        return DoneReason.MAX_LENGTH
    num_turns = sum(segment.source is Source.MODEL for segment in history.segments)
    is_answered = history.segments[-1].source is Source.TOOL
    if is_answered and num_turns >= limits.max_turns:
        return DoneReason.MAX_TURNS
    return DoneReason.MAX_LENGTH if is_answered else DoneReason.INCOMPLETE
