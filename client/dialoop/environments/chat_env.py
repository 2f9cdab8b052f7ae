"""The chat environment, which transforms extend.

    environment = ChatEnv(name="echo", tasks=tasks, transforms=(MaxTurns(2), Rewards([brevity])))
    opening = environment.reset(environment.tasks.get("train", "1"), seed=0)
    outcome = await environment.step(opening.episode, opening.history.respond(message))

Without transforms it gives no reward and never ends an episode: the next prompt is the previous
`full`. In text and tokens mode the same holds for `opening.text` and `opening.tokens`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dialoop.answers import AnswerForm
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.environment import Demonstrate, Given
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.modes import Answered, InputMode, RewardShape
from dialoop.environments.rewards.functions import Rewards, drop_non_finite
from dialoop.environments.rewards.rescoring import episodes_of
from dialoop.environments.tasks.data_loading import DataLoadingPrimer
from dialoop.environments.tasks.source import NoTasks, TaskSource
from dialoop.environments.transform import Traits, Transform
from dialoop.episode import Redo
from dialoop.errors import (
    DialoopError,
    InvalidConfig,
    InvalidHistory,
    InvalidInput,
    PreconditionFailed,
    Unsupported,
)
from dialoop.failures import failure_of
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import Failure, Owner, Trajectory, texts_of
from dialoop.user_functions import call, call_now

_DEMONSTRATED_IN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEnv:
    """A chat environment. It holds no episode, so one can serve any number of them."""

    name: str
    # By default the tasks of its DataLoadingPrimer; without one, callers bring every question.
    tasks: TaskSource = field(default_factory=NoTasks)
    version: str = "1"
    description: str = ""
    transforms: tuple[Transform, ...] = ()
    system_prompt: str = ""
    system_role: str = "system"
    user_role: str = "user"
    policy_role: str = "assistant"
    # What the policy reads and writes: "history", "text" or "tokens".
    input_mode: InputMode | str = InputMode.HISTORY
    # A tokenizer or a model directory; text and tokens mode need one.
    tokenizer: Tokenizer | Path | str | None = None
    # Jinja source of the chat template in text and tokens mode; by default the tokenizer's own.
    chat_template: str | None = None
    # Options of the chat template, such as {"enable_thinking": False}.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Key of the question in the caller's data.
    data_key: str = "query"
    # Strings that end the policy's message, in addition to those of the transforms.
    stop: tuple[str, ...] = ()
    # Accept a `full` that does not begin with the prompt (the trajectory then forks).
    allow_rewrite: bool = False
    demonstrate: Demonstrate | None = None
    # What becomes of an episode whose session was lost. "safe": its steps are taken again, since
    # they depend on task, seed and messages alone and do no harm twice. "snapshot": it goes on from
    # what the transforms put down. "never": it is played from the start.
    redo: Redo | str = Redo.NEVER
    # Whether the chat template shows the policy the tools that it calls in its own syntax.
    tools_in_prompt: bool = True
    _viewer: Any = field(init=False, repr=False, compare=False, default=None)
    _stops: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidConfig("`name` of the environment is empty.", remedy="Give it a name.")
        object.__setattr__(self, "stop", texts_of(self.stop, "stop"))
        object.__setattr__(self, "transforms", _transforms(self.transforms))
        traits = self.traits
        if self.policy_role in (self.system_role, self.user_role, *traits.roles):
            raise InvalidConfig(
                f"Environment {self.name} uses role {self.policy_role} for the policy and others.",
                remedy="Choose a `policy_role` that no other message has.",
            )
        mode = InputMode.parse(self.input_mode)
        if mode is not InputMode.HISTORY and (traits.needs_messages or self.allow_rewrite):
            raise InvalidConfig(
                f"Environment {self.name} is in {mode.name} mode, but has transforms that need "
                "messages.",
                reason=Reason.HISTORY_MODE_ONLY,
                remedy="Use input_mode 'history', or leave tools and allow_rewrite out.",
            )
        if traits.needs_tokens and mode is not InputMode.TOKENS:
            raise InvalidConfig(
                f"Environment {self.name} is in {mode.name} mode, but some transforms read tokens.",
                reason=Reason.TOKENS_MODE_ONLY,
                remedy="Use input_mode 'tokens', or leave those transforms out.",
            )
        set_ = object.__setattr__
        set_(self, "input_mode", mode)
        set_(self, "redo", Redo.parse(self.redo))
        set_(self, "_viewer", _viewer(self, mode))
        set_(self, "_stops", traits.stop)
        if isinstance(self.tasks, NoTasks) and self.primer is not None:
            set_(self, "tasks", self.primer.tasks)

    @property
    def traits(self) -> Traits:
        """Return the traits of all transforms together."""
        traits = Traits(stop=self.stop)
        for transform in self.transforms:
            traits = traits.join(transform.traits)
        if self.tools_in_prompt:
            return traits
        return replace(traits, prompt_tools=(), needs_tool_template=False)

    def bound_to(self, form: AnswerForm) -> ChatEnv:
        """Return this environment for a model that writes its answers in this form."""
        return replace(self, transforms=tuple(t.bound_to(form) for t in self.transforms))

    @property
    def max_turns(self) -> int:
        """Return after how many turns an episode is truncated; 0 means never."""
        return self.traits.max_turns

    @property
    def primer(self) -> DataLoadingPrimer | None:
        """Return the transform that chooses a task when a reset names none, or None."""
        return next((t for t in self.transforms if isinstance(t, DataLoadingPrimer)), None)

    def get_rubric(self) -> tuple[Any, ...]:
        """Return the reward functions of its Rewards transforms, in their order."""
        return tuple(
            function
            for transform in self.transforms
            if isinstance(transform, Rewards)
            for function in transform.functions
        )

    def with_transforms(self, *transforms: Transform) -> ChatEnv:
        """Return the environment with more transforms after its own."""
        return replace(self, transforms=(*self.transforms, *transforms))

    def task_from(self, question: Given) -> TaskData:
        """Return the caller's task: messages, a query, or data with the question at `data_key`."""
        text = question.query or question.data.get(self.data_key, "")
        if not text and question.messages is None:
            keys = ", ".join(sorted(question.data))[:200] or "nothing"
            raise InvalidInput(
                f"The reset of {self.name} brings no '{self.data_key}'. Its data has: {keys}.",
                reason=Reason.DATA_KEY_MISSING,
                remedy=f"Send query, messages, or data with the key '{self.data_key}'.",
            )
        return TaskData(
            key=question.data.get("key", ""),
            question=text,
            answer=question.data.get("answer", ""),
            metadata=dict(question.data),
            messages=question.messages,
        )

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Start an episode with the system prompt, if any, and the question or messages."""
        history = self.first_messages(task)
        episode = Episode(task=task, seed=seed, history=history)
        opening = Opening(episode=episode, info=dict(task.metadata))
        for transform in self.transforms:
            opening = transform.reset(opening)
        if self._viewer is None:
            return opening
        view = self._viewer.open(opening.episode.history)
        return replace(opening, episode=replace(opening.episode, view=view))

    def resume(self, task: TaskData, seed: int, prompt: History) -> Episode:
        """Return the episode whose next prompt is `prompt`, rebuilt from the messages."""
        if self.traits.needs_session or self._viewer is not None:
            raise Unsupported(
                f"Environment {self.name} remembers more than the messages hold.",
                reason=Reason.NEEDS_SESSION,
                remedy="Create a session and step in it.",
            )
        opening = self.reset(task, seed).episode
        if not (self.allow_rewrite or prompt.starts_with(opening.history)):
            raise PreconditionFailed(
                "The history does not begin with the opening of this task and seed.",
                reason=Reason.HISTORY_REWRITTEN,
                remedy="Send the messages from the first one on, and the task they opened with.",
            )
        answers = [m for m in prompt[len(opening.history) :] if m.role == self.policy_role]
        answer = answers[-1] if answers else None
        return replace(opening, history=prompt, step_index=len(answers), answer=answer)

    async def step(self, episode: Episode, answered: Answered) -> Outcome:
        """Add the policy's response, let each transform answer it, then compute rewards."""
        self._require_running(episode)
        start = self._add_response(episode, answered)
        outcome = await self._apply_transforms(start)
        if self._viewer is not None:
            outcome = self._update_view(outcome, len(start.episode.history))
        if not (outcome.is_scorable and outcome.is_rewarded):
            return outcome
        return outcome.with_score(await self._score(_as_sent(outcome.episode, start.episode)))

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """Return the rewards of a finished trajectory; `Episode.state` is empty here."""
        if not (trajectory.terminated or trajectory.truncated):
            raise InvalidInput(
                f"Trajectory {trajectory.trajectory_id} is not finished.",
                reason=Reason.TRAJECTORY_NOT_DONE,
                remedy="Score a trajectory that was terminated or truncated.",
            )
        episodes = episodes_of(trajectory, task, policy_role=self.policy_role)
        return tuple([await self._score(episode) for episode in episodes])

    def demonstration(self, task: TaskData, rng: random.Random) -> History:
        """Return a conversation that solves the task; Unsupported without `demonstrate`.

        Raise TimeIsUp where that takes longer than half a minute.
        """
        if self.demonstrate is None:
            raise Unsupported(
                f"Environment {self.name} has no demonstrations.",
                remedy="Give ChatEnv a `demonstrate` function, or start from a trained model.",
            )
        shown = call_now(self.demonstrate, task, rng, timeout_s=_DEMONSTRATED_IN_S)
        return self.reset(task, 0).episode.history.extend(shown)

    async def snapshot(self, episode: Episode) -> bytes:
        """Return the episode's state and what the transforms hold of it; TypeError if not JSON."""
        held = [await call(transform.snapshot, episode) for transform in self.transforms]
        state = dict(episode.state)
        text = json.dumps({"state": state, "held": [part.hex() for part in held]})
        if json.loads(text)["state"] != state:
            raise TypeError("Transforms remember what JSON would change, such as tuples.")
        return text.encode()

    async def restore(self, episode: Episode, snapshot: bytes) -> Episode:
        """Return the episode with the state of the snapshot."""
        kept = json.loads(snapshot)
        episode = replace(episode, state=kept["state"])
        for transform, held in zip(self.transforms, kept["held"], strict=True):
            episode = await call(transform.restore, episode, bytes.fromhex(held))
        return episode

    async def acquire(self) -> None:
        """Start the transforms in order; when one fails, stop those that have started."""
        for number, transform in enumerate(self.transforms):
            try:
                await call(transform.acquire)
            except BaseException:
                await self._release(self.transforms[:number])
                raise

    def rehearse(self) -> None:
        """Raise InvalidConfig for what of the tasks or transforms would fail in episodes.

        `dialoop config check` and the start of a job ask it once.
        """
        for transform in self.transforms:
            transform.rehearse(self.tasks)

    async def release(self) -> None:
        """Stop the transforms, the last one first."""
        await self._release(self.transforms)

    async def close(self, episode: Episode) -> None:
        """Let each transform free what the episode holds."""
        for transform in self.transforms:
            try:
                await call(transform.close, episode)
            except Exception as error:
                _failure_of(error, transform)

    def problem(self) -> str:
        """Return the transforms' problems, or an empty text."""
        return " ".join(filter(None, (transform.problem() for transform in self.transforms)))

    async def _release(self, transforms: tuple[Transform, ...]) -> None:
        for transform in reversed(transforms):
            try:
                await call(transform.release)
            except Exception as error:
                _failure_of(error, transform)

    def _require_running(self, episode: Episode) -> None:
        if episode.done:
            raise PreconditionFailed(
                "The episode is over.", reason=Reason.EPISODE_DONE, remedy="Reset to start another."
            )

    def first_messages(self, task: TaskData) -> History:
        """Return the messages that a task begins with, before any transform adds to them."""
        if task.messages:
            messages = task.messages.messages
        elif task.question:
            messages = (Message(role=self.user_role, content=task.question),)
        else:
            raise InvalidInput(
                f"Task {task.key} of {self.name} has no question.",
                reason=Reason.TASK_EMPTY,
                remedy="Give the task a question or messages.",
            )
        if self.system_prompt and messages[0].role != self.system_role:
            messages = (Message(role=self.system_role, content=self.system_prompt), *messages)
        return History(messages)

    def _add_response(self, episode: Episode, answered: Answered) -> Outcome:
        if self._viewer is not None:
            return self._add_to_view(episode, answered)
        if not isinstance(answered, ChatHistory):
            raise InvalidHistory(
                f"Environment {self.name} reads messages.",
                reason=Reason.WRONG_MODE,
                remedy="Send the field `history`.",
            )
        completed = self._complete(episode.history, answered)
        response = completed.response or History()
        answers = [m for m in response if m.role == self.policy_role]
        if not answers:
            raise InvalidHistory(
                f"The response has no message of role {self.policy_role}.",
                reason=Reason.RESPONSE_MISSING,
                remedy="Append the policy's message to the prompt.",
            )
        after = replace(
            episode,
            history=completed.require_full(),
            step_index=episode.step_index + 1,
            answer=answers[-1],
        )
        return Outcome(episode=after, response=response)

    def _add_to_view(self, episode: Episode, answered: Answered) -> Outcome:
        """Add text or tokens; if nobody answered the policy, they continue its last message."""
        goes_on = episode.answer is not None and episode.history[-1] is episode.answer
        before = episode.history[:-1] if goes_on else episode.history
        view, content, ended = self._viewer.take_answer(episode.view, answered, before)
        is_complete = ended or content.endswith(self._stops)
        message = Message(role=self.policy_role, content=content, is_complete=is_complete)
        after = replace(
            episode,
            history=before.append(message),
            step_index=episode.step_index + 1,
            answer=message,
            view=view,
        )
        return Outcome(episode=after, response=History((message,)))

    def _update_view(self, outcome: Outcome, covered: int) -> Outcome:
        """Add to the view what the transforms added to the messages."""
        episode = outcome.episode
        if len(episode.history) == covered:
            return outcome
        try:
            view = self._viewer.follow(episode.view, episode.history, covered)
        except DialoopError as error:
            failure = Failure(owner=Owner.ENVIRONMENT, reason=error.reason, message=str(error))
            return outcome.fail(failure)
        return replace(outcome, episode=replace(episode, view=view))

    def _complete(self, prompt: History, answered: ChatHistory) -> ChatHistory:
        if self.allow_rewrite and answered.full and not answered.full.starts_with(prompt):
            full, before, response = answered.full, answered.prompt, answered.response
            if before is None:
                before = full[: len(full) - len(response or full[-1:])]
            return ChatHistory(prompt=before, response=response or full[len(before) :], full=full)
        return answered.completed_from(prompt)

    async def _apply_transforms(self, outcome: Outcome) -> Outcome:
        for transform in self.transforms:
            try:
                outcome = await call(transform.step, outcome)
            except Exception as error:
                return outcome.fail(_failure_of(error, transform))
        return outcome

    async def _score(self, episode: Episode) -> Score:
        score = Score()
        for transform in self.transforms:
            try:
                part = drop_non_finite(await call(transform.score, episode))
                part = _require_shape(part, transform, episode)
            except Exception as error:
                part = Score(failures=(_failure_of(error, transform, Owner.REWARD),))
            score = Score(
                rewards=score.rewards + part.rewards, failures=score.failures + part.failures
            )
        return score


def _transforms(value: Any) -> tuple[Transform, ...]:
    """Return transforms as a tuple, also a single one; InvalidConfig for anything else."""
    transforms = (value,) if isinstance(value, Transform) else tuple(value)
    for number, transform in enumerate(transforms):
        if not isinstance(transform, Transform):
            raise InvalidConfig(
                f"transforms[{number}] is {transform!r:.40}, which is no Transform.",
                reason=Reason.WRONG_TYPE,
                remedy="Give instances of Transform; Rewards([...]) and ToolCalls([...]) make one "
                "of functions.",
            )
    return transforms


def _as_sent(episode: Episode, sent: Episode) -> Episode:
    """Return the episode with the policy's messages as it sent them, for its rewards.

    A transform may have edited them, as AddThinkingPrompt does.
    """
    if episode.history.starts_with(sent.history):
        is_as_sent = episode.answer is sent.answer
        return episode if is_as_sent else replace(episode, answer=sent.answer)
    added = episode.history[len(sent.history) :]
    return replace(episode, history=sent.history.extend(added), answer=sent.answer)


def _require_shape(score: Score, transform: Transform, episode: Episode) -> Score:
    """Return the score, or a failure where an episode's reward comes before its end."""
    shape = transform.traits.reward_shape if score.rewards and not episode.done else None
    if shape is not RewardShape.SPARSE:
        return score
    names = ", ".join(reward.name for reward in score.rewards)
    return Score(
        failures=(
            *score.failures,
            Failure(
                owner=Owner.REWARD,
                reason=Reason.REWARD_BEFORE_END,
                message=f"{type(transform).__name__} gave the reward {names} after step "
                f"{episode.step_index}, before the end of the episode. Return the episode's reward "
                "only when `episode.done`, or declare `Traits(reward_shape=RewardShape.TURN)` and "
                "return the reward of the last step.",
            ),
        )
    )


def _viewer(environment: ChatEnv, mode: InputMode) -> Any:
    tokenizer = environment.tokenizer
    if mode is InputMode.HISTORY:
        return None
    from dialoop.environments.views import viewer_of

    if tokenizer is None:
        raise InvalidConfig(
            f"Environment {environment.name} has no tokenizer, but {mode.name.lower()} mode needs "
            "one.",
            reason=Reason.TOKENIZER_MISSING,
            remedy="Give ChatEnv a tokenizer or the directory of a model.",
        )
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_directory(tokenizer)
    return viewer_of(mode, tokenizer, environment.template_kwargs, environment.chat_template)


def _failure_of(
    error: Exception, transform: Transform, owner: Owner = Owner.ENVIRONMENT
) -> Failure:
    what = f"Transform {type(transform).__name__}"
    return failure_of(error, owner=owner, reason=Reason.TRANSFORM_FAILED, what=what)
