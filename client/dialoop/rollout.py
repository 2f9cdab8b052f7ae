"""Play an episode, play a group: the same code in a notebook and in the collector.

    trajectory = await play(task, sessions=environment, policy=inference, ...)
    player = EpisodePlayer(task, sessions=environment, policy=inference)    # or turn by turn

A failure becomes a value with its owner on the trajectory; it never becomes reward 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import History, ToolDefinition
from dialoop.episode import Redo, Resumed, TurnLog, UpdateMode, update_mode_label
from dialoop.errors import DialoopError, InvalidInput, PreconditionFailed, Unsupported
from dialoop.failures import error_of
from dialoop.reasons import Reason
from dialoop.sequences import ForkCause, Sequence
from dialoop.trajectory import (
    DoneReason,
    Failure,
    Group,
    Owner,
    Reward,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from dialoop.user_functions import call

if TYPE_CHECKING:
    from dialoop.episode import Policy, ResetResult, Sample, Sessions, StepResult


_CLOSE_S = 2.0
LOST_SESSIONS = frozenset({Reason.SESSION_LOST, Reason.SESSION_EXPIRED})
"""Reasons of a session that is gone."""
# Another play goes on where this one failed so, in the session if that lives.
_TAKEN_OVER = frozenset({Reason.SERVICE_AWAY, Reason.LEASE_LOST})
_TURN_SEEDS = 1_000_003  # more than a group has members


@dataclass(slots=True)
class _Recorder:
    """The record of a running episode; only the task that plays it changes it."""

    history: History = field(default_factory=History)
    turns: list[Turn] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    num_covered_messages: int = 0
    environment_version: str = ""
    sample: Sample | None = None
    update_modes: set[UpdateMode] = field(default_factory=set)
    outcome: StepResult | None = None
    tools: tuple[ToolDefinition, ...] = ()

    @property
    def context(self) -> Sequence | None:
        return self.sequences[-1] if self.sequences else None

    @property
    def is_lost(self) -> bool:
        """Return whether something other than the policy failed, so that playing on is useless."""
        return any(failure.owner is not Owner.POLICY for failure in self.failures)

    @property
    def done_reason(self) -> DoneReason:
        """Return why it ended; the policy's own mistakes do not hide the environment's reason."""
        if self.outcome is not None and self.outcome.done:
            return self.outcome.done_reason
        return DoneReason.ERROR if self.is_lost else DoneReason.MAX_TURNS

    @property
    def labels(self) -> dict[str, str]:
        """Return how loads of weights treated its answers, unless they computed keys anew."""
        return update_mode_label(self.update_modes)

    def begin(self, opening: ResetResult) -> None:
        """Keep the environment's first messages and its version."""
        if opening.history.prompt is None and (opening.text or opening.tokens):
            raise Unsupported(
                "The environment is in text or tokens mode, and this plays messages.",
                reason=Reason.HISTORY_MODE_ONLY,
                remedy="Use input_mode 'history'. For a TextSetup call "
                'dialoop_extras.text_environment.play_text; a job has play = "text".',
            )
        self.history = opening.history.require_prompt()
        self.tools = opening.tools
        self.environment_version = opening.environment_version

    def add_sample(self, sample: Sample) -> None:
        """Keep the sampled tokens: appended to the running sequence, or as a fork of it."""
        full = sample.history.require_full()
        continues = self.sequences and sample.sequence.fork_cause is ForkCause.NONE
        if continues:
            self.sequences[-1] = self.sequences[-1].extended_by(sample.sequence)
        else:
            self.sequences.append(sample.sequence)
        self.history = full
        self.num_covered_messages = len(self.history)
        self.sample = sample
        self.update_modes.add(sample.update_mode)

    def add_step(self, outcome: StepResult, step_s: float) -> None:
        """Keep what the environment answered."""
        sample = self.sample
        assert sample is not None
        after = outcome.history.require_prompt()
        start = len(sample.history.require_prompt())
        turn = Turn(
            message_start=start,
            num_messages=max(0, len(after) - start),  # an environment may shorten its past
            rewards=self._fitting_rewards(outcome, sample.sequence.num_model_tokens),
            stop_reason=sample.stop_reason,
            generate_s=sample.generate_s,
            step_s=step_s,
            num_tool_calls=outcome.num_tool_calls,
        )
        self.turns.append(turn)
        self.failures.extend(outcome.failures)
        self.history = after
        self.outcome = outcome

    def _fitting_rewards(self, outcome: StepResult, num_tokens: int) -> tuple[Reward, ...]:
        """Return the rewards; one with a value too many or too few per token is a failure."""
        fitting = []
        for reward in outcome.rewards:
            if len(reward.per_token) in (0, num_tokens):
                fitting.append(reward)
                continue
            text = (
                f"Reward {reward.name} has {len(reward.per_token)} values for {num_tokens} sampled "
                "tokens. Give one for each, or a single number."
            )
            failure = Failure(owner=Owner.REWARD, reason=Reason.RAGGED, message=text)
            self.failures.append(failure)
        return tuple(fitting)

    def add_failure(self, owner: Owner, error: Exception) -> None:
        """Keep a failure with its owner."""
        self.failures.append(error_of(error, owner))


class EpisodePlayer:
    """Plays one episode turn by turn; `play` plays one to its end.

    `trajectory` returns the record at any time. Close the player in any case: that closes its
    session, and cuts the episode off where it was not over.

    Each turn is in the `log` before the environment sees it. The first turn of an episode with a
    log that has some comes after them.
    """

    def __init__(  # noqa: PLR0913 - an episode and who plays it
        self,
        task: Task,
        *,
        sessions: Sessions,
        policy: Policy,
        group_id: str = "",
        sampling: SamplingParams | None = None,
        max_turns: int = 64,
        log: TurnLog | None = None,
    ) -> None:
        _require_parts(task, sessions, policy)
        self.task = task
        self.is_over = False
        self._sessions = sessions
        self._policy = policy
        self._group_id = group_id
        self._sampling = sampling or task.sampling
        self._max_turns = max_turns
        self._log = log or TurnLog()
        self._session_id = self._log.session_id
        self._recorder = _Recorder()
        self._is_open = False

    @property
    def num_turns(self) -> int:
        """Return how many turns were played."""
        return len(self._recorder.turns)

    async def play_turn(self) -> bool:
        """Play the next turn, after the reset before the first; return whether the episode goes on.

        What fails becomes a failure of the trajectory, and ends the episode.
        """
        if not self._is_open:
            self._is_open = True
            goes_on = await self._open() and await self._redo()
            self.is_over = not goes_on or self.num_turns >= self._max_turns
        if not self.is_over:
            goes_on = await self._turn()
            self.is_over = not goes_on or self.num_turns >= self._max_turns
        return not self.is_over

    async def close(self) -> None:
        """Close the session, unless another play goes on in it; closing twice does no harm."""
        was_over, self.is_over = self.is_over, True
        failures = self._recorder.failures
        is_cut = not was_over or any(failure.reason in _TAKEN_OVER for failure in failures)
        if not self._is_open or (is_cut and self._log.turns and self._log.is_durable):
            return
        self._is_open = False
        # Whatever goes wrong here, the trajectory is whole, and the environment's reaper closes it.
        with contextlib.suppress(Exception):
            await call(self._sessions.close_session, self._session_id, timeout_s=_CLOSE_S)

    def trajectory(self) -> Trajectory:
        """Return the record so far; it is neither terminated nor truncated while it goes on."""
        recorder, task = self._recorder, self.task
        sample = recorder.sample
        terminated = recorder.outcome is not None and recorder.outcome.terminated
        return Trajectory(
            trajectory_id=self._log.trajectory_id,
            group_id=self._group_id,
            task_key=task.key,
            seed=task.seed,
            environment=task.environment,
            environment_version=recorder.environment_version,
            history=recorder.history,
            turns=tuple(recorder.turns),
            sequences=tuple(recorder.sequences),
            failures=tuple(recorder.failures),
            sampling=sample.sampling if sample else self._sampling,
            tokenizer_digest=sample.tokenizer_digest if sample else "",
            template_digest=sample.template_digest if sample else "",
            terminated=terminated,
            # by the environment, by max_turns, by a failure, or by whoever closed it
            truncated=self.is_over and not terminated,
            done_reason=recorder.done_reason if self.is_over else DoneReason.NOT_DONE,
            labels=recorder.labels,
        )

    async def _open(self) -> bool:
        """Open the episode; return False where it did not begin."""
        try:
            self._recorder.begin(await self._opening())
        except Exception as error:
            self._recorder.add_failure(Owner.ENVIRONMENT, error)
            return False
        return True

    async def _opening(self) -> ResetResult:
        """Reset the session of recorded turns if it lives or they may be taken again, or a new one.

        A session that lives on answers what it answered before, and does nothing twice. A new one
        goes on from the last snapshot, if the environment takes some.
        """
        if self._log.turns:
            try:
                return await self._reset()
            except DialoopError as error:
                if error.reason not in LOST_SESSIONS or self._log.redo is Redo.NEVER:
                    raise
        await call(self._sessions.create_session, self._session_id, self.task.environment)
        last = self._log.turns[-1] if self._log.turns else None
        if self._log.redo is not Redo.SNAPSHOT or last is None or last.answer is None:
            return await self._reset()
        if not last.answer.snapshot:
            raise PreconditionFailed(
                f"There is no snapshot before turn {last.turn}.",
                reason=Reason.SNAPSHOT_TORN,
                remedy="See the environment's log: it failed, or was too large.",
            )
        return await self._reset(
            resumed=Resumed(
                snapshot=last.answer.snapshot,
                messages=last.sample.history.require_prompt(),
                step_index=last.turn,
            )
        )

    async def _reset(self, **resumed: Any) -> ResetResult:
        opening: ResetResult = await call(
            self._sessions.reset,
            self._session_id,
            episode=1,
            split=self.task.split,
            task_key=self.task.key,
            seed=self.task.seed,
            **resumed,
        )
        return opening

    async def _redo(self) -> bool:
        """Take the recorded turns again; return whether the episode goes on after them.

        What the policy saw before each of them has to be what it saw the first time. The session
        may begin in their midst, with a snapshot.
        """
        goes_on, recorder, turns = True, self._recorder, self._log.turns
        prompts = [recorded.sample.history.prompt for recorded in turns]
        start = prompts.index(recorder.history) if recorder.history in prompts else -1
        for number, recorded in enumerate(turns):
            is_same = start >= 0
            if number > max(start, 0) and recorded.answer is not None:
                is_same = goes_on and recorded.answer.agrees_with(recorder.outcome)
            if not is_same:
                error = PreconditionFailed(
                    f"Before turn {recorded.turn} the environment answered otherwise than the "
                    "first time.",
                    reason=Reason.REDO_DIFFERS,
                    remedy='Declare redo = "never", or make its steps depend on task, seed and '
                    "messages alone.",
                )
                recorder.add_failure(Owner.ENVIRONMENT, error)
                return False
            recorder.add_sample(recorded.sample)
            answer = turns[number + 1].answer if number < start else None
            if answer is not None:
                recorder.add_step(answer, 0.0)
                continue
            goes_on = await self._step(recorded.sample)
            if recorder.is_lost:
                return False
        return goes_on

    async def _turn(self) -> bool:
        """Play one turn (generate, then step); return whether the environment goes on."""
        recorder, turn = self._recorder, self.num_turns
        try:
            # A policy of one's own need not know of tools where there are none.
            offer: dict[str, Any] = {"tools": recorder.tools} if recorder.tools else {}
            if offer:
                _require_tools_taken(self._policy)
            (sample,) = await call(
                self._policy.generate,
                recorder.history,
                context=recorder.context,
                num_context_messages=recorder.num_covered_messages,
                sampling=self._sampling,
                turn=turn,
                **offer,
            )
            recorder.add_sample(sample)
        except Exception as error:
            recorder.add_failure(Owner.INFERENCE, error)
            return False
        if sample.stop_reason is StopReason.CANCELLED:
            recorder.failures.append(
                Failure(
                    owner=Owner.INFERENCE,
                    reason=Reason.CANCELLED,
                    message="Sampling was cancelled.",
                )
            )
            return False
        try:
            await self._log.append(sample, recorder.outcome)
        except Exception as error:
            recorder.add_failure(Owner.REPLAY, error)
            return False
        return await self._step(sample)

    async def _step(self, sample: Sample) -> bool:
        """Take a sampled turn's step; return whether the environment goes on."""
        recorder, started = self._recorder, time.perf_counter()
        try:
            outcome = await call(
                self._sessions.step,
                self._session_id,
                episode=1,
                step_index=self.num_turns,
                history=sample.history,
            )
            recorder.add_step(outcome, time.perf_counter() - started)
        except Exception as error:
            recorder.add_failure(Owner.ENVIRONMENT, error)
            return False
        return not (outcome.done or recorder.is_lost)


async def play(  # noqa: PLR0913 - an episode and who plays it
    task: Task,
    *,
    sessions: Sessions,
    policy: Policy,
    group_id: str = "",
    sampling: SamplingParams | None = None,
    max_turns: int = 64,
    log: TurnLog | None = None,
) -> Trajectory:
    """Play one episode of the task and return its record, whatever happens on the way.

    Only cancellation escapes, and InvalidInput for an argument of another type. `max_turns` bounds
    an environment that never ends its episodes. The episode goes on after the turns of its `log`.
    """
    player = EpisodePlayer(
        task,
        sessions=sessions,
        policy=policy,
        group_id=group_id,
        sampling=sampling,
        max_turns=max_turns,
        log=log,
    )
    try:
        while await player.play_turn():
            pass
    finally:
        await player.close()
    return player.trajectory()


def require(is_sound: bool, name: str, value: object, expected: str) -> None:
    """Raise InvalidInput (WRONG_TYPE) for something else in a value's place."""
    if not is_sound:
        raise InvalidInput(
            f"{name} is {value!r:.40}.", reason=Reason.WRONG_TYPE, remedy=f"Give {expected}."
        )


def require_policy(policy: object) -> None:
    """Raise InvalidInput (WRONG_TYPE) for something else in a policy's place, or for its class."""
    is_policy = callable(getattr(policy, "generate", None)) and not isinstance(policy, type)
    require(is_policy, "policy", policy, "an InferenceClient or a ScriptedPolicy")


def _require_tools_taken(policy: Policy) -> None:
    """Raise Unsupported (TOOLS_UNSUPPORTED) for a policy whose `generate` takes no tools."""
    taken = inspect.signature(policy.generate).parameters.values()
    if not any(field.name == "tools" or field.kind is field.VAR_KEYWORD for field in taken):
        raise Unsupported(
            "The environment has tools to show the policy, and its generate takes no `tools`.",
            reason=Reason.TOOLS_UNSUPPORTED,
            remedy="Take `tools` there and give them to the chat template, or set "
            "tools_in_prompt=False in the environment.",
        )


def _require_parts(task: Task, sessions: Sessions, policy: Policy) -> None:
    require(isinstance(task, Task), "task", task, "a Task")
    require(
        callable(getattr(sessions, "create_session", None)) and not isinstance(sessions, type),
        "sessions",
        sessions,
        "an EnvironmentClient, or LocalEnvironmentClient(environment)",
    )
    require_policy(policy)


async def play_group(
    task: Task,
    *,
    sessions: Sessions,
    policy: Policy,
    group_id: str,
    sampling: SamplingParams | None = None,
    max_turns: int = 64,
) -> Group:
    """Play `task.num_trajectories` episodes of one task at the same time."""
    _require_parts(task, sessions, policy)
    async with asyncio.TaskGroup() as players:
        playing = [
            players.create_task(
                play(
                    task,
                    sessions=sessions,
                    policy=policy,
                    group_id=group_id,
                    sampling=sampling_of_member(sampling or task.sampling, member),
                    max_turns=max_turns,
                )
            )
            for member in range(task.num_trajectories)
        ]
    return Group(
        group_id=group_id, task=task, trajectories=tuple(player.result() for player in playing)
    )


def sampling_of_member(sampling: SamplingParams, member: int) -> SamplingParams:
    """Return one member's sampling: members of a seeded group need different seeds to differ."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + member)


def sampling_of_turn(sampling: SamplingParams, turn: int) -> SamplingParams:
    """Return one turn's sampling: with the same seed each turn would draw the same noise again."""
    if sampling.seed is None or not turn:
        return sampling
    return replace(sampling, seed=sampling.seed + _TURN_SEEDS * turn)
