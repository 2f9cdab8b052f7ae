"""Play a task as a trial and record it as a trajectory, as collectors do.

    trajectory = await play_trial(
        task, game=TwentyQuestions(), inputs={"solution": "key"}, policy=inference,
        tokenizer=tokenizer, options=TrialOptions(episodes_per_trial=2, free_shots=1),
    )

The last episode is trained, and its rewards count: each step's reward belongs to its turn, as one
number or spread over the turn's sampled tokens (`TrialOptions.reward_split`). The episodes before
it are what the agent learns from within the trial; the label `trial_rewards` has what each earned.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.failures import error_of, failure_of
from dialoop.reasons import Reason
from dialoop.sequences import Sequence, Source
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Owner,
    Reward,
    SamplingParams,
    StopReason,
    Trajectory,
    Turn,
)
from dialoop.user_functions import call, name_of

from dialoop_extras.token_episodes import RecordedPolicy, end_within
from dialoop_extras.trials.agents import DirectOutputAgent
from dialoop_extras.trials.trial import MaskScope, TrialOptions, run_trial, spread_rewards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.chat import History
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import Task

    from dialoop_extras.text_environment.environment import TextPolicy
    from dialoop_extras.trials.game import Game
    from dialoop_extras.trials.trial import Action, Agent, PlayedEpisode, Trial

MakeAgent = Callable[..., Any]
"""A function, sync or async, of a policy, a tokenizer and SamplingParams that returns an Agent.

The policy is a RecordedPolicy. What the agent samples from it is trained, however often it asks
and whatever else it does; an agent that is not async asks with `generate_now`.
"""


@dataclass(frozen=True, slots=True)
class _Player:
    """The trial's agent, which tells the recorder where in the trial it is."""

    agent: Agent
    policy: RecordedPolicy

    async def get_action(self, messages: History, state: Any) -> Action | tuple[str, Any]:
        if len(messages) == 1:
            self.policy.begin_episode()
        self.policy.turn = len(messages) // 2
        action: Action | tuple[str, Any] = await call(self.agent.get_action, messages, state)
        return action


async def play_trial(  # noqa: PLR0913 - its parts
    task: Task,
    *,
    game: Game[Any],
    inputs: Mapping[str, Any],
    policy: TextPolicy,
    tokenizer: Tokenizer,
    make_agent: MakeAgent = DirectOutputAgent,
    options: TrialOptions | None = None,
    group_id: str = "",
    sampling: SamplingParams | None = None,
    environment_version: str = "",
    time_limit_s: float = 600.0,
) -> Trajectory:
    """Play one trial of `inputs` and return its trajectory, whatever happens.

    Only cancellation escapes. The task's seed is that of the game, so the members of a group play
    the same hidden task.
    """
    sampling = sampling or task.sampling
    options = replace(options or TrialOptions(), seed=task.seed)
    failed_trajectory = partial(Trajectory.of_failures, task, group_id=group_id, sampling=sampling)
    recorded = RecordedPolicy(policy, tokenizer)
    try:
        agent = await call(make_agent, recorded, tokenizer, sampling)
    except Exception as error:
        what = f"The function {name_of(make_agent)}, which makes the agent,"
        reason = Reason.AGENT_FAILED
        return failed_trajectory(failure_of(error, owner=Owner.AGENT, reason=reason, what=what))
    playing = run_trial(
        game, [inputs], _Player(agent, recorded), tokenizer=tokenizer, options=options
    )
    try:
        result = await end_within(time_limit_s, playing, what="The trial")
    except Exception as error:
        return failed_trajectory(error_of(error, Owner.ENVIRONMENT))
    (trial,) = result.trials
    final, facts = trial.final, recorded.facts(sampling)
    sequences = _rows_to_train(recorded.rows, options.mask_scope)
    rewards = " ".join(f"{episode.earned:g}" for episode in trial.episodes)
    return Trajectory(
        trajectory_id=uuid.uuid4().hex,
        group_id=group_id,
        task_key=task.key,
        seed=task.seed,
        environment=task.environment,
        environment_version=environment_version,
        history=final.messages,
        turns=_turns(final, recorded, _rewards(final, sequences, options.reward_split)),
        sequences=sequences,
        failures=_failures(trial, recorded),
        terminated=final.terminated,
        truncated=not final.terminated,
        done_reason=_done_reason(final, game.max_steps),
        **facts | {"labels": {**facts.get("labels", {}), "trial_rewards": rewards}},
    )


def _rewards(final: PlayedEpisode, rows: tuple[Sequence, ...], split: str) -> list[Reward]:
    """Return the reward of each step; dense ones have a number for each token that is trained."""
    rewards = [step.reward for step in final.steps]
    if split == "turn":
        return [Reward(name="game", value=float(reward)) for reward in rewards]
    counts = [0] * len(rewards)
    for segment in (s for row in rows for s in row.segments if s.source is Source.MODEL):
        # The last answer may have no step, where it filled the model's context.
        if segment.turn < len(counts):
            counts[segment.turn] += segment.length
    return [Reward.dense("game", own) for own in spread_rewards(rewards, counts, how=split)]


def _turns(
    final: PlayedEpisode, recorded: RecordedPolicy, rewards: list[Reward]
) -> tuple[Turn, ...]:
    """Return a turn for each step: the action, and the game's next prompt."""
    turns = []
    for number, reward in enumerate(rewards):
        samples = recorded.samples_of(number)
        start = 2 * number + 1
        turns.append(
            Turn(
                message_start=start,
                num_messages=min(2, len(final.messages) - start),
                rewards=(reward,),
                stop_reason=samples[-1].stop_reason if samples else StopReason.STOP,
                generate_s=sum(sample.generate_s for sample in samples),
            )
        )
    return tuple(turns)


def _rows_to_train(rows: list[Sequence], scope: MaskScope) -> tuple[Sequence, ...]:
    """Return the rows; with FINAL only tokens of the last action stay sampled ones."""
    if scope is MaskScope.ALL or not rows:
        return tuple(rows)
    last = max(s.turn for row in rows for s in row.segments if s.source is Source.MODEL)
    final_rows = (_only_turn(row, last) for row in rows)
    return tuple(row for row in final_rows if row.num_model_tokens)


def _only_turn(row: Sequence, turn: int) -> Sequence:
    """Return the row with the tokens that were sampled in other turns as context."""
    is_kept = np.array(
        [s.turn == turn for s in row.segments if s.source is Source.MODEL for _ in range(s.length)]
    )
    segments = tuple(
        replace(s, source=Source.PROMPT, policy_version=None)
        if s.source is Source.MODEL and s.turn != turn
        else s
        for s in row.segments
    )
    return replace(row, segments=segments, inference_logprobs=row.inference_logprobs[is_kept])


def _failures(trial: Trial, recorded: RecordedPolicy) -> tuple[Failure, ...]:
    """Return the failures of all episodes, or that the last one has nothing to train."""
    failures = tuple(failure for episode in trial.episodes for failure in episode.failures)
    if failures or recorded.rows:
        return failures
    if recorded.samples:
        text = "The game's first prompt fills the model's context. Raise max_model_len."
        return (Failure(owner=Owner.ENVIRONMENT, reason=Reason.CONTEXT_FULL, message=text),)
    text = (
        "The agent never asked the policy. Let it call `generate` of the policy that its function "
        "is called with."
    )
    return (Failure(owner=Owner.AGENT, reason=Reason.NOTHING_SAMPLED, message=text),)


def _done_reason(final: PlayedEpisode, max_steps: int) -> DoneReason:
    if final.failures:
        return DoneReason.ERROR
    if final.terminated:
        return DoneReason.SUBMITTED if final.reward else DoneReason.CONTENT
    return DoneReason.MAX_TURNS if len(final.steps) >= max_steps else DoneReason.MAX_LENGTH
