"""The episodes of a finished trajectory, on which rewards are computed again."""

from __future__ import annotations

from dataclasses import replace

from dialoop.chat import Message
from dialoop.environments.episode import Episode, TaskData
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.trajectory import Trajectory, Turn


def episodes_of(trajectory: Trajectory, task: TaskData, *, policy_role: str) -> list[Episode]:
    """Return the episode after each turn's step; InvalidInput (INVALID_TURN)."""
    episodes = [
        Episode(
            task=task,
            seed=trajectory.seed,
            history=trajectory.history[: turn.message_start + turn.num_messages],
            step_index=index + 1,
            answer=_answer_of(trajectory, turn, policy_role),
        )
        for index, turn in enumerate(trajectory.turns)
    ]
    if episodes:
        episodes[-1] = replace(
            episodes[-1],
            terminated=trajectory.terminated,
            truncated=trajectory.truncated,
            done_reason=trajectory.done_reason,
        )
    return episodes


def _answer_of(trajectory: Trajectory, turn: Turn, policy_role: str) -> Message:
    end = turn.message_start + turn.num_messages
    messages = trajectory.history[turn.message_start : end]
    answers = [m for m in messages if m.role == policy_role]
    if not answers or end > len(trajectory.history):
        raise InvalidInput(
            f"A turn of trajectory {trajectory.trajectory_id} spans messages "
            f"{turn.message_start} to {end}, but the history has no answer of the policy there.",
            reason=Reason.INVALID_TURN,
            remedy="Let each turn cover one response and the messages that follow it.",
        )
    return answers[-1]
